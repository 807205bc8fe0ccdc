"""Runs an update where its tensors are: on the CPU, blocking, or on a GPU in its stream. update.py defines updates."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

from ..core.errors import SettingError
from ..core.notices import say_once
from . import fallback
from .cores import usable_count
from .library import Scalars, describe, library
from .update import AdamStep, AdamTensors


@functools.cache
def _device_update() -> Callable[[AdamTensors, Scalars], None] | str:
    """The GPU's kernel, or the reason why there is none. Imports triton here, at the first update on a GPU."""
    try:
        found: Callable[[AdamTensors, Scalars], None] = importlib.import_module(".device_adamw", __package__).update_
    except ImportError as error:
        return str(error)
    return found


def adamw_(tensors: AdamTensors, step: AdamStep, *, threads: int | None = None, isa: str | None = None) -> None:
    """Update weight, master and moments in place.

    On the CPU: blocks, without the GIL, until all is done. ``threads``: by default all usable cores. ``isa``: one of
    ``library().isas`` instead of the fastest; every one of them gives the same bits.

    On a GPU: launches on the current stream of the tensors' device, does not wait, and gives the CPU's bits.
    ``threads`` and ``isa`` have no effect there."""
    if threads is not None and threads < 1:
        raise SettingError(f"threads={threads!r} is not valid. Accepted: a whole number of at least 1, or None.")
    if tensors.device.type != "cpu":
        update_there = _device_update()
        if not isinstance(update_there, str):
            update_there(tensors, step.scalars)
            return
        slow = (
            f"GPU kernel: not in use ({update_there}); using torch operations, many passes over memory instead of one"
        )
    else:
        native = library()
        if native is not None:
            if isa is not None and isa not in native.isas:
                raise SettingError(f"isa={isa!r} is not valid on this CPU. Accepted: {', '.join(native.isas)}.")
            update = tensors.bind(step.scalars)
            status = native.c.storm_adamw(update, native.isas[isa or native.isa], threads or usable_count())
            assert status == 0, f"storm_adamw refused a checked update: {status}"
            return
        slow = describe()
    say_once(slow)
    fallback.update_(tensors, step.scalars, 0, tensors.numel)
