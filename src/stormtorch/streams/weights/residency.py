"""Residency: decides which units have a copy on the device, and evicts one when something else needs the room.

All device copies lie in one pool. `Residency` evicts the unit whose next use is farthest, and only for something that
is used sooner. This one rule makes use of any budget: the last units of forward remain for backward, the first units of
backward remain for the next forward, and when all fit, nothing is loaded twice.

A device copy (`Stay`) ends in two steps. *Dropped*: the unit must be loaded again. *Gone*: nothing refers to its bytes
any more, and they return to the pool after the last use. In between, views that autograd or checkpointing hold remain
valid (pools/alias.py), and the unit's next use in training takes the copy back instead of loading another."""

from __future__ import annotations

import enum
import gc
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

import torch

from ...core.errors import OutOfBudget
from ...core.sizes import format_bytes
from ...core.tags import Tag, Tier
from ...memory.books.ledger import Ledger
from ...memory.lanes.flags import Flag
from ...memory.lanes.lane import Event, Lane
from ...memory.pools.pool import DevicePool, Piece
from ..bridge.lock import locked
from ..bridge.torch_private import StorageReference, outside_functorch
from ..units.order import Order
from ..units.unit import Unit
from .graph_twins import GraphTwins

T = TypeVar("T")
_LENT = 2  # units: an operation of user code has weights of one or two
_USES = 2  # of other units, after which it is done with them


@dataclass(eq=False, slots=True)
class Stay:
    """A unit's copy on the device."""

    base: torch.Tensor  # the bytes; a reference to it keeps the copy alive
    memory: torch.Tensor  # over the same bytes, for lanes
    uses: list[Event]  # before these, the bytes must not be overwritten
    places: set[Hashable]  # streams that have computed with them
    loaded: Event  # after it, the bytes are there
    version: int  # of the home image
    rows: set[int] | None = None  # the fused experts that are there; None: all bytes are
    waited: tuple[Hashable, Event] | None = None  # the last place that has waited for ``loaded``, and which
    typed: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)  # ``base`` in other dtypes
    views: dict[int, torch.Tensor] = field(default_factory=dict)  # made by model/views.py, by place
    idle: dict[int, torch.Tensor] = field(default_factory=dict)  # its twins without a graph, by place


@dataclass(eq=False)
class HomeGate:
    """A unit's pending updates, which may still write weights or states, or read gradients. The updater sets it."""

    runs: list[tuple[Flag, int]] = field(default_factory=list)  # the worker's jobs: done when the flag has that value
    stored: Event | None = None  # the store of weights that were updated on the device

    def is_pending(self) -> bool:
        """Whether a job of the worker is not done. Forgets the others."""
        self.runs = [(flag, value) for flag, value in self.runs if not flag.at(value).reached()]
        return bool(self.runs)

    def hold(self, lane: Lane) -> None:
        """Make ``lane`` wait until the update is done and at home."""
        self.is_pending()
        for flag, value in self.runs:
            lane.wait_flag(flag, value)
        if self.stored is not None:
            lane.wait(self.stored)

    def join(self) -> None:
        """Block until the update is done and at home."""
        for flag, value in self.runs:
            flag.wait(value)
        self.runs = []
        if self.stored is not None:
            self.stored.synchronize()
            self.stored = None


class WeightState(enum.Enum):
    """Where a unit's weights are. The home image occupies RAM in every state, but for weights that files have."""

    ABSENT = "absent"  # nothing on the device
    CURRENT = "current"  # a copy in the pool, or some rows of it; until ``stay.loaded`` it is on its way
    STALE = "stale"  # a copy in the pool, older than the home image: nothing uses it, and the next load drops it


@dataclass(eq=False)
class Residence:
    """One unit: its home image, its device copy and their versions."""

    unit: Unit
    image: torch.Tensor  # home: the first ``home_bytes`` of the unit's image; files have the others
    gate: HomeGate = field(default_factory=HomeGate)
    stay: Stay | None = None
    version: int = 0  # of the home image; a device copy of an older version is stale
    updates: int = 0  # optimizer steps, which a graph made before must not span
    installed: int = 0  # modules that are computing with it right now
    outdated: bool = False  # its gradients wait for a step, which will make the device copy stale
    last_load: Event | None = None
    loads: int = 0

    @property
    def state(self) -> WeightState:
        if self.stay is None:
            return WeightState.ABSENT
        return WeightState.CURRENT if self.is_current() else WeightState.STALE

    def is_current(self) -> bool:
        """Whether ``state`` is CURRENT. Cheaper: every use asks for the state of each unit ahead."""
        return self.stay is not None and self.stay.version == self.version

    def comes_by_rows(self) -> bool:
        """Whether its unit is fused experts: which of them come is known when a call names them."""
        return bool(self.unit.row_bytes)


class _Dropped(NamedTuple):
    """A copy that was dropped: tensors of user code may still show it. As `Stay`, without the tensors, which would keep
    it or the pool's block."""

    residence: Residence
    storage: StorageReference
    uses: list[Event]
    places: set[Hashable]
    loaded: Event
    version: int

    @property
    def is_current(self) -> bool:
        """Whether it is there, with the values of the home image."""
        return self.version == self.residence.version and not self.storage.gone


class Borrower(Protocol):
    """Holds bytes of the pool that it can do without."""

    def give_way(self) -> bool:
        """Return them to the pool; False: there are none."""


class Residency:
    """Hands out the pool's room, and evicts units for it. Used by one thread at a time."""

    def __init__(
        self,
        residences: list[Residence],
        *,
        pool: DevicePool,
        ledger: Ledger,
        twins: GraphTwins,
        enlarge: Callable[[int], bool],
    ) -> None:
        """``twins`` let go of each copy that is dropped. ``enlarge`` adds to the pool if the budget has as much
        left."""
        self.residences, self.pool, self._ledger, self.twins = residences, pool, ledger, twins
        self._enlarge = enlarge
        self.lock = threading.RLock()
        self.order = Order(len(residences))
        self.by_storage: dict[int, Residence] = {}  # device copies, by the address of their storage
        self._dropped: dict[int, _Dropped] = {}  # those that are dropped and perhaps not gone
        self.current: Residence | None = None  # the unit in use: dropped only where nothing else is left
        # Units whose weights user code got without a module, and how many units had been used by then. It may still
        # compute with them, so that a dropped copy would keep its memory. Dropped only where nothing else is left, too.
        self._lent: deque[tuple[Residence, int]] = deque(maxlen=_LENT)
        self._uses = 0
        # The last use: its copy, load, direction, and the pool's state.
        self.last_use: tuple[Stay, Event, bool, int] | None = None
        # Units that no prefetch evicts. Farthest next use first is not enough where passes repeat one order and the
        # link is the limit: each prefetch evicts the unit that was used last, which is loaded again a pass later, and
        # so every unit is loaded in every pass. With a fixed resident set, a pass loads each of the other units once.
        self.kept: frozenset[int] = frozenset()
        # Whether the last call of fused experts named so few that those alone were loaded. Then none are prefetched.
        self.by_rows = False
        self.borrowers: list[Borrower] = []  # are asked when nothing else makes room; they add themselves

    # --- room

    @locked
    @outside_functorch
    def room(self, size: int, lane: Lane, tag: Tag) -> Piece:
        """Take ``size`` bytes of the pool for something other than weights; evicts units if it must."""
        return self.insist(lambda: self.take(size, lane, 0), size, tag)

    @locked
    @outside_functorch
    def try_room(self, size: int, lane: Lane, distance: float) -> Piece | None:
        """Like ``room``, but evicts only units whose next use is farther than ``distance``."""
        return self.take(size, lane, distance)

    def give(self, piece: Piece, *last_uses: Event) -> None:
        """Return what ``room`` gave, free after its last uses."""
        self.pool.give(piece, *last_uses)

    def take(self, size: int, lane: Lane, distance: float) -> Piece | None:
        """Take ``size`` bytes; evicts copies whose next use is farther than ``distance`` if it must."""
        while (piece := self.pool.take(size, lane)) is None:
            lent = [residence for residence, at in self._lent if self._uses - at <= _USES]
            victims = [
                (residence not in lent, not self._keeps(residence), self._distance(residence), residence.unit.index)
                for residence in self.residences
                if residence.stay is not None and not residence.installed and residence is not self.current
            ]
            victims = [v for v in victims if v[2] > distance and ((v[0] and v[1]) or distance == 0)]
            if not victims:
                if distance == 0 and self.current is not None and self.current.stay and not self.current.installed:
                    self.drop(self.current)
                    continue
                return None
            self.drop(self.residences[max(victims)[3]])
        return piece

    def insist(self, attempt: Callable[[], T | None], size: int, tag: Tag) -> T:
        """Call ``attempt``, and again after each of: garbage collection, enlarging the pool, each borrower's return.
        Raises if all fail."""
        result = attempt()
        if result is None:
            gc.collect()  # graphs and tracebacks in reference cycles, e.g. after an exception, keep copies alive
            result = attempt()
        if result is None and self._enlarge(size):
            result = attempt()
        for borrower in self.borrowers:
            if result is None and borrower.give_way():
                result = attempt()
        if result is None:
            raise self._no_room(size, tag)
        return result

    def begin_use(self, residence: Residence) -> Residence | None:
        """Make it the unit in use; returns the one before."""
        before, self.current = self.current, residence
        self._uses += before is not residence
        return before

    def end_use(self, units: Sequence[Unit]) -> None:
        """If one of these is the unit in use, it is so no more: it may be evicted."""
        if self.current is not None and self.current.unit in units:
            self.current = None

    def lend(self, unit: Unit) -> None:
        """Note that user code has got weights of ``unit`` without a module."""
        if torch.is_grad_enabled():  # else autograd saves nothing, and a dropped copy ends with the operation
            self._lent.append((self.residences[unit.index], self._uses))

    def may_give_way(self, index: int, distance: float) -> bool:
        """Whether a unit can be evicted for something that is used sooner than at ``distance``."""
        residence = self.residences[index]
        return residence.stay is not None and not residence.installed and self._distance(residence) > distance

    def _distance(self, residence: Residence) -> float:
        index, order = residence.unit.index, self.order
        if not residence.is_current() or (residence.outdated and order.step_comes and not order.comes_again(index)):
            return float("inf")
        return order.distance(index)

    def _keeps(self, residence: Residence) -> bool:
        return residence.unit.index in self.kept and residence.is_current()

    def _no_room(self, size: int, tag: Tag) -> OutOfBudget:
        budget = self._ledger.budgets[Tier.DEVICE]
        held = sum(r.unit.image_bytes for r in self.residences if r.stay is not None and r.installed)
        return OutOfBudget(
            f"Cannot find {format_bytes(size)} on the device for {tag.name}",
            f"{format_bytes(self.pool.taken_bytes)} of the pool's {format_bytes(self.pool.capacity_bytes)} in use, "
            f"{format_bytes(held)} of them by modules that are computing",
            f"The limit is {budget.given}.",
            "Raise it. If a checkpoint of yours spans several blocks, make it one for each block.",
        )

    # --- copies

    def drop(self, residence: Residence) -> None:
        """Forget a unit's copy on the device."""
        stay, residence.stay = residence.stay, None
        assert stay is not None
        self.by_storage.pop(stay.base.data_ptr(), None)
        self._note_dropped(residence, stay)
        if self.last_use is not None and self.last_use[0] is stay:
            self.last_use = None  # it would keep the copy
        self.twins.let_go(residence.unit.index)
        stay.typed.clear()
        stay.views.clear()
        stay.idle.clear()
        del stay

    def _note_dropped(self, residence: Residence, stay: Stay) -> None:
        if len(self._dropped) > len(self.residences):
            self._dropped = {address: old for address, old in self._dropped.items() if not old.storage.gone}
        if stay.rows is None:
            storage = StorageReference(stay.base.untyped_storage())
            self._dropped[stay.base.data_ptr()] = _Dropped(
                residence, storage, stay.uses, stay.places, stay.loaded, stay.version
            )

    def find_dropped(self, address: int) -> Residence | None:
        """The unit of which the storage at ``address`` is a dropped copy, if that has the values of the home image."""
        old = self._dropped.get(address)
        return old.residence if old is not None and old.is_current else None

    def take_back(self, residence: Residence) -> Stay | None:
        """Make a dropped copy of the unit its device copy again; None if there is none that is current."""
        for address, old in self._dropped.items():
            if old.residence is not residence or not old.is_current:
                continue
            storage = old.storage.get()
            if storage is None:
                continue
            with torch.inference_mode(False), torch.no_grad():
                memory = self.pool.bytes_at(address, residence.unit.image_bytes)
                base = torch.empty_like(memory[:0]).set_(storage)
            residence.stay = stay = Stay(base, memory, old.uses, old.places, old.loaded, old.version)
            self.by_storage[address] = residence
            del self._dropped[address]
            return stay
        return None

    @locked
    def drop_at(self, address: int) -> int | None:
        """Drop the copy at device ``address`` and return its unit's index; None if there is none or modules use it."""
        for residence in self.residences:
            if residence.stay is not None and residence.stay.memory.data_ptr() == address and not residence.installed:
                self.drop(residence)
                return residence.unit.index
        return None

    @locked
    def drop_all(self) -> None:
        """Forget every copy on the device."""
        self.current = self.last_use = None
        self._lent.clear()
        for residence in self.residences:
            if residence.stay is not None:
                self.drop(residence)

    def forget(self) -> None:
        """Release home memory: graphs that outlive the session keep this object alive."""
        self.drop_all()
        self.residences.clear()
        self._dropped.clear()
