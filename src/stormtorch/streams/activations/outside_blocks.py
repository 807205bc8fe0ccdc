"""Tensors saved outside of blocks ("loose"), or by a checkpoint of the user's around blocks.

STORM cannot recompute these, so they remain on the device as far as there is room. Their size, and the memory that the
loss takes on top, is not known beforehand. So in the passes that measure, they remain until the device begins to fill;
in later passes, where they exceed all earlier ones, until it is nearly full. Then all of them are offloaded, including
those that have remained so far."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from ...core.sizes import format_bytes
from .offloading.offloaded import Held, Note, Undecided, span_of
from .offloading.stream import ActivationStream
from .plans.room import Gauge


class Loose:
    """Counts loose tensors pass by pass, and decides whether they are offloaded."""

    def __init__(self, stream: ActivationStream, gauge: Gauge) -> None:
        self._stream, self._gauge = stream, gauge
        self._most_way_bytes = self.way_bytes = stream.ahead_bytes  # in-flight budget where there are no blocks
        self._known_bytes = 0  # most that a pass so far has saved
        self._seen: set[tuple[int, int, int]] = set()  # parts of storages
        self.size = self.away_bytes = 0  # of this pass: all bytes, and those offloaded
        self._undecided: list[weakref.ref[Undecided]] = []  # of this pass
        self.leaves = self.is_leaving = False  # whether they are offloaded: in later passes too, in this one
        self.reason = ""

    def begin_pass(self) -> None:
        self._known_bytes = max(self._known_bytes, self.size)
        self.size = self.away_bytes = 0
        self._seen.clear()
        self._undecided.clear()
        self.is_leaving = self.leaves

    def forget(self) -> None:
        """Measure again: inputs are larger now."""
        self._known_bytes = 0
        if not self.is_leaving and self._gauge.is_filling():
            self.leaves = True
            self._send_all()

    def see(self, tensor: torch.Tensor, *, measured: bool, settled: bool) -> None:
        """Count ``tensor``, which is being saved, and decide whether it and later ones are offloaded. ``measured``:
        whether a whole pass was seen; ``settled``: whether its decision is final."""
        if (self.leaves and settled) or not self._stream.travels(tensor):
            return
        first, size = span_of(tensor)
        key = tensor.untyped_storage()._cdata, first, size
        if key in self._seen:
            return
        self._seen.add(key)
        self.size += size
        if not self.is_leaving:
            if measured:  # only in this pass: later ones may be smaller again
                is_full = self.size > self._known_bytes and self._gauge.is_nearly_full()
            else:
                self.leaves = is_full = self._gauge.is_filling()
            if is_full:
                self._send_all()
        self.away_bytes += size if self.is_leaving else 0

    def hold(self, tensor: torch.Tensor) -> Undecided | Held:
        """For autograd: keep ``tensor`` on the device for now."""
        held = self._stream.hold(tensor)
        if isinstance(held, Undecided):
            self._undecided.append(weakref.ref(held))
        return held

    def _send_all(self) -> None:
        self.is_leaving = True
        held, self._undecided = self._undecided, []
        sent = set()
        for undecided in filter(None, (reference() for reference in held)):
            self._stream.send_after_all(undecided)
            if isinstance(undecided.now, Note):
                sent.add(undecided.now.offloaded)
        self.away_bytes += sum(offloaded.size for offloaded in sent)

    def plan_alone(self, room_of: Callable[[int], int]) -> None:
        """Without blocks: keep as much as there is room for; ``room_of`` takes the bytes that were kept so far."""
        room = max(0, room_of(self.size - self.away_bytes + min(self._stream.stay_bytes, self.away_bytes)))
        self.leaves = self.size > room
        self.way_bytes = min(self._most_way_bytes, room // 2)
        self._stream.stay_bytes = room - self.way_bytes
        size = format_bytes(self.size)
        self.reason = (
            f"offloaded, but for the last {format_bytes(self._stream.stay_bytes)} of {size}: no blocks to recompute"
            if self.leaves
            else f"kept: {size} of activations fit"
        )
