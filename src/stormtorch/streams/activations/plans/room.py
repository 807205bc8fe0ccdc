"""Computes how much of the device and of RAM activations may still take."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from ....core.sizes import MiB, format_bytes
from ....core.tags import Tag, Tier
from ....memory.books.ledger import Ledger
from ....memory.cuda.device_meter import DeviceMeter, PeakMeter
from ....memory.host.pinning import PageLock
from ....memory.lanes.build import Lanes
from ....memory.lanes.waits import WaitMeter
from .levels import UNCOUNTED, Levels, Rises
from .plan import BlockProfile, Means

WAY = 16  # 1/16 of the budget may be in flight out, and as much in
_SPARED = 200  # 1/200 of the budget is left alone: levels are noted to the byte, but passes differ slightly
_ROUNDED = 8 * MiB  # at least that much, or 1/50 of small budgets: torch rounds large tensors up by as much as 1 MiB
_ROUNDED_PART = 50
_NEARLY = 8  # nearly full: less than 1/8 of the budget is left
_FILLING = 3  # filling: more than 1/3 is taken, and the loss's memory is not known yet


class Spanned(Protocol):
    """Memory between two addresses."""

    span: tuple[int, int]


class _Nothing:
    span = (0, 0)


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """The lanes that carry activations, the ledger that they are charged to, and the rest of the device's state."""

    device: torch.device
    lanes: Lanes
    ledger: Ledger
    page_lock: PageLock | None
    waits: WaitMeter
    lock: threading.RLock
    # The link's free bytes per second, out and in, for blocks whose forward takes so many seconds; 0: not known.
    rates: Callable[[float], tuple[float, float]]
    meter: DeviceMeter | None  # None: the device is not counted, and has room for everything
    peak: PeakMeter
    limit_bytes: int  # of the device
    foreign_bytes: int = 0  # bytes of this process there that do not count in the limit
    can_recompute: Callable[[nn.Module], bool] = lambda _block: True
    weights: Spanned = field(default_factory=_Nothing)  # where they lie: asking it is faster than `is_streamed`
    is_streamed: Callable[[torch.Tensor], bool] = lambda _tensor: False  # whether a tensor is a streamed weight
    note_of: Callable[[torch.Tensor], Any] = lambda _tensor: None  # the note that autograd keeps of a streamed weight
    steps: Callable[[], int] | None = None  # optimizer steps so far; None: each pass counts as one
    is_settled: Callable[[], bool] = lambda: True  # whether nothing else will take more of the device


class Gauge:
    """Free memory, from the device, the ledger and the notes of earlier passes."""

    def __init__(self, around: Surroundings, fixed_room: int | None) -> None:
        """``fixed_room``: free device bytes to assume, for tests."""
        self.around, self._fixed_room = around, fixed_room
        allocated = around.meter.allocated if around.meter is not None else lambda: 0
        self.levels = Levels(allocated, around.peak.seen_bytes, lambda: around.peak.grown_bytes)
        self._usable = usable_bytes(around)

    def room(self) -> int:
        """Bytes of the VRAM budget that are free now."""
        if self._fixed_room is not None:
            return self._fixed_room
        return self._usable - self.around.meter.allocated() if self.around.meter is not None else UNCOUNTED

    def is_filling(self) -> bool:
        """Whether so much VRAM is taken that a loss which was not seen yet may find too little."""
        around = self.around
        if self._fixed_room is not None or around.meter is None:
            return self._fixed_room is not None and self._fixed_room <= 0
        return around.meter.allocated() - around.foreign_bytes > around.limit_bytes // _FILLING

    def is_nearly_full(self) -> bool:
        return self.room() < self._usable // _NEARLY

    def over(self) -> str:
        """A message if the last passes have taken more than the budget; otherwise empty."""
        around, top = self.around, self.levels.risen_top()
        if top is None or top <= around.limit_bytes + around.foreign_bytes:
            return ""
        return (
            f"A pass has taken {format_bytes(top - around.foreign_bytes)} of the device, and "
            f"{around.ledger.budgets[Tier.DEVICE].given} allows {format_bytes(around.limit_bytes)}: not all saved "
            'tensors can be offloaded. Use a smaller batch, let activations="auto" handle blocks instead of your own '
            "checkpoints, or use storm.linear_cross_entropy for the loss of a large vocabulary."
        )

    def means(self, kinds: list[Hashable], profiles: list[BlockProfile], held: list[int]) -> Means:
        """Resources for blocks of these kinds, given the bytes that each held in the last pass."""
        around, levels = self.around, self.levels
        self._usable = usable_bytes(around, max((profile.input_bytes for profile in profiles), default=0))
        if around.meter is not None and self._fixed_room is None:
            rooms = levels.rooms(self._usable, len(kinds), held, around.peak.unseen_bytes)
            known = list(zip(kinds, profiles, strict=True))
            seen = [levels.rises(kind, saved_bytes=p.saved_bytes) for kind, p in known if levels.has_seen(kind)]
            rises = [levels.rises(kind, saved_bytes=p.saved_bytes, others=seen) for kind, p in known]
        else:
            rooms, rises = [self.room()] * (len(kinds) + 1), [Rises() for _ in kinds]
        out_rate, in_rate = around.rates(sum(profile.forward_s for profile in profiles))
        ledger = around.ledger
        return Means(
            rooms=rooms,
            rises=rises,
            out_bytes_per_s=out_rate,
            in_bytes_per_s=in_rate,
            way_bytes=around.limit_bytes // WAY,
            ram_bytes=ledger.free_bytes(Tier.HOST) + ledger.used_bytes(Tier.HOST, Tag.ACTIVATIONS),
        )


def usable_bytes(around: Surroundings, largest_bytes: int = 0) -> int:
    """Bytes that may be allocated on the device in all; less than the budget, by present knowledge. A hole may be as
    large as the largest result."""
    limit, all_of_it = around.limit_bytes, around.limit_bytes + around.foreign_bytes
    spared = max(limit // _SPARED, min(_ROUNDED, limit // _ROUNDED_PART))
    return all_of_it - max(spared, 0 if around.meter is None else around.meter.lost(all_of_it, largest_bytes))
