"""Loads units to the device, and finds saved weights again.

Weights that autograd saves for backward are recognised by their storage and replaced by a note that names their unit,
so that they keep no memory. When backward asks for one, it is found again wherever the unit lies then
(residency.py)."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence

import torch

from ...core.errors import StaleGraph
from ...core.events import Sink, Span, What
from ...core.tags import Tag
from ...memory.lanes.build import Lanes
from ...memory.lanes.lane import Event
from ...memory.lanes.waits import WaitMeter
from ..bridge.lock import locked
from ..bridge.torch_private import in_backward, outside_functorch, without_torch_function
from ..units.unit import Place, Unit
from .residency import Residence, Residency, Stay

_PLAIN = (torch.Tensor, torch.nn.Parameter)  # other kinds of tensors give their memory a meaning of their own


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
    """Loads units and finds saved weights again. Used by one thread at a time."""

    def __init__(self, residency: Residency, *, lanes: Lanes, waits: WaitMeter, sink: Sink, serial: bool) -> None:
        self.residency, self.residences, self.lock = residency, residency.residences, residency.lock
        self._lanes, self._waits, self._sink, self._serial = lanes, waits, sink, serial
        # Set for updates on the device. ``before_use`` brings the weights there up to date before a use (False: the
        # copy is stale now). ``prepare`` prefetches what their update needs (False: there is no room yet).
        self.before_use: Callable[[Unit, Stay], bool] = lambda _unit, _stay: True
        self.prepare: Callable[[Unit, bool], bool] = lambda _unit, _in_pass: True
        self.prepare_early: Callable[[], None] = lambda: None  # in backward: prefetch for the step that follows
        self.pending: Callable[[Unit], bool] = lambda _unit: False  # whether an update is under way

    @locked
    @outside_functorch
    def use(self, unit: Unit) -> Stay:
        """The unit's weights on the device; compute waits for them. Prefetches what comes next."""
        residence = self.residences[unit.index]
        self.residency.order.visit(unit.index, backward=in_backward())
        self.residency.current = residence
        cause = "updates" if self.pending(unit) else "weights"
        stay = self._present(residence)
        self._waits.wait(stay.loaded, cause, unit.index)
        stay.places.add(self._lanes.compute.place())
        if not self.before_use(unit, stay):
            stay = self._present(residence)
            self._waits.wait(stay.loaded, "weights", unit.index)
            stay.places.add(self._lanes.compute.place())
        self.load_ahead()
        self.residency.last_use = stay, stay.loaded, in_backward(), self.residency.pool.returns
        return stay

    def _is_in_use(self, residence: Residence) -> bool:
        """Whether ``use`` of this unit would do nothing. Backward asks for each weight of a unit by itself."""
        stay, last = residence.stay, self.residency.last_use
        return (
            residence is self.residency.current
            and stay is not None
            and last is not None
            and last[0] is stay
            and last[1] is stay.loaded
            and last[2] == in_backward()
            and last[3] == self.residency.pool.returns  # else prefetch may have room
            and stay.version == residence.version
            and self._lanes.compute.place() in stay.places
            and not self.pending(residence.unit)
        )

    @locked
    def begin_pass(self, training: bool) -> None:
        """A new call of the model begins; ``training``: gradients may follow."""
        self.residency.order.begin(training)

    @locked
    def end_step(self) -> None:
        """Count the passes of a step: the optimizer step was called."""
        self.residency.order.end_step()

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
        if self.residency.current is self.residences[unit.index]:
            self.residency.current = None
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
        for index, distance, in_pass in self.residency.order.upcoming():
            residence = self.residences[index]
            if residence.outdated and self.residency.order.step_comes:
                continue  # the step will change the weights first
            if not in_pass and in_backward() and self.pending(residence.unit):
                return  # the load lane would wait for the worker here, and all later loads with it
            if not residence.is_current():
                if residence.stay is not None:
                    if residence.installed:
                        continue
                    self.residency.drop(residence)
                if self.load(residence, distance) is None:
                    return
            if not self.prepare(residence.unit, in_pass):
                return

    @locked
    @outside_functorch
    def load_kept(self) -> None:
        """Load the units that no prefetch evicts now, in their order."""
        for index in sorted(self.residency.kept):
            residence = self.residences[index]
            if residence.stay is None and self.load(residence, float("inf")) is None:
                return  # memory that user code holds is in the way

    def pack(self, tensor: torch.Tensor) -> SavedWeight | None:
        """Hook for tensors that autograd saves: a note of which weight ``tensor`` is, or None."""
        residence = self.residence_of(tensor)
        if residence is None:
            return None
        offset = int(tensor.storage_offset())
        return SavedWeight(residence.unit.place_at(offset * tensor.itemsize), tensor, offset, residence.updates)

    def residence_of(self, tensor: torch.Tensor) -> Residence | None:
        """The unit of which ``tensor`` is a part on the device; None if it is not a streamed weight."""
        low, high = self.residency.pool.span
        try:
            address = tensor.data_ptr()
        except (RuntimeError, NotImplementedError):  # it has no memory of its own
            return None
        if not low <= address < high:  # most tensors are not weights: this is the cheapest test
            return None
        # Where its storage begins: asking the storage makes an object of it.
        residence = self.residency.by_storage.get(address - int(tensor.storage_offset()) * tensor.itemsize)
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

    def _present(self, residence: Residence) -> Stay:
        if residence.stay is not None and not residence.is_current():
            self.residency.drop(residence)
        if residence.stay is None:
            self._emit(What.MISS, residence.unit)
            size = residence.unit.image_bytes
            if self.residency.insist(lambda: self.load(residence, 0), size) is None:
                raise self.residency.no_room(size, Tag.PARAMETERS)
        assert residence.stay is not None
        return residence.stay

    def load(self, residence: Residence, distance: float) -> Stay | None:
        unit = residence.unit
        lane = self._lanes.load
        piece = self.residency.take(unit.image_bytes, lane, distance)
        if piece is None:
            return None
        uses: list[Event] = []
        places: set[Hashable] = set()
        base = self.residency.pool.lend(piece, uses, places)
        residence.gate.hold(lane)
        lane.copy(piece.bytes, residence.image, Tag.PARAMETERS, unit.index)
        loaded = lane.record()
        uses.append(loaded)  # compute may never wait for the load
        residence.stay = Stay(base, piece.bytes, uses, places, loaded, residence.version)
        residence.last_load = loaded
        residence.loads += 1
        self._emit(What.LOAD, unit)
        self.residency.by_storage[base.data_ptr()] = residence
        if self._serial:
            loaded.synchronize()
        return residence.stay

    def _emit(self, what: What, unit: Unit) -> None:
        now_s = time.perf_counter()
        self._sink(Span(what, now_s, now_s, tag=Tag.PARAMETERS, bytes=unit.image_bytes, unit=unit.index))


def _version(place: Place) -> int:
    with without_torch_function():
        return place.parameter._version
