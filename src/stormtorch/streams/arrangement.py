"""Opens what arranges the activations of a model, on the lanes and books that are there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from ..core.notices import say_once
from ..core.sizes import MiB, format_bytes
from ..core.tags import Tag, Tier
from ..memory.device_meter import DeviceMeter
from ..memory.lanes import Lanes
from ..memory.ledger import Ledger
from ..memory.page_lock import PageLock
from ..memory.peak_meter import PeakMeter
from ..memory.pool import HostPool
from ..memory.wait_meter import WaitMeter
from .activation_plan import BlockProfile, Means, gain_of
from .activations import SMALL_BYTES, ActivationStream
from .levels import UNCOUNTED, Levels, Rises
from .partition import blocks_of
from .saving import Saving
from .settings import Trial

_WAY = 16  # a part of so many of the budget is on its way out, and as much on its way in
_SPARED = 200  # a part of so many of the budget is left alone: levels are noted to the byte, but not all are alike
_ROUNDED = 8 * MiB  # at least so much, or of small budgets a part: torch rounds large tensors up by as much as 1 MiB
_ROUNDED_PART = 50
_NEARLY = 8  # nearly full: less than such a part of the budget is left
_FILLING = 3  # filling: more than such a part is taken, and what the loss takes is not known yet
_TIGHT = 8  # a process that has more than such a part of the budget may run out of it


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What activations find around them: the lanes that carry them, the books that they are charged to."""

    device: torch.device
    lanes: Lanes
    ledger: Ledger
    page_lock: PageLock | None
    waits: WaitMeter
    lock: threading.RLock
    # Bytes per second that the link has free, out and in, for blocks whose forward takes so many seconds; 0: not known.
    rates: Callable[[float], tuple[float, float]]
    meter: DeviceMeter | None  # None: nobody counts, and there is room for all
    peak: PeakMeter
    limit_bytes: int  # of the device
    foreign_bytes: int = 0  # what this process has there that is not part of that
    can_recompute: Callable[[nn.Module], bool] = lambda _block: True


def open_saving(
    model: nn.Module | None,
    mode: str,
    around: Surroundings,
    weights: Callable[[], Iterable[torch.Tensor]],
    trial: Trial,
) -> tuple[Saving, Callable[[], None]]:
    """Arrange the activations of ``model`` by ``mode``; also what ends it, once the lanes are empty.

    ``weights``: parameters and buffers that are on the device for good."""
    device, limit = around.device, around.limit_bytes
    if mode != "keep" and model is not None and any(isinstance(module, nn.RReLU) for module in model.modules()):
        # Autograd saves its noise before the kernel has made it: what would leave is what was there before.
        say_once("activations are kept: nn.RReLU saves what it has not written yet.", key="RReLU")
        mode = "keep"
    slabs = HostPool(
        ledger=around.ledger,
        tag=Tag.ACTIVATIONS,
        page_lock=around.page_lock,
        pageable=around.lanes.ring is not None,
        poison=around.lanes.store if trial.poison else None,
    )
    stream = ActivationStream(
        lanes=around.lanes,
        slabs=slabs,
        waits=around.waits,
        lock=around.lock,
        weights=weights,
        window_bytes=limit // _WAY,
        ahead_bytes=limit // _WAY,
        small_bytes=SMALL_BYTES if trial.small_bytes is None else trial.small_bytes,
        poison=trial.poison,
    )

    meter, usable = around.meter, _usable(around)

    def room() -> int:
        if trial.activation_room is not None:
            return trial.activation_room
        return usable - meter.allocated() if meter is not None else UNCOUNTED

    def has_taken(part: int) -> bool:
        if trial.activation_room is not None:
            return trial.activation_room <= 0
        return meter is not None and meter.allocated() - around.foreign_bytes > limit // part

    def is_nearly_full() -> bool:
        return room() < usable // _NEARLY

    levels = Levels(
        meter.allocated if meter is not None else lambda: 0, around.peak.seen_bytes, lambda: around.peak.grown_bytes
    )

    def over() -> str:
        top = levels.risen_top()
        if top is None or top <= limit + around.foreign_bytes:
            return ""
        return (
            f"A pass has taken {format_bytes(top - around.foreign_bytes)} of the device, and "
            f"{around.ledger.budgets[Tier.DEVICE].given} allows {format_bytes(limit)}: not all that is saved can "
            'leave. Take a smaller batch, let activations="auto" see to blocks instead of checkpoints of '
            "your own, or use storm.linear_cross_entropy for the loss of a large vocabulary."
        )

    def has_held() -> bool:
        top = levels.proven_top()
        return top is not None and top <= usable

    def means(kinds: list[Hashable], profiles: list[BlockProfile], held: list[int]) -> Means:
        nonlocal usable
        largest = max((size for profile in profiles for size, _ in profile.operations.values()), default=0)
        usable = _usable(around, largest)
        gains = [gain_of(profile.parts) for profile in profiles]
        if meter is not None and trial.activation_room is None:
            rooms = levels.rooms(usable - around.peak.unseen_bytes, len(kinds), held)

            def rises_of(kind: Hashable, profile: BlockProfile, others: list[Rises]) -> Rises:
                parts = list(profile.parts.values())
                return levels.rises(kind, saved_bytes=profile.saved_bytes, part_bytes=parts, others=others)

            known = list(zip(kinds, profiles, strict=True))
            seen = [rises_of(kind, profile, []) for kind, profile in known if levels.has_seen(kind)]
            rises = [rises_of(kind, profile, seen) for kind, profile in known]
        else:  # beside a last block that is kept, and others that take as much as one
            saved = profiles[-1].saved_bytes if profiles else 0
            rooms = [room() + gain for gain in (*gains, 0)]
            rooms = [*rooms[: len(kinds) - 1], *(left + saved for left in rooms[max(0, len(kinds) - 1) :])]
            rises = [Rises(whole=gain) for gain in gains]
        out_rate, in_rate = around.rates(sum(profile.forward_s for profile in profiles))
        return Means(
            rooms=rooms,
            rises=rises,
            out_bytes_per_s=out_rate,
            in_bytes_per_s=in_rate,
            way_bytes=limit // _WAY,
        )

    blocks = blocks_of(model) if model is not None else []
    saving = Saving(
        blocks,
        mode=mode,
        stream=stream,
        device=device,
        levels=levels,
        room=room,
        is_tight=lambda: has_taken(_TIGHT),
        is_filling=lambda: has_taken(_FILLING),
        is_nearly_full=is_nearly_full,
        over=over,
        has_held=has_held,
        means=means,
        can_recompute=around.can_recompute,
    )
    saving.attach()

    def end() -> None:
        saving.detach()
        stream.close()

    return saving, end


def _usable(around: Surroundings, largest_bytes: int = 0) -> int:
    """What may be allocated of the device, by whomever; less than the budget, as far as is known so far. A hole may be
    as large as the largest result."""
    limit, all_of_it = around.limit_bytes, around.limit_bytes + around.foreign_bytes
    spared = max(limit // _SPARED, min(_ROUNDED, limit // _ROUNDED_PART))
    return all_of_it - max(spared, 0 if around.meter is None else around.meter.lost(all_of_it, largest_bytes))
