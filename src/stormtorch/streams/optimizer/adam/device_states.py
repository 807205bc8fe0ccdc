"""Adam's states on the device: passing through, or kept there.

A unit that is updated on the device needs its states there. Most states pass through in chunks, each in one of a few
*sets* of device memory: loaded next to the unit's weights, updated, stored home. With VRAM to spare, a unit's states
are *kept*: they are loaded once and remain, as do its gradients from backward to the update. Home memory gets them when
user code reads them or a checkpoint is saved."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import torch

from ....core.tags import Tag
from ....memory.lanes.build import Lanes
from ....memory.lanes.lane import Event, Lane
from ....memory.lanes.waits import WaitMeter
from ....memory.pools.pool import GRAIN, Piece
from ...units.chunks import Chunk, chunks_of
from ...units.unit import Unit
from ...weights.residency import Residency
from ..updater import StatesOnDevice
from .home import AdamHome, AdamState, Staged, Waiting, states_of
from .state_home import StateHome

_SETS = 8  # one being updated, some on their way in, some on their way home
_FEW_SETS = 3
_CHUNK = 8 << 20  # elements: copies of 16 MB and more have the link's full rate
_LEAST_CHUNK = 1 << 20


def kept_bytes(unit: Unit, *, wide: bool) -> int:
    """Bytes of the device's pool that keeping a unit's states and gradients takes."""
    return sum(states_of(unit, wide=wide)) + 4 * GRAIN


class DeviceStates(StatesOnDevice):
    """Moves states to the device and back; the caller decides which units are updated or kept there."""

    def __init__(
        self,
        homes: list[AdamHome],
        state_home: StateHome,
        *,
        lanes: Lanes,
        residency: Residency,
        waits: WaitMeter,
        poison: Lane | None,
    ) -> None:
        self.homes, self._lanes, self._residency, self._waits = homes, lanes, residency, waits
        self._state_home, self._poison = state_home, poison
        self.share_now = 0.0
        self.gave_way = False  # permanently
        self._sets: deque[tuple[list[Piece], Event]] = deque()
        self._sets_out = 0
        self._set_sizes = [0, 0, 0, 0]
        self._chunks: list[list[Chunk]] = []  # of each unit
        self._updated: list[AdamHome] = []  # units whose states passed through since the last backward
        self._expected: list[AdamHome] = []  # those of the step before
        residency.borrowers.append(self)

    # --- what goes where

    def share(self, part: float, room_bytes: int, *, early: bool) -> None:
        """States pass through *sets* of their own, apart from the pool's other pieces: a load of weights must not wait
        for a store of states. With ``early``, sets are filled before the step is called (`stage_early`); the first unit
        is then among those, so that forward can begin. Units with a spare (ahead.py) are the CPU's."""
        passing = list[AdamHome]()
        for home in self._not_kept():
            self.unstage(home)  # the worker may change these states next, and chunk sizes may change
            if home.has_spare:
                home.state = AdamState.HOME
            elif home.unit.trained:
                passing.append(home)
        self._close_sets()
        if part and passing:
            self._open_sets(room_bytes)
        some = bool(self._sets)
        self.share_now = part if some else 0.0
        due = 1 - part if early else 0.0
        for home in passing:
            due += part
            home.state = AdamState.PASSING if some and due >= 1 - 1e-9 else AdamState.HOME
            due -= home.on_device
            if home.on_device:
                self._refresh(home)

    def _open_sets(self, room_bytes: int) -> None:
        self._cut(room_bytes)
        while len(self._sets) < min(_SETS, room_bytes // self._set_bytes):
            pieces = self._room(self._set_sizes)
            if pieces is None:
                return
            self._sets.append((pieces, self._lanes.aside.record()))

    def _cut(self, room_bytes: int) -> None:
        """Choose the chunk size: large, but so that several chunks have room."""
        elements = min(_CHUNK, -(-max(home.unit.state_count for home in self.homes) // 4))
        while True:
            self._chunks = [chunks_of(home.unit, elements) for home in self.homes]
            every = [chunk.sizes for chunks in self._chunks for chunk in chunks]
            self._set_sizes = [max(sizes) for sizes in zip(*every, strict=True)]
            if elements <= _LEAST_CHUNK or room_bytes // self._set_bytes >= _FEW_SETS:
                return
            elements //= 2

    @property
    def _set_bytes(self) -> int:
        return sum(self._set_sizes) + 4 * GRAIN

    def _close_sets(self) -> None:
        """Return the sets to the pool, when none is in use."""
        while self._sets:
            pieces, last_use = self._sets.popleft()
            for piece in pieces:
                self._residency.give(piece, last_use)

    def give_way(self) -> bool:
        """Return the sets to the pool; False: there are none. The CPU does their updates from then on."""
        for home in self._not_kept():
            self.unstage(home)
            home.state = AdamState.HOME
        had_sets = bool(self._sets)
        self.share_now, self.gave_way = 0.0, self.gave_way or had_sets
        self._close_sets()
        return had_sets

    def keepable(self, *, wide: bool) -> dict[int, int]:
        return {home.unit.index: kept_bytes(home.unit, wide=wide) for home in self._not_kept()}

    def _not_kept(self) -> list[AdamHome]:
        """The units whose states lie in RAM alone."""
        return [home for home in self.homes if home.kept is None and not home.on_disk]

    def keep(self, indices: Iterable[int], *, wide: bool) -> None:
        for index in indices:
            home = self.homes[index]
            sizes = states_of(home.unit, wide=wide)
            if home.kept is not None or home.on_disk:
                continue
            if home.waiting is not None and home.waiting.grads.nbytes > sizes[3]:
                continue
            pieces = self._room(sizes)
            if pieces is not None:
                self.unstage(home)
                parts = [piece.bytes for piece in pieces]
                home.kept = Staged(home.whole, pieces, parts, self._lanes.aside.record())
                home.state = AdamState.RESERVED
                self._refresh(home)

    def _refresh(self, home: AdamHome) -> None:
        """Lanes copy the states from now on: not those of a spare, which may not be page-locked."""
        if self._state_home.is_exchanged(home.unit):
            home.gate.join()
            home.taken = None
            self._state_home.refresh(home.unit)

    @property
    def sets_bytes(self) -> int:
        return (len(self._sets) + self._sets_out) * self._set_bytes

    @property
    def kept_units(self) -> frozenset[int]:
        return frozenset(home.unit.index for home in self.homes if home.kept is not None)

    @property
    def kept_bytes(self) -> int:
        return sum(piece.size + GRAIN for home in self.homes if home.kept is not None for piece in home.kept.pieces)

    def let_go(self, home: AdamHome) -> None:
        """Stop keeping a unit's states. Blocks until they are home."""
        self.write_back(home)
        kept, home.kept, home.state = home.kept, None, AdamState.HOME
        home.staged.clear()
        if kept is not None:
            event = self._lanes.compute.record()
            for piece in kept.pieces:
                self._residency.give(piece, kept.loaded, event)

    def _room(self, sizes: list[int]) -> list[Piece] | None:
        lane = self._lanes.aside
        found = [self._residency.try_room(size, lane, 0) for size in sizes]
        pieces = [piece for piece in found if piece is not None]
        if len(pieces) == len(sizes):
            return pieces
        for piece in pieces:
            self._residency.give(piece, lane.record())
        return None

    # --- there

    def staying(self, unit: Unit, size: int) -> torch.Tensor | None:
        kept = self.homes[unit.index].kept
        if kept is None or size > kept.parts[3].nbytes:
            return None
        self._lanes.compute.wait(kept.loaded)  # ... and for the previous user of these bytes
        return kept.parts[3][:size]

    def fits(self, home: AdamHome, grad_bytes: int) -> bool:
        """Whether the unit is updated on the device, with room there for ``grad_bytes`` of gradients."""
        if home.kept is not None:
            return grad_bytes <= home.kept.parts[3].nbytes
        return home.on_device

    def stage(self, home: AdamHome) -> bool:
        """Prefetch the states that an update will need, as far as there is room; False if there is none at all."""
        if home.kept is not None:
            if not home.staged:
                self._load(home, home.kept.chunk, home.kept.pieces, self._lanes.compute.record())
            return True
        chunks = self._chunks[home.unit.index]
        if home.waiting is not None:
            for staged in home.staged:
                self._add_gradients(staged, home.waiting, home.unit.index)
            if not self._sets and not home.staged:
                self._recall()
        while self._sets and len(home.staged) < len(chunks):
            self._stage_next(home, chunks[len(home.staged)])
        return bool(home.staged) or not chunks

    def stage_early(self) -> None:
        """Prefetch states before the step is called, into a set that is free until then. Takes the units that were
        updated in the last step, in that order: they are the likely ones. Fills one set a call, and there are many
        calls in a backward: all sets at once would delay the weights that backward needs first."""
        if self._updated:
            self._expected, self._updated = self._updated, []
        if not self._sets:
            return
        for home in self._expected:
            chunks = self._chunks[home.unit.index]
            if home.kept is None and len(home.staged) < len(chunks) and home.on_device:
                self._stage_next(home, chunks[len(home.staged)])
                return

    def _recall(self) -> None:
        """Free the sets that were filled early for units that turn out not to be updated."""
        for home in self._expected:
            if home.waiting is None and home.kept is None:
                self.unstage(home)

    def can_stage(self, home: AdamHome) -> bool:
        """Whether ``staged`` has a set to work with, or can free one."""
        staged = (other.staged for other in self.homes if other.kept is None)
        return home.kept is not None or bool(self._sets) or any(staged)

    def staged(self, home: AdamHome, done: int = 0) -> Iterator[Staged]:
        """Yield the unit's states on the device chunk by chunk, from state ``done`` on; compute waits for each. Pass
        each to ``updated`` or ``give_back`` before asking for the next."""
        if home.kept is not None:
            self.stage(home)
        chunks = [home.kept.chunk] if home.kept is not None else self._chunks[home.unit.index]
        for chunk in chunks:
            if home.staged and home.staged[0].chunk is not chunk:
                self.unstage(home)
            if chunk.states.stop <= done:
                continue
            if not home.staged:
                if not self._sets:
                    self._give_up_staged()
                self._stage_next(home, chunk)
            if home.waiting is not None:
                self._add_gradients(home.staged[0], home.waiting, home.unit.index)
            # If Ctrl-C ends the wait, the chunk is still staged.
            self._waits.wait(home.staged[0].loaded, "states", home.unit.index)
            yield home.staged.popleft()

    def _stage_next(self, home: AdamHome, chunk: Chunk) -> None:
        pieces, last_use = self._sets.popleft()
        self._sets_out += 1
        self._load(home, chunk, pieces, last_use)

    def _load(self, home: AdamHome, chunk: Chunk, pieces: list[Piece], last_use: Event) -> None:
        """Load a chunk's states into ``pieces``, and its gradients if they exist and are not there."""
        lane, waiting = self._lanes.aside, home.waiting  # the load lane may have weights queued that wait for the CPU
        parts = [piece.bytes[:size] for piece, size in zip(pieces, chunk.sizes[:3], strict=False)]
        staged, remained = Staged(chunk, pieces, parts, last_use), home.state is AdamState.DEVICE
        if home.kept is not None and remained:
            staged.loaded = home.kept.loaded
        try:
            if not remained or (waiting is not None and not waiting.there):
                lane.wait(last_use)
                home.gate.hold(lane)
            if not remained:
                self._load_states(home.unit, staged)
            if waiting is not None:
                self._add_gradients(staged, waiting, home.unit.index)
        except BaseException:
            self._no_longer_staged(home, staged)
            raise
        home.staged.append(staged)

    def _load_states(self, unit: Unit, staged: Staged) -> None:
        lane, states = self._lanes.aside, self._state_home.acquire(unit, staged.chunk)
        try:
            if states.ready is not None:
                lane.wait(states.ready)
            for target, source in zip(staged.parts, states.parts, strict=True):
                if source.nbytes:
                    lane.copy(target, source, Tag.OPTIMIZER, unit.index)
        finally:
            staged.loaded = lane.record()
            self._state_home.release(states, dirty=False, after=staged.loaded)

    def _store(self, home: AdamHome, staged: Staged) -> Event:
        """Store states that compute has been told to update."""
        store = self._lanes.store
        store.wait(self._lanes.compute.record())
        states = self._state_home.acquire(home.unit, staged.chunk, read=False)
        try:
            if states.ready is not None:
                store.wait(states.ready)
            for target, part in zip(states.parts, staged.parts, strict=False):
                if target.nbytes:
                    store.copy(target, part[: target.nbytes], Tag.OPTIMIZER, home.unit.index)
        finally:
            event = store.record()
            self._state_home.release(states, dirty=True, after=event)
        return event

    def _add_gradients(self, staged: Staged, waiting: Waiting, unit: int) -> None:
        """Load the gradients of states that were prefetched before the gradients existed."""
        if len(staged.parts) > 3 or waiting.there:
            return
        lane, which = self._lanes.aside, staged.chunk.gradients(wide=waiting.wide)
        source = waiting.grads[which.start : which.stop]
        there = staged.pieces[3].bytes[: source.nbytes]
        try:
            if waiting.stored is not None:
                lane.wait(waiting.stored)
            if source.nbytes:
                lane.copy(there, source, Tag.OPTIMIZER, unit)
        finally:
            staged.loaded = lane.record()
        staged.parts.append(there)

    def updated(self, home: AdamHome, staged: Staged) -> None:
        """Mark kept states as changed, and store others home: compute has been told to update them."""
        if home.kept is not None:
            home.state = AdamState.DEVICE
            return
        if home not in self._updated:
            self._updated.append(home)
        self.give_back(home, staged, self._store(home, staged))

    def give_back(self, home: AdamHome, staged: Staged, last_use: Event) -> None:
        """Free the set for other units, after ``last_use``."""
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
        """Drop prefetched states."""
        while home.staged:
            self._no_longer_staged(home, home.staged.pop())

    def _no_longer_staged(self, home: AdamHome, staged: Staged) -> None:
        if home.kept is not None:
            home.kept.loaded = staged.loaded
        self.give_back(home, staged, staged.loaded)

    def write_back(self, home: AdamHome) -> None:
        """Block until home memory has the kept states; user code may then change them there."""
        if home.state is AdamState.DEVICE:
            assert home.kept is not None
            self._store(home, home.kept).synchronize()
            home.state = AdamState.RESERVED

    def _give_up_staged(self) -> None:
        """Free a set by dropping a prefetched chunk of a unit that is needed later."""
        home = next(home for home in reversed(self.homes) if home.staged and home.kept is None)
        self._no_longer_staged(home, home.staged.pop())

    def forget(self) -> None:
        """Let go of memory."""
        self.homes, self._updated, self._expected = [], [], []
        self._sets.clear()
