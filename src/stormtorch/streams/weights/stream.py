"""Loads units to the device, and finds saved weights again.

Weights that autograd saves for backward are recognised by their storage and replaced by a note that names their unit,
so that they keep no memory. When backward asks for one, it is found again wherever the unit lies then
(residency.py)."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable, Iterator

import torch

from ...core.events import Sink, Span, What
from ...core.tags import Tag
from ...memory.lanes.build import Lanes
from ...memory.lanes.lane import Event, Lane
from ..bridge.lock import locked
from ..bridge.torch_private import in_backward, outside_functorch, without_torch_function
from ..units.unit import Place, Unit
from .from_files import Files
from .residency import Residence, Residency, Stay, WeightState

_PLAIN = (torch.Tensor, torch.nn.Parameter)  # other kinds of tensors give their memory a meaning of their own


class SavedWeight:
    """The note that autograd keeps instead of a weight: the parameter, and where it lies in its unit's image.

    ``updates`` and ``version`` replace autograd's check for changes between forward and backward, which hooks bypass:
    they count the optimizer steps on the unit and the writes of user code to the parameter. As long as the unit's image
    ``at`` home is the same, there were no such writes.
    """

    __slots__ = ("at", "dtype", "offset", "place", "shape", "stride", "updates", "version")

    def __init__(self, place: Place, tensor: torch.Tensor, offset: int, updates: int, at: int) -> None:
        self.place, self.updates, self.version, self.at = place, updates, version_of(place), at
        self.dtype, self.shape, self.stride, self.offset = tensor.dtype, tensor.shape, tensor.stride(), offset


class ParameterStream:
    """Loads units and finds saved weights again. Used by one thread at a time."""

    def __init__(
        self, residency: Residency, *, lanes: Lanes, sink: Sink, serial: bool, files: Files | None = None
    ) -> None:
        """``files``: those that have the weights of some units; None: all have their home in RAM."""
        self.residency, self.residences, self.lock = residency, residency.residences, residency.lock
        self._pool, self._by_storage = residency.pool, residency.by_storage
        self._lanes, self._sink, self._serial, self.files = lanes, sink, serial, files

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
    def load_kept(self) -> None:
        """Load the units that no prefetch evicts now, in their order."""
        for index in sorted(self.residency.kept):
            residence = self.residences[index]
            if self.residency.by_rows and residence.comes_by_rows():
                continue
            if residence.state is WeightState.ABSENT and self.load(residence, float("inf")) is None:
                return  # memory that user code holds is in the way

    def pack(self, tensor: torch.Tensor) -> SavedWeight | None:
        """Hook for tensors that autograd saves: a note of which weight ``tensor`` is, or None."""
        residence = self.residence_of(tensor)
        if residence is None:
            return None
        offset = int(tensor.storage_offset())
        place = residence.unit.place_at(offset * tensor.itemsize)
        return SavedWeight(place, tensor, offset, residence.updates, residence.version)

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
        start = address - int(tensor.storage_offset()) * tensor.itemsize
        residence = self._by_storage.get(start) or self.residency.find_dropped(start)
        if residence is None or type(tensor) not in _PLAIN or tensor.numel() == 0:
            return None
        return None if tensor.is_conj() or tensor.is_neg() else residence  # lazy views keep the device copy

    def present(self, residence: Residence, rows: frozenset[int] | None = None) -> Stay:
        """The unit's copy on the device, loaded where there is none that is current. Of fused experts at least
        ``rows``; None: all."""
        if not residence.is_current():
            if residence.state is WeightState.STALE:
                self.residency.drop(residence)
            if rows is None:
                self._emit(What.MISS, residence.unit)
            self.residency.insist(lambda: self.load(residence, 0, rows), residence.unit.image_bytes, Tag.PARAMETERS)
        stay = residence.stay
        assert stay is not None
        if stay.rows is not None:
            self._complete(residence, stay, stay.rows, rows)
        return stay

    def load(self, residence: Residence, distance: float, rows: frozenset[int] | None = None) -> Stay | None:
        """Load a unit, or ``rows`` of it, into room of units whose next use is farther than ``distance``; None if there
        is none."""
        unit = residence.unit
        # Without gradients, what user code holds would stand in the way of units that are to stay where they are.
        records = torch.is_grad_enabled() or in_backward()
        if records and (stay := self.residency.take_back(residence)) is not None:
            return stay
        lane = self._lane(unit)
        if self.files is not None and self.files.has(unit):
            self.files.check(unit)
        piece = self.residency.take(unit.image_bytes, lane, distance)
        if piece is None:
            return None
        uses: list[Event] = []
        places: set[Hashable] = set()
        base = self._pool.lend(piece, uses, places)
        try:
            size = self._copy(residence, piece.bytes, rows)
        finally:
            loaded = lane.record()
            uses.append(loaded)  # compute may never wait for the load
        there = None if rows is None else set(rows)
        residence.stay = Stay(base, piece.bytes, uses, places, loaded, residence.version, there)
        residence.last_load = loaded
        residence.loads += 1
        self._emit(What.LOAD, unit, size)
        self._by_storage[base.data_ptr()] = residence
        if self._serial:
            loaded.synchronize()
        return residence.stay

    def _copy(self, residence: Residence, target: torch.Tensor, rows: frozenset[int] | None) -> int:
        """Bring the unit's weights, or ``rows`` of them, to ``target``. Returns the bytes."""
        unit, lane, image = residence.unit, self._lane(residence.unit), residence.image
        if rows is not None:
            residence.gate.hold(lane)
            return self._copy_rows(residence, target, rows, and_others=True)
        if self.files is not None and self.files.has(unit):
            self.files.load(unit, target, lane)  # first: no update writes these
        residence.gate.hold(lane)
        if image.nbytes:
            lane.copy(target[: image.nbytes], image, Tag.PARAMETERS, unit.index)
        return unit.image_bytes

    def _complete(self, residence: Residence, stay: Stay, there: set[int], rows: frozenset[int] | None) -> None:
        """Load those of ``rows`` that are not ``there``; None: all that are not. Compute has not read those rows."""
        missing = (frozenset(range(_experts(residence.unit))) if rows is None else rows) - there
        if not missing:
            return
        try:
            size = self._copy_rows(residence, stay.memory, missing, and_others=False)
        finally:  # after Ctrl-C some are on their way
            stay.loaded = residence.last_load = self._lane(residence.unit).record()
            stay.uses.append(stay.loaded)
        stay.rows = None if rows is None else there | missing
        self._emit(What.LOAD, residence.unit, size)
        if self._serial:
            stay.loaded.synchronize()

    def _copy_rows(self, residence: Residence, target: torch.Tensor, rows: Iterable[int], *, and_others: bool) -> int:
        """Copy these experts from home, neighbours at once; ``and_others``: also parameters without rows. Returns the
        bytes."""
        unit, copied, image, lane = residence.unit, 0, residence.image, self._lane(residence.unit)
        runs, in_files = list(_runs(rows)), list[tuple[int, int]]()
        for place in unit.places:
            row = unit.row_bytes.get(place.index)
            spans = [(first * row, last * row) for first, last in runs] if row is not None else []
            if row is None and and_others:
                spans = [(0, place.count * place.dtype.itemsize)]
            for start, end in spans:
                part = slice(place.at + start, place.at + end)
                if place.in_file:
                    in_files.append((part.start, part.stop))
                else:
                    lane.copy(target[part], image[part], Tag.PARAMETERS, unit.index)
                copied += end - start
        if in_files:
            assert self.files is not None
            self.files.load(unit, target, lane, in_files)
        return copied

    def _lane(self, unit: Unit) -> Lane:
        """The lane that loads the unit. One that waits for a file must not hold up what lies in RAM."""
        return self._lanes.from_files if self.files is not None and self.files.has(unit) else self._lanes.load

    def _emit(self, what: What, unit: Unit, size: int | None = None) -> None:
        now_s = time.perf_counter()
        size = unit.image_bytes if size is None else size
        self._sink(Span(what, now_s, now_s, tag=Tag.PARAMETERS, bytes=size, unit=unit.index))


def _experts(unit: Unit) -> int:
    index, row_bytes = next(iter(unit.row_bytes.items()))
    place = unit.places[index]
    return place.count * place.dtype.itemsize // row_bytes


def _runs(rows: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Neighbours among ``rows``, as (first, one past the last)."""
    first = last = -1
    for row in sorted(rows):
        if row != last:
            if last > first:
                yield first, last
            first = row
        last = row + 1
    if last > first:
        yield first, last


def version_of(place: Place) -> int:
    """Counts the writes of user code to the parameter."""
    with without_torch_function():
        return place.parameter._version
