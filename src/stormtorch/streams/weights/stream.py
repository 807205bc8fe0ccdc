"""Brings units to the device before they are used, and drops them when a unit that is used sooner needs the room.

All of the device's share for parameters is one pool. A unit's copy remains there until another unit that will be used
sooner needs the bytes: the farthest next use is evicted first. That single rule gives all that a larger budget should
give: the last units of forward remain for backward, the first units of backward remain for the next forward, and when
all fit, nothing is loaded twice.

A device copy (`Stay`) ends in two steps. *Dropped*: the streams forget it; the unit must be loaded again. *Gone*:
nothing refers to its bytes any more, and they return to the pool after the last use. In between, views that autograd or
checkpointing hold remain valid (pools/alias.py). Weights that autograd saves for backward are recognised by their
storage and replaced by a note that names their unit, so that they keep no memory. When backward asks for one, it is
found again wherever the unit lies then."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from ...core.errors import OutOfBudget, StaleGraph
from ...core.events import Sink, Span, What
from ...core.sizes import format_bytes
from ...core.tags import Tag, Tier
from ...memory.books.ledger import Ledger
from ...memory.lanes.build import Lanes
from ...memory.lanes.lane import Event, Lane
from ...memory.lanes.waits import WaitMeter
from ...memory.pools.pool import DevicePool, Piece
from ..bridge.lock import locked
from ..bridge.torch_private import in_backward, outside_functorch, without_torch_function
from ..units.order import Order
from ..units.unit import Place, Unit

T = TypeVar("T")
_PLAIN = (torch.Tensor, torch.nn.Parameter)  # other kinds of tensors give their memory a meaning of their own


class Stay:
    """A unit's copy on the device.

    ``loaded``: the event after which its bytes are there. ``uses``: events before which the bytes must not be
    overwritten. ``places``: the streams that have computed with them. ``memory``: the same bytes as ``base``, for
    lanes, which must not keep the copy alive. ``typed``: ``base`` in other dtypes. ``views`` and ``idle``: the tensors
    that model/views.py has made over the bytes, by place; ``idle`` are those made without a graph, with the parameters
    that required a gradient then.
    """

    __slots__ = ("base", "idle", "loaded", "memory", "places", "typed", "uses", "version", "views")

    def __init__(
        self,
        base: torch.Tensor,
        memory: torch.Tensor,
        uses: list[Event],
        places: set[Hashable],
        loaded: Event,
        version: int,
    ) -> None:
        self.base, self.memory, self.uses, self.places = base, memory, uses, places
        self.loaded, self.version = loaded, version
        self.typed: dict[torch.dtype, torch.Tensor] = {}
        self.views: dict[int, torch.Tensor] = {}
        self.idle: tuple[list[Place], dict[int, torch.Tensor]] | None = None


@dataclass(eq=False)
class Residence:
    """One unit: its home image, its device copy and their versions."""

    unit: Unit
    image: torch.Tensor  # home
    stay: Stay | None = None
    version: int = 0  # of the home image; a device copy of an older version is stale
    updates: int = 0  # optimizer steps, which a graph made before must not span
    installed: int = 0  # modules that are computing with it right now
    outdated: bool = False  # its gradients wait for a step, which will make the device copy stale
    last_load: Event | None = None
    loads: int = 0


class SavedWeight:
    """The note that autograd keeps instead of a weight: the parameter, and where it lies in its unit's image.

    ``updates`` and ``version`` replace autograd's check for changes between forward and backward, which hooks bypass:
    they count the optimizer steps on the unit and the writes of user code to the parameter.
    """

    __slots__ = ("dtype", "offset", "place", "shape", "stride", "updates", "version")

    def __init__(self, place: Place, tensor: torch.Tensor, offset: int, updates: int) -> None:
        self.place, self.updates, self.version = place, updates, _version(place)
        self.dtype, self.shape, self.stride, self.offset = tensor.dtype, tensor.shape, tensor.stride(), offset


class ParameterStream:
    """Loads units, evicts them, and finds saved weights again. Used by one thread at a time."""

    def __init__(
        self,
        residences: list[Residence],
        *,
        lanes: Lanes,
        pool: DevicePool,
        ledger: Ledger,
        waits: WaitMeter,
        sink: Sink,
        enlarge: Callable[[int], bool],
        serial: bool,
    ) -> None:
        """``enlarge``: last resort when the pool is full; adds to the pool if the budget has as much left."""
        self.residences, self._lanes, self._pool, self._ledger = residences, lanes, pool, ledger
        self._waits, self._sink, self._enlarge, self._serial = waits, sink, enlarge, serial
        self.lock = threading.RLock()
        self.order = Order(len(residences))
        self._by_storage: dict[int, Residence] = {}
        self._current: Residence | None = None
        self._last_use: tuple[Stay, Event, bool, int] | None = None  # its copy, load, direction, and the pool's state
        self._passes, self._passes_per_step = 0, 1
        self.on_drop: Callable[[Unit], None] = lambda _unit: None
        # Set by the optimizer stream: makes a lane wait until the home image of a unit is up to date.
        self.gate: Callable[[Unit, Lane], None] = lambda _unit, _lane: None
        # Set for updates on the device. ``before_use`` brings the weights there up to date before a use (False: the
        # copy is stale now). ``prepare`` prefetches what their update needs (False: there is no room yet).
        self.before_use: Callable[[Unit, Stay], bool] = lambda _unit, _stay: True
        self.prepare: Callable[[Unit, bool], bool] = lambda _unit, _in_pass: True
        self.give_way: Callable[[], bool] = lambda: False  # return unneeded bytes to the pool (False: there are none)
        self.prepare_early: Callable[[], None] = lambda: None  # in backward: prefetch for the step that follows
        self.pending: Callable[[Unit], bool] = lambda _unit: False  # whether an update is under way
        self.kept: frozenset[int] = frozenset()  # units that no prefetch evicts; see ``keep``

    @locked
    @outside_functorch
    def use(self, unit: Unit) -> Stay:
        """The unit's weights on the device; compute waits for them. Prefetches what comes next."""
        residence = self.residences[unit.index]
        self.order.visit(unit.index, backward=in_backward())
        self._current = residence
        cause = "updates" if self.pending(unit) else "weights"
        stay = self._present(residence)
        self._waits.wait(stay.loaded, cause, unit.index)
        stay.places.add(self._lanes.compute.place())
        if not self.before_use(unit, stay):
            stay = self._present(residence)
            self._waits.wait(stay.loaded, "weights", unit.index)
            stay.places.add(self._lanes.compute.place())
        self.load_ahead()
        self._last_use = stay, stay.loaded, in_backward(), self._pool.returns
        return stay

    def _is_in_use(self, residence: Residence) -> bool:
        """Whether ``use`` of this unit would do nothing. Backward asks for each weight of a unit by itself."""
        stay, last = residence.stay, self._last_use
        return (
            residence is self._current
            and stay is not None
            and last is not None
            and last[0] is stay
            and last[1] is stay.loaded
            and last[2] == in_backward()
            and last[3] == self._pool.returns  # else prefetch may have room
            and stay.version == residence.version
            and self._lanes.compute.place() in stay.places
            and not self.pending(residence.unit)
        )

    @locked
    def begin_pass(self, training: bool) -> None:
        """A new call of the model begins; ``training``: gradients may follow."""
        self.order.begin(training)
        self._passes += training

    @locked
    def end_step(self) -> None:
        """Count the passes of a step: the optimizer step was called."""
        self._passes_per_step, self._passes = max(1, self._passes), 0

    @property
    def _step_comes(self) -> bool:
        """Whether a step should follow this pass, by the last step's count of passes."""
        return self._passes >= self._passes_per_step

    @locked
    def hold(self, unit: Unit) -> None:
        """Forbid eviction until ``release``."""
        self.residences[unit.index].installed += 1

    @locked
    def release(self, units: Sequence[Unit]) -> None:
        """Allow eviction again, once for each unit."""
        for unit in units:
            self.residences[unit.index].installed -= 1
        for unit in units:
            self.leave(unit)

    @locked
    def leave(self, unit: Unit) -> None:
        """Stop treating the unit as the one in use: its room may serve the next."""
        if self._current is self.residences[unit.index]:
            self._current = None
        self.load_ahead()

    @locked
    def changed(self, unit: Unit, *, by_step: bool) -> None:
        """Make device copies stale: the home image is about to change, or has changed."""
        residence = self.residences[unit.index]
        residence.version += 1
        residence.updates += by_step
        residence.outdated = False

    def updated_in_place(self, unit: Unit, stay: Stay) -> None:
        """Take ``stay`` as current: an update on the device has written it; its weights follow to the home image."""
        residence = self.residences[unit.index]
        residence.version += 1
        stay.version = residence.version

    @locked
    @outside_functorch
    def load_ahead(self) -> None:
        """Prefetch the units that should be used next, into room that nothing used sooner needs."""
        if self._serial:
            return
        self._load_units_ahead()
        if in_backward():
            self.prepare_early()

    def _load_units_ahead(self) -> None:
        for index, distance, in_pass in self.order.upcoming():
            residence = self.residences[index]
            if residence.outdated and self._step_comes:
                continue  # the step will change the weights first
            if not in_pass and in_backward() and self.pending(residence.unit):
                return  # the load lane would wait for the worker here, and all later loads with it
            if not self._is_current(residence):
                if residence.stay is not None:
                    if residence.installed:
                        continue
                    self._drop(residence)
                if self._load(residence, distance) is None:
                    return
            if not self.prepare(residence.unit, in_pass):
                return

    @locked
    @outside_functorch
    def room(self, size: int, lane: Lane, tag: Tag) -> Piece:
        """Take ``size`` bytes of the pool for something other than weights; evicts units if it must."""
        piece = self._insist(lambda: self._take(size, lane, 0), size)
        if piece is None:
            raise self.no_room(size, tag)
        return piece

    @locked
    @outside_functorch
    def try_room(self, size: int, lane: Lane, distance: float) -> Piece | None:
        """Like ``room``, but evicts only units whose next use is farther than ``distance``."""
        return self._take(size, lane, distance)

    def give(self, piece: Piece, *last_uses: Event) -> None:
        """Return what ``room`` gave, free after its last uses."""
        self._pool.give(piece, *last_uses)

    @locked
    @outside_functorch
    def keep(self, units: Sequence[int]) -> None:
        """Load these now, in this order, and never evict them for a prefetch.

        Farthest next use first is not enough where passes repeat one order and the link is the limit: each prefetch
        evicts the unit that was used last, which is loaded again a pass later, and so every unit is loaded in every
        pass. With a fixed resident set, a pass loads each of the other units once."""
        self.kept = frozenset(units)
        for index in units:
            residence = self.residences[index]
            if residence.stay is None and self._load(residence, float("inf")) is None:
                return  # memory that user code holds is in the way

    def has(self, index: int) -> bool:
        """Whether the unit's weights are on the device, or on their way there."""
        return self._is_current(self.residences[index])

    @locked
    def drop_at(self, address: int) -> int | None:
        """Drop the copy at device ``address`` and return its unit's index; None if there is none or modules use it."""
        for residence in self.residences:
            if residence.stay is not None and residence.stay.memory.data_ptr() == address and not residence.installed:
                self._drop(residence)
                return residence.unit.index
        return None

    @locked
    def drop_all(self) -> None:
        """Forget every copy on the device."""
        self._current = self._last_use = None
        for residence in self.residences:
            if residence.stay is not None:
                self._drop(residence)

    def forget(self) -> None:
        """Release home memory: graphs that outlive the session keep this object alive."""
        self.drop_all()
        self.residences = []

    def pack(self, tensor: torch.Tensor) -> SavedWeight | None:
        """Hook for tensors that autograd saves: a note of which weight ``tensor`` is, or None."""
        residence = self.residence_of(tensor)
        if residence is None:
            return None
        offset = int(tensor.storage_offset())
        return SavedWeight(residence.unit.place_at(offset * tensor.itemsize), tensor, offset, residence.updates)

    def residence_of(self, tensor: torch.Tensor) -> Residence | None:
        """The unit of which ``tensor`` is a part on the device; None if it is not a streamed weight."""
        low, high = self._pool.span
        try:
            address = tensor.data_ptr()
        except (RuntimeError, NotImplementedError):  # it has no memory of its own
            return None
        if not low <= address < high:  # most tensors are not weights: this is the cheapest test
            return None
        # Where its storage begins: asking the storage makes an object of it.
        residence = self._by_storage.get(address - int(tensor.storage_offset()) * tensor.itemsize)
        if residence is None or type(tensor) not in _PLAIN or tensor.numel() == 0:
            return None
        return None if tensor.is_conj() or tensor.is_neg() else residence  # lazy views keep the device copy

    def unpack(self, saved: SavedWeight) -> torch.Tensor:
        """The weight, wherever its unit lies now."""
        if not self.residences:
            raise StaleGraph("Cannot run backward: the session that this forward ran in was closed.")
        place = saved.place
        residence = self.residences[place.unit.index]
        if (place.trained and saved.updates != residence.updates) or saved.version != _version(place):
            raise StaleGraph(
                f"Cannot run backward: {place.name!r} has been modified by an optimizer step or an in-place operation "
                "after this forward. Call backward before step, or run the forward again."
            )
        stay = residence.stay  # without the lock: backward asks for every weight of a unit by itself
        if stay is None or not self._is_in_use(residence):
            stay = self.use(residence.unit)
        typed = stay.typed.get(saved.dtype)
        if typed is None:
            typed = stay.typed[saved.dtype] = stay.base.view(saved.dtype)
        return typed.as_strided(saved.shape, saved.stride, saved.offset)

    def _is_current(self, residence: Residence) -> bool:
        return residence.stay is not None and residence.stay.version == residence.version

    def _present(self, residence: Residence) -> Stay:
        if residence.stay is not None and not self._is_current(residence):
            self._drop(residence)
        if residence.stay is None:
            self._emit(What.MISS, residence.unit)
            size = residence.unit.image_bytes
            if self._insist(lambda: self._load(residence, 0), size) is None:
                raise self.no_room(size, Tag.PARAMETERS)
        assert residence.stay is not None
        return residence.stay

    def _load(self, residence: Residence, distance: float) -> Stay | None:
        unit = residence.unit
        lane = self._lanes.load
        piece = self._take(unit.image_bytes, lane, distance)
        if piece is None:
            return None
        uses: list[Event] = []
        places: set[Hashable] = set()
        base = self._pool.lend(piece, uses, places)
        self.gate(unit, lane)
        lane.copy(piece.bytes, residence.image, Tag.PARAMETERS, unit.index)
        loaded = lane.record()
        uses.append(loaded)  # compute may never wait for the load
        residence.stay = Stay(base, piece.bytes, uses, places, loaded, residence.version)
        residence.last_load = loaded
        residence.loads += 1
        self._emit(What.LOAD, unit)
        self._by_storage[base.data_ptr()] = residence
        if self._serial:
            loaded.synchronize()
        return residence.stay

    def _emit(self, what: What, unit: Unit) -> None:
        now_s = time.perf_counter()
        self._sink(Span(what, now_s, now_s, tag=Tag.PARAMETERS, bytes=unit.image_bytes, unit=unit.index))

    def _take(self, size: int, lane: Lane, distance: float) -> Piece | None:
        """Take ``size`` bytes; evicts copies whose next use is farther than ``distance`` if it must."""
        while (piece := self._pool.take(size, lane)) is None:
            victims = [
                (not self._keeps(residence), self._distance(residence), residence.unit.index)
                for residence in self.residences
                if residence.stay is not None and not residence.installed and residence is not self._current
            ]
            victims = [victim for victim in victims if victim[1] > distance and (victim[0] or distance == 0)]
            if not victims:
                if distance == 0 and self._current is not None and self._current.stay and not self._current.installed:
                    self._drop(self._current)
                    continue
                return None
            self._drop(self.residences[max(victims)[2]])
        return piece

    def _insist(self, attempt: Callable[[], T | None], size: int) -> T | None:
        """Try ``attempt`` again after garbage collection, freeing and enlarging, until it finds its ``size`` bytes."""
        result = attempt()
        if result is None:
            gc.collect()  # graphs and tracebacks in reference cycles, e.g. after an exception, keep copies alive
            result = attempt()
        if result is None and self._enlarge(size):
            result = attempt()
        if result is None and self.give_way():
            result = attempt()
        return result

    def _distance(self, residence: Residence) -> float:
        if (residence.outdated and self._step_comes) or not self._is_current(residence):
            return float("inf")
        return self.order.distance(residence.unit.index)

    def _keeps(self, residence: Residence) -> bool:
        return residence.unit.index in self.kept and self._is_current(residence)

    def _drop(self, residence: Residence) -> None:
        stay, residence.stay = residence.stay, None
        assert stay is not None
        self._by_storage.pop(stay.base.data_ptr(), None)
        if self._last_use is not None and self._last_use[0] is stay:
            self._last_use = None  # it would keep the copy
        self.on_drop(residence.unit)
        stay.typed.clear()
        stay.views.clear()
        stay.idle = None
        del stay

    def no_room(self, size: int, tag: Tag) -> OutOfBudget:
        budget = self._ledger.budgets[Tier.DEVICE]
        held = sum(r.unit.image_bytes for r in self.residences if r.stay is not None and r.installed)
        return OutOfBudget(
            f"Cannot find {format_bytes(size)} on the device for {tag.name}",
            f"{format_bytes(self._pool.taken_bytes)} of the pool's {format_bytes(self._pool.capacity_bytes)} in use, "
            f"{format_bytes(held)} of them by modules that are computing",
            f"The limit is {budget.given}.",
            "Raise it, or do not accumulate: one backward for each step needs less."
            if tag is Tag.GRADIENTS
            else "Raise it. If a checkpoint of yours spans several blocks, make it one for each block.",
        )


def _version(place: Place) -> int:
    with without_torch_function():
        return place.parameter._version
