"""Adam's states on the device: passing through, or kept there.

Where a unit is updated on the device, its states have to be there. Most pass through one of a few *sets*: loaded next
to the unit's weights, updated, stored home. With VRAM to spare, a unit's states are *kept*: they are loaded once and
stay, as do its gradients from backward to the update, and home memory gets them when somebody looks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import torch

from ..core.tags import Tag
from ..memory.lane import Event, Lane
from ..memory.lanes import Lanes
from ..memory.pool import GRAIN, Piece
from ..memory.wait_meter import WaitMeter
from .adam_home import AdamHome, Staged, states_of
from .parameters import ParameterStream
from .unit import Unit

_SETS = 3  # one being updated, one on its way in, one on its way home


def kept_bytes(unit: Unit, *, wide: bool) -> int:
    """What of the device's pool it takes to keep a unit's states and gradients there."""
    return sum(states_of(unit, wide=wide)) + 4 * GRAIN


class DeviceStates:
    """Decides nothing: which units are updated on the device, and which are kept, it is told."""

    def __init__(
        self,
        homes: list[AdamHome],
        *,
        lanes: Lanes,
        parameters: ParameterStream,
        waits: WaitMeter,
        gate: Callable[[Unit, Lane], None],
        poison: Lane | None,
    ) -> None:
        """``gate`` makes a lane wait until a unit's states at home are up to date."""
        self.homes, self._lanes, self._parameters, self._waits = homes, lanes, parameters, waits
        self._gate, self._poison = gate, poison
        self.share_now = 0.0
        self._sets: deque[tuple[list[Piece], Event]] = deque()
        self._sets_out = 0
        self._set_sizes = [0, 0, 0, 0]

    # --- what goes where

    def share(self, part: float, room_bytes: int) -> None:
        """Let ``part`` of the units that are not kept, evenly spread, be updated on the device from the next step on.

        States pass through *sets* of their own, apart from the pool's other pieces: a load of weights must not wait
        for a store of states. ``room_bytes``: what the pool can spare for them."""
        self.share_now = part
        passing = [home for home in self.homes if home.kept is None]
        if part and passing:
            self._open_sets([home.unit for home in passing], room_bytes)
        else:
            self._close_sets()
        some = len(self._sets) + self._sets_out > 0
        due = 0.0
        for home in passing:
            sizes = zip(states_of(home.unit, wide=False), self._set_sizes, strict=True)
            due += part
            home.on_device = some and due >= 1 - 1e-9 and all(size <= room for size, room in sizes)
            due -= home.on_device

    def _open_sets(self, units: list[Unit], room_bytes: int) -> None:
        sizes = self._set_sizes
        if not self._sets and not self._sets_out:
            sizes = [max(sizes) for sizes in zip(*(states_of(unit, wide=False) for unit in units), strict=True)]
            self._set_sizes = sizes
        count = min(_SETS, room_bytes // (sum(sizes) + 4 * GRAIN))
        while len(self._sets) + self._sets_out < count:
            pieces = self._room(sizes)
            if pieces is None:
                return
            self._sets.append((pieces, self._lanes.aside.record()))

    def _close_sets(self) -> None:
        """Return the sets that are not in use to the pool."""
        while self._sets:
            pieces, last_use = self._sets.popleft()
            for piece in pieces:
                self._parameters.give(piece, last_use)

    def keep(self, indices: Iterable[int], *, wide: bool) -> None:
        """Keep the states of these units on the device, as far as there is room, and update them there.

        ``wide``: with room for gradients of several micro-batches."""
        for index in indices:
            home = self.homes[index]
            sizes = states_of(home.unit, wide=wide)
            if home.kept is not None or (home.waiting is not None and home.waiting.grads.nbytes > sizes[3]):
                continue
            pieces = self._room(sizes)
            if pieces is not None:
                self.unstage(home)
                home.kept = Staged(pieces, [piece.bytes for piece in pieces], self._lanes.aside.record())
                home.on_device, home.fresh, home.dirty = True, False, False

    @property
    def sets_bytes(self) -> int:
        """What of the pool states pass through."""
        return (len(self._sets) + self._sets_out) * (sum(self._set_sizes) + 4 * GRAIN)

    @property
    def kept_bytes(self) -> int:
        """What of the pool is taken for good."""
        return sum(piece.size + GRAIN for home in self.homes if home.kept is not None for piece in home.kept.pieces)

    def let_go(self, home: AdamHome) -> None:
        """Keep a unit's states no longer. Blocks."""
        self.write_back(home)
        kept, home.kept, home.staged, home.on_device = home.kept, None, None, False
        if kept is not None:
            event = self._lanes.compute.record()
            for piece in kept.pieces:
                self._parameters.give(piece, kept.loaded, event)

    def _room(self, sizes: list[int]) -> list[Piece] | None:
        lane = self._lanes.aside
        found = [self._parameters.try_room(size, lane, 0) for size in sizes]
        pieces = [piece for piece in found if piece is not None]
        if len(pieces) == len(sizes):
            return pieces
        for piece in pieces:
            self._parameters.give(piece, lane.record())
        return None

    # --- there

    def staying(self, unit: Unit, size: int) -> torch.Tensor | None:
        """The bytes on the device where ``size`` bytes of the unit's gradients stay until the update, if it is kept."""
        kept = self.homes[unit.index].kept
        if kept is None or size > kept.parts[3].nbytes:
            return None
        self._lanes.compute.wait(kept.loaded)  # and so for whoever had these bytes before
        return kept.parts[3][:size]

    def fits(self, home: AdamHome, grad_bytes: int) -> bool:
        """Whether an update on the device has room for that much of gradients; those of several micro-batches are wider
        than what passes through."""
        if home.kept is not None:
            return grad_bytes <= home.kept.parts[3].nbytes
        return home.on_device and grad_bytes <= self._set_sizes[3]

    def stage(self, home: AdamHome, distance: float) -> bool:
        """Load what an update there will need; False if there is no room yet."""
        lane = self._lanes.aside  # not behind weights that wait for the CPU
        if home.kept is None and not self._sets and not (distance == 0 and self._give_up_staged()):
            return False
        waiting = home.waiting
        if home.kept is not None:
            pieces, last_use = home.kept.pieces, self._lanes.compute.record()
        else:
            pieces, last_use = self._sets.popleft()
            self._sets_out += 1
        parts = [] if home.fresh else [home.exp_avg.view(torch.uint8), home.exp_avg_sq.view(torch.uint8), home.masters]
        copies = [(piece.bytes[: part.nbytes], part) for piece, part in zip(pieces, parts, strict=False)]
        if waiting is not None and not waiting.there:
            copies.append((pieces[3].bytes[: waiting.grads.nbytes], waiting.grads))
        sizes = states_of(home.unit, wide=False)[:3] + ([waiting.grads.nbytes] if waiting is not None else [])
        there = [piece.bytes[:size] for piece, size in zip(pieces, sizes, strict=False)]
        if home.kept is not None and not copies:
            home.staged = Staged(pieces, there, home.kept.loaded)
            return True
        try:
            lane.wait(last_use)
            self._gate(home.unit, lane)
            if waiting is not None and waiting.stored is not None:
                lane.wait(waiting.stored)
            for target, source in copies:
                if source.nbytes:
                    lane.copy(target, source, Tag.OPTIMIZER)
        except BaseException:
            self._no_longer_staged(home, Staged(pieces, there, lane.record()))
            raise
        home.staged = Staged(pieces, there, lane.record())
        return True

    def staged(self, home: AdamHome) -> Staged | None:
        """The unit's states on the device, with compute waiting for them; None if there is no room."""
        if home.staged is not None and home.waiting is not None and len(home.staged.parts) < 4:
            self.unstage(home)  # loaded before the gradients were there
        self._parameters.residences[home.unit.index].installed += 1  # its weights stay
        try:
            if home.staged is None and not self.stage(home, 0):
                return None
        finally:
            self._parameters.residences[home.unit.index].installed -= 1
        staged, home.staged = home.staged, None
        assert staged is not None
        self._waits.wait(staged.loaded, "states")
        return staged

    def updated(self, home: AdamHome, staged: Staged) -> None:
        """Compute has been told to update them. What passes through goes home, with ``home.event`` behind it."""
        store = self._lanes.store
        if home.kept is None:
            for target, part in zip((home.exp_avg, home.exp_avg_sq, home.masters), staged.parts, strict=False):
                if target.nbytes:
                    store.copy(target.view(torch.uint8), part, Tag.OPTIMIZER)
        else:
            home.fresh = home.dirty = True
        home.event = store.record()
        self.give_back(home, staged, home.event)

    def give_back(self, home: AdamHome, staged: Staged, last_use: Event) -> None:
        """The set may serve another unit behind ``last_use``."""
        if home.kept is not None:
            return
        if self._poison is not None:
            self._poison.wait(last_use)
            for piece in staged.pieces:
                self._poison.fill(piece.bytes, 0xFF)
            last_use = self._poison.record()
        self._sets.append((staged.pieces, last_use))
        self._sets_out -= 1

    def unstage(self, home: AdamHome) -> None:
        """Forget what was loaded ahead."""
        if home.staged is not None:
            staged, home.staged = home.staged, None
            self._no_longer_staged(home, staged)

    def _no_longer_staged(self, home: AdamHome, staged: Staged) -> None:
        if home.kept is not None:
            home.kept.loaded = staged.loaded
        self.give_back(home, staged, staged.loaded)

    def write_back(self, home: AdamHome) -> None:
        """Block until home memory has the kept states; user code may change them there."""
        if home.kept is not None and home.dirty:
            store = self._lanes.store
            store.wait(self._lanes.compute.record())
            for target, part in zip((home.exp_avg, home.exp_avg_sq, home.masters), home.kept.parts, strict=False):
                if target.nbytes:
                    store.copy(target.view(torch.uint8), part[: target.nbytes], Tag.OPTIMIZER)
            store.record().synchronize()
        home.fresh = home.dirty = False

    def _give_up_staged(self) -> bool:
        """Free a set by forgetting states that were loaded ahead; False if there are none."""
        for home in reversed(self.homes):
            if home.staged is not None and home.kept is None:
                self.unstage(home)
                return True
        return False

    def forget(self) -> None:
        """Let go of memory."""
        self.homes = []
        self._sets.clear()
