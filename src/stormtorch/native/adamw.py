"""The blocking form of an update: the C kernel on a few threads, or the torch fallback. update.py says what one is."""

from __future__ import annotations

from ..core.errors import SettingError
from ..core.notices import say_once
from . import fallback
from .cores import usable_count
from .library import describe, library
from .update import AdamStep, AdamTensors


def adamw_(tensors: AdamTensors, step: AdamStep, *, threads: int | None = None, isa: str | None = None) -> None:
    """Updates weight, master and moments in place. Blocks, without the GIL, until all is done.

    ``threads``: all usable cores where not given. ``isa``: one of ``library().isas`` instead of the fastest; every one
    of them gives the same bits.
    """
    if threads is not None and threads < 1:
        raise SettingError(f"threads={threads!r} cannot be meant. Accepted: a whole number of at least 1, or None.")
    native = library()
    if native is None:
        say_once(describe())
        fallback.update_(tensors, step.scalars, 0, tensors.numel)
        return
    if isa is not None and isa not in native.isas:
        raise SettingError(f"isa={isa!r} is not one this CPU runs. Accepted: {', '.join(native.isas)}.")
    update = tensors.bind(step.scalars)
    status = native.c.storm_adamw(update, native.isas[isa or native.isa], threads or usable_count())
    assert status == 0, f"storm_adamw refused a checked update: {status}"
