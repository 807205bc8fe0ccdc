"""Saved tensors. `Held` are those that remain on the device. Of offloaded ones: where each is, which views autograd has
saved of it, and the order in which backward asks for them."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator

import torch

from ....core.errors import StaleGraph
from ....core.sizes import round_down
from ....memory.lanes.lane import Event
from ....memory.pools.pool import GRAIN, Piece
from ...bridge.torch_private import VersionProbe


class Held:
    """``tensor`` without its graph, and its version.

    A saved-tensor hook must not return the tensor that it was given: if that is the output of its own node, node and
    tensor would keep each other alive, and a dropped graph would never be freed. Also, with hooks, torch leaves the
    check for in-place changes to them."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()
        self.version = None if tensor.is_inference() else tensor._version

    @property
    def changed(self) -> bool:
        """Whether it was written to after it was saved."""
        return self.version is not None and self.tensor._version != self.version

    def get(self) -> torch.Tensor:
        tensor, version = self.tensor, self.version
        if version is not None and tensor._version != version:
            raise stale(tensor.shape, tensor.dtype)
        return tensor


def stale(shape: torch.Size, dtype: torch.dtype) -> StaleGraph:
    """autograd's own error, with its words for code that matches them."""
    return StaleGraph(
        "Cannot run backward: one of the variables needed for gradient computation has been modified by an inplace "
        f"operation (shape {tuple(shape)}, {dtype})."
    )


class Offloaded:
    """An offloaded tensor: a storage, or the part of one, of which autograd has saved views."""

    def __init__(
        self, ride: Ride, here: torch.Tensor, first: int, place: Hashable, bury: Callable[[Offloaded], None]
    ) -> None:
        """``place``: where compute runs. ``bury`` is called when autograd keeps none of its views any more."""
        self.ride, self.number, self._bury = ride, len(ride.sizes), bury
        self.first, self.size = first, here.nbytes
        self.place = place  # the stream that made it; later, the one that fetched it
        self.here: torch.Tensor | None = here  # bytes on the device, from the beginning; None once they are in RAM only
        self.slab: Piece | None = None  # in RAM
        self.stored: Event | None = None
        self.back: torch.Tensor | None = None  # bytes on the device again, or on their way
        self.loaded: Event | None = None
        self.arrivals = 0  # how often it came back
        self.asked_for = False  # since the last arrival
        self.notes = 0  # ever made for autograd
        self.served = 0  # notes that were served since the last arrival
        self.ended: deque[int] = deque()  # for each deleted note: the arrival at which it was served last

    def has_served_all(self) -> bool:
        """Whether every note that autograd still keeps was served from this arrival. Needs the stream's lock."""
        while self.ended:
            self.served -= self.ended.popleft() == self.arrivals != 0
            self.notes -= 1
        return self.served >= self.notes

    def __del__(self) -> None:
        self._bury(self)


class Note:
    """The object that autograd keeps instead of an offloaded tensor."""

    __slots__ = ("arrival", "dtype", "offloaded", "offset", "probe", "shape", "stride")

    def __init__(self, offloaded: Offloaded, tensor: torch.Tensor) -> None:
        self.arrival = 0  # the arrival from which it was served last
        self.offloaded, self.probe = offloaded, None if tensor.is_inference() else VersionProbe(tensor)
        self.dtype, self.shape, self.stride = tensor.dtype, tensor.shape, tensor.stride()
        self.offset = int(tensor.storage_offset()) - offloaded.first // tensor.itemsize
        offloaded.notes += 1

    def __del__(self) -> None:
        # Any thread may run this at any time, while another one counts: an append is atomic, a subtraction is not.
        self.offloaded.ended.append(self.arrival)

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """The saved tensor, as a view of ``memory``, a copy of what was offloaded."""
        size = self.dtype.itemsize
        typed = memory[: memory.nbytes // size * size].view(self.dtype)
        return typed.as_strided(self.shape, self.stride, int(typed.storage_offset()) + self.offset)


class Undecided:
    """The object that autograd keeps for a tensor that is on the device and may be offloaded later in this forward."""

    __slots__ = ("__weakref__", "now", "place", "span")

    def __init__(self, tensor: torch.Tensor, place: Hashable) -> None:
        self.now: Held | Note = Held(tensor)
        self.span = span_of(tensor)  # a held tensor no longer knows what it is a view of
        self.place = place  # the stream that made it


class Ride:
    """A forward pass and its backward: offloaded tensors in the order of saving, and the order of requests."""

    def __init__(self, past: Ride | None) -> None:
        """``past``: the last pass that had a backward."""
        self.sizes: list[int] = []
        self.offloaded: list[weakref.ref[Offloaded]] = []
        self.asked: dict[int, None] = {}  # by number
        self.latest: int | None = None  # the last of them
        self.expected_sizes = past.sizes if past is not None else []
        self.expected_bytes = sum(self.expected_sizes)
        self._expected_order = list(past.asked) if past is not None else []
        self.as_expected = past is not None  # whether this pass has equalled the last one so far
        self.saved_bytes = 0
        self._order: list[int] = []
        self._position: dict[int, int] = {}

    def add(self, offloaded: Offloaded) -> None:
        expected = self.expected_sizes[offloaded.number : offloaded.number + 1]
        self.as_expected = self.as_expected and expected == [offloaded.size]
        self.sizes.append(offloaded.size)
        self.offloaded.append(weakref.ref(offloaded))
        self.saved_bytes += offloaded.size
        self._order = []

    def to_come(self) -> Iterator[Offloaded]:
        """The offloaded tensors that backward should ask for next, in that order."""
        if not self._order:
            known = self.as_expected and len(self.expected_sizes) == len(self.sizes)
            self._order = self._expected_order if known else list(reversed(range(len(self.sizes))))
            self._position = {number: position for position, number in enumerate(self._order)}
        first = 0 if self.latest is None else self._position.get(self.latest, len(self._order)) + 1
        for number in self._order[first:]:
            offloaded = self.offloaded[number]()
            if offloaded is not None:
                yield offloaded


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of the storage that is offloaded with ``tensor``, and the number of bytes.

    The whole storage if it was made as one tensor of which this is a view: other views will be saved too. Only the
    tensor's own part if the storage was cut by hand, as LSTM cells do with ``unsafe_chunk``: then parts of it are
    written in place and the versions of the other parts do not tell; and also if it is a small part.

    The first byte is a multiple of the allocators' alignment: otherwise kernels would find the view aligned
    differently, and some would then add up in another order."""
    size = tensor.untyped_storage().nbytes()
    root = tensor._base if tensor._is_view() and tensor._base is not None else tensor
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = int(tensor.storage_offset()) * tensor.itemsize
    end = begin + (last + 1) * tensor.itemsize
    first = round_down(begin, GRAIN)
    whole = root.nbytes == size and 2 * (end - first) > size
    return (0, size) if whole else (first, end - first)
