"""Offloads activations to RAM while compute goes on, and prefetches them just before backward needs them.

Tensors that autograd saves are handled by storage: views of one storage are one offloaded tensor (`Parcel`), which is
copied once and comes back with every view's exact strides. Its states:

    here      on the device; a copy to RAM may be on its way
    away      in RAM only
    back      on the device again, or on its way

**Offloading.** The store lane copies a tensor as soon as the operation that saved it has been launched. The device's
copy is held in a queue until the queue exceeds ``window_bytes``; then compute waits for the oldest store, on the GPU,
and the memory returns to torch. So the peak is bounded however far the host runs ahead, without ``record_stream``.

**Coming back.** The order in which backward asks is remembered from the pass before, or assumed to be the reverse of
the order of saving. Whenever backward has asked for one tensor, the next ones are prefetched, up to ``ahead_bytes``.
Those saved last are never offloaded: backward begins with them.

**RAM runs out.** Where ``ram`` has no room for a tensor, it remains on the device, unless ``must_leave`` makes that an
error; the caller reads ``refused_bytes`` and may recompute instead.

**Ending.** A parcel lives as long as autograd keeps notes of it. Dropped graphs free their parcels and ``retain_graph``
keeps them, without any call.

**Several user streams.** Torch hands freed memory out again on the stream that allocated it, in that stream's order. So
compute may wait for a lane on the GPU, and free memory at once, only where one stream has all memory. As soon as a
second stream has some, memory that a lane still uses is held until that lane is done with it."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import torch

from ...core.errors import OutOfBudget, StaleGraph
from ...core.sizes import KiB, round_down
from ...core.tags import Tag
from ...memory.cuda.allocator import streams_with_memory
from ...memory.lanes.build import Lanes
from ...memory.lanes.lane import Event
from ...memory.lanes.waits import WaitMeter
from ...memory.pools.device import bytes_for_graph, bytes_of
from ...memory.pools.pool import GRAIN, HostPool, Piece
from ..bridge.lock import locked
from ..bridge.torch_private import (
    StorageReference,
    VersionProbe,
    has_plain_storage,
    is_made_from_weights,
    sequence_number,
)
from .held import Held, stale

SMALL_BYTES = 64 * KiB  # smaller tensors cost more to move than to keep


class Parcel:
    """An offloaded tensor: a storage, or the part of one, of which autograd has saved views."""

    __slots__ = (
        "__weakref__",
        "_stream",
        "arrivals",
        "asked_for",
        "back",
        "ended",
        "first",
        "here",
        "loaded",
        "notes",
        "number",
        "place",
        "ride",
        "served",
        "size",
        "slab",
        "stored",
    )

    def __init__(self, stream: ActivationStream, ride: Ride, here: torch.Tensor, first: int) -> None:
        self._stream, self.ride, self.number = stream, ride, len(ride.sizes)
        self.first, self.size = first, here.nbytes
        self.place = stream.place()  # the stream that made it; later, the one that fetched it
        self.here: torch.Tensor | None = here  # bytes
        self.slab: Piece | None = None
        self.stored: Event | None = None
        self.back: torch.Tensor | None = None
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
        self._stream.bury(self)


class Note:
    """The object that autograd keeps instead of an offloaded tensor."""

    __slots__ = ("arrival", "dtype", "offset", "parcel", "probe", "shape", "stride")

    def __init__(self, parcel: Parcel, tensor: torch.Tensor) -> None:
        self.arrival = 0  # the arrival from which it was served last
        self.parcel, self.probe = parcel, None if tensor.is_inference() else VersionProbe(tensor)
        self.dtype, self.shape, self.stride = tensor.dtype, tensor.shape, tensor.stride()
        self.offset = int(tensor.storage_offset()) - parcel.first // tensor.itemsize
        parcel.notes += 1

    def __del__(self) -> None:
        # Any thread may run this at any time, while another one counts: an append is atomic, a subtraction is not.
        self.parcel.ended.append(self.arrival)

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """The saved tensor, as a view of ``memory``, a copy of its parcel."""
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
        self.parcels: list[weakref.ref[Parcel]] = []
        self.asked: dict[int, None] = {}  # numbers of parcels
        self.latest: int | None = None  # the last of them
        self.expected_sizes = past.sizes if past is not None else []
        self.expected_bytes = sum(self.expected_sizes)
        self._expected_order = list(past.asked) if past is not None else []
        self.as_expected = past is not None  # whether this pass has equalled the last one so far
        self.saved_bytes = 0
        self._order: list[int] = []
        self._position: dict[int, int] = {}

    def add(self, parcel: Parcel) -> None:
        expected = self.expected_sizes[parcel.number : parcel.number + 1]
        self.as_expected = self.as_expected and expected == [parcel.size]
        self.sizes.append(parcel.size)
        self.parcels.append(weakref.ref(parcel))
        self.saved_bytes += parcel.size
        self._order = []

    def to_come(self) -> Iterator[Parcel]:
        """The offloaded tensors that backward should ask for next, in that order."""
        if not self._order:
            known = self.as_expected and len(self.expected_sizes) == len(self.sizes)
            self._order = self._expected_order if known else list(reversed(range(len(self.sizes))))
            self._position = {parcel: position for position, parcel in enumerate(self._order)}
        first = 0 if self.latest is None else self._position.get(self.latest, len(self._order)) + 1
        for number in self._order[first:]:
            parcel = self.parcels[number]()
            if parcel is not None:
                yield parcel


class ActivationStream:
    """Offloads tensors and fetches them. ``pack`` and ``unpack`` are autograd's saved-tensor hooks."""

    def __init__(
        self,
        *,
        lanes: Lanes,
        slabs: HostPool,
        waits: WaitMeter,
        lock: threading.RLock,
        weights: Callable[[], Iterable[torch.Tensor]],
        window_bytes: int,
        ahead_bytes: int,
        small_bytes: int = SMALL_BYTES,
    ) -> None:
        """``weights``: parameters and buffers permanently on the device. They and their casts are not offloaded."""
        self._lanes, self._slabs, self._waits, self.lock = lanes, slabs, waits, lock
        self._weights, self._small_bytes = weights, small_bytes
        self._addresses: set[int] = set()  # of the weights
        self.window_bytes, self.ahead_bytes = window_bytes, ahead_bytes
        self.is_strict = False  # whether ``ahead_bytes`` holds even where it is less than one tensor
        self._leaving: deque[tuple[weakref.ref[Parcel], int]] = deque()  # with their sizes
        self._leaving_bytes = 0
        self._staying: list[tuple[weakref.ref[Parcel], int]] = []  # not offloaded: backward will begin with them
        self._ahead_bytes = 0
        self._known: dict[tuple[int, int, int, int], tuple[StorageReference, weakref.ref[Parcel]]] = {}
        self._ride = Ride(None)
        self._past: Ride | None = None
        self.stay_bytes = 0  # bytes saved last that need not be offloaded, beside those in the window
        self._lingering: deque[tuple[torch.Tensor, Event]] = deque()
        self._unsent: deque[tuple[weakref.ref[Parcel], int]] = deque()  # saved by an operation that may not have run
        self._places: set[Hashable] = set()  # the streams that have computed or have memory
        self._passes = 0
        self.must_leave = False  # whether a lack of RAM is an error
        self.refused_bytes = 0  # of this pass: bytes that remained because RAM is short
        self._least_refused = 0  # of this pass: no tensor as large as that is tried again; 0: none was refused
        self._orphans: deque[tuple[torch.Tensor, Event, int]] = deque()  # with their part of _ahead_bytes
        self.misses = 0  # tensors that were not prefetched when backward asked for them
        self._closed = False

    def place(self) -> Hashable:
        """The place where compute runs: on a GPU, the stream."""
        place = self._lanes.compute.place()
        self._places.add(getattr(place, "cuda_stream", place))
        return place

    def _free_behind(self, memory: torch.Tensor, event: Event) -> None:
        """Release ``memory``, which a lane uses until ``event``, where compute has several streams."""
        self._lingering.append((memory, event))
        self._lingering = deque(entry for entry in self._lingering if not entry[1].done())
        while sum(memory.nbytes for memory, _ in self._lingering) > self.window_bytes:
            self._lingering.popleft()[1].synchronize()  # the host waits, to bound the bytes

    @locked
    def travelling_bytes(self) -> int:
        """Bytes of this pass that are on the device: in flight, or not sent."""
        alive = filter(None, (reference() for reference in self._ride.parcels))
        return sum(parcel.size for parcel in alive if parcel.here is not None or parcel.back is not None)

    # --- in forward

    @locked
    def begin_pass(self) -> None:
        """Begin a forward; the tensors it saves are compared with those of the last one."""
        if self._lanes.device.type == "cuda" and (self._passes < 4 or self._passes % 16 == 0):
            self._places |= streams_with_memory(self._lanes.device)
        self._passes += 1
        self._unsent.clear()
        self._sweep()
        if self._ride.asked:
            self._past = self._ride
        self._ride = Ride(self._past)
        self._staying = []
        self.refused_bytes = self._least_refused = 0
        plain = filter(has_plain_storage, self._weights())
        self._addresses = {weight.untyped_storage().data_ptr() for weight in plain}
        self._known = {key: entry for key, entry in self._known.items() if not entry[0].gone and entry[1]() is not None}

    @locked
    def send_all(self) -> None:
        """Offload all tensors saved so far: no operation is running."""
        if not self._closed:
            self._send_what_is_made(now=True)

    @locked
    def pack(self, tensor: torch.Tensor, *, made: bool = False) -> Any:
        """For autograd: a note of ``tensor``, or ``Held`` if it remains. ``made``: its operation has run."""
        self._sweep()
        self._send_what_is_made(now=made)
        return self.send(tensor, made=made) if not self._closed and self.travels(tensor) else Held(tensor)

    def send(self, tensor: torch.Tensor, span: tuple[int, int] | None = None, *, made: bool = False) -> Note:
        """Offload ``tensor`` unless that was done before; returns a note of it. ``span``: ``span_of`` it, if known."""
        first, size = span or span_of(tensor)
        storage = tensor.untyped_storage()
        version = -1 if tensor.is_inference() else tensor._version
        key = (storage._cdata, first, size, version)
        known = self._known.get(key)
        parcel = known[1]() if known is not None and not known[0].gone else None
        if parcel is None:
            parcel = Parcel(self, self._ride, bytes_of(tensor)[first : first + size], first)
            self._known[key] = (StorageReference(storage), weakref.ref(parcel))
            self._ride.add(parcel)
            if made:
                self._send_or_keep(parcel)
            else:
                self._unsent.append((weakref.ref(parcel), sequence_number()))
        return Note(parcel, tensor)

    def _send_what_is_made(self, *, now: bool = False) -> None:
        """Store the tensors whose operation has run, or all of them ``now``.

        Autograd saves a tensor when it has made the operation's node; some operations, such as ``rrelu``, write to it
        after that. When the next node is made, the operation has run."""
        number = -1 if now or not self._unsent else sequence_number()
        while self._unsent and self._unsent[0][1] != number:
            parcel = self._unsent.popleft()[0]()
            if parcel is not None:
                self._send_or_keep(parcel)

    @locked
    def hold(self, tensor: torch.Tensor) -> Undecided | Held:
        """For autograd: keep ``tensor`` on the device; ``send_after_all`` may offload it later if it can be."""
        return Undecided(tensor, self.place()) if not self._closed and self.travels(tensor) else Held(tensor)

    @locked
    def send_after_all(self, undecided: Undecided) -> None:
        """Offload it, unless it was written to (backward will raise then) or is in another stream's memory."""
        held = undecided.now
        if isinstance(held, Held) and not (self._closed or held.changed or undecided.place != self.place()):
            undecided.now = self.send(held.get(), undecided.span, made=True)

    def travels(self, tensor: torch.Tensor) -> bool:
        """Whether it is worth offloading, and can be copied as bytes."""
        if tensor.device != self._lanes.device or type(tensor) is not torch.Tensor or not has_plain_storage(tensor):
            return False
        if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
            return False
        if tensor.numel() == 0 or tensor.untyped_storage().nbytes() < self._small_bytes:
            return False
        return not self.is_weight(tensor) and span_of(tensor)[1] >= self._small_bytes

    def is_weight(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor``, with plain storage, is a parameter, a buffer, or a cast of one."""
        return tensor.untyped_storage().data_ptr() in self._addresses or is_made_from_weights(tensor)

    def _send_or_keep(self, parcel: Parcel) -> None:
        """Offload it, unless it would still be in the window when backward begins, judging by the last pass."""
        ride = self._ride
        stay_bytes = max(self.stay_bytes, self.window_bytes // 2)
        to_come = ride.expected_bytes - ride.saved_bytes + (parcel.size if self.is_strict else 0)
        if ride.as_expected and to_come < stay_bytes:
            self._staying.append((weakref.ref(parcel), parcel.size))
            self._make_way()
            return
        staying, self._staying = self._staying, []
        for reference, _ in staying:  # this pass differs from the last
            other = reference()
            if other is not None:
                self._store(other)
        self._store(parcel)

    def _store(self, parcel: Parcel) -> None:
        store = self._lanes.store
        assert parcel.here is not None
        parcel.slab = self._slab_for(parcel.size)
        if parcel.slab is None:
            return
        store.wait(self._lanes.compute.record())
        store.copy(parcel.slab.bytes, parcel.here, Tag.ACTIVATIONS)
        parcel.stored = store.record()
        self._leaving.append((weakref.ref(parcel), parcel.size))
        self._leaving_bytes += parcel.size
        self._make_way()

    def _slab_for(self, size: int) -> Piece | None:
        """RAM for a tensor; None where there is too little and that is no error."""
        if self.must_leave:
            return self._slabs.room(size, self._lanes.store)
        if not self._least_refused or size < self._least_refused:  # asking the system costs more than many a kernel
            try:
                return self._slabs.room(size, self._lanes.store)
            except OutOfBudget:
                self._least_refused = size
        self.refused_bytes += size
        return None

    @locked
    def trim(self) -> None:
        """Return page-locked RAM that holds no tensor."""
        if not self._closed:
            self._slabs.trim()

    def _make_way(self) -> None:
        """Release the oldest tensors until no more than the window is in flight; those not sent count in it."""
        staying_bytes = sum(size for _, size in self._staying) - self.stay_bytes
        least = 0 if self.is_strict else 1  # else compute would wait for the tensor it has just made
        while self._leaving_bytes + max(0, staying_bytes) > self.window_bytes and len(self._leaving) > least:
            self._let_oldest_go()

    def _let_oldest_go(self) -> None:
        """Return the memory of the oldest tensor to torch; compute waits for its store."""
        reference, size = self._leaving.popleft()
        self._leaving_bytes -= size
        parcel = reference()
        if parcel is not None:
            assert parcel.stored is not None
            assert parcel.here is not None
            self.place()
            if len(self._places) == 1:
                self._waits.wait(parcel.stored, "activations leaving")
            else:
                self._free_behind(parcel.here, parcel.stored)
            parcel.here = None

    # --- in backward

    @locked
    def unpack(self, saved: Any) -> torch.Tensor:
        """The tensor that ``pack`` was given, on the device; compute waits for it."""
        if isinstance(saved, Undecided):
            saved = saved.now
        if isinstance(saved, Held):
            return saved.get()
        assert isinstance(saved, Note)
        if self._closed:
            raise StaleGraph("Cannot run backward: the owner of its activations was closed.")
        self._sweep()
        self._send_what_is_made(now=True)
        if saved.probe is not None and saved.probe.changed:
            raise stale(saved.shape, saved.dtype)
        parcel = saved.parcel
        result = saved.view(self._fetch(parcel, saved))
        parcel.ride.asked[parcel.number] = None
        parcel.ride.latest = parcel.number
        self._load_ahead(parcel.ride)
        if parcel.back is not None and parcel.has_served_all():
            parcel.back = None  # all notes were served; a second backward fetches it again
        return result

    def _fetch(self, parcel: Parcel, note: Note) -> torch.Tensor:
        if parcel.here is not None:
            return parcel.here
        if parcel.back is None:
            self.misses += 1
            self._load(parcel)
        assert parcel.back is not None
        assert parcel.loaded is not None
        if not parcel.asked_for:
            parcel.asked_for = True
            self._ahead_bytes -= parcel.size
        if note.arrival != parcel.arrivals:
            note.arrival = parcel.arrivals
            parcel.served += 1
        self._waits.wait(parcel.loaded, "activations")
        if parcel.place != self.place() and parcel.back.is_cuda:
            parcel.back.record_stream(torch.cuda.current_stream(parcel.back.device))
        return parcel.back

    def _load(self, parcel: Parcel) -> None:
        load = self._lanes.load
        assert parcel.slab is not None
        assert parcel.stored is not None
        memory = bytes_for_graph(parcel.size, self._lanes.device)
        load.wait(self._lanes.compute.record())  # compute may still use the memory for something else
        load.wait(parcel.stored)
        load.copy(memory, parcel.slab.bytes, Tag.ACTIVATIONS)
        parcel.back, parcel.loaded, parcel.place = memory, load.record(), self.place()
        parcel.arrivals, parcel.asked_for, parcel.served = parcel.arrivals + 1, False, 0
        self._ahead_bytes += parcel.size

    @locked
    def look_ahead(self, ahead_bytes: int) -> None:
        """Prefetch up to ``ahead_bytes``: backward of this pass has reached a block. Blocks that are kept ask for
        nothing, so waiting for the next request would begin too late."""
        self.ahead_bytes = ahead_bytes
        if not self._closed:
            self._sweep()
            self._load_ahead(self._ride)

    def _load_ahead(self, ride: Ride) -> None:
        """Prefetch tensors that backward should ask for next, up to ``ahead_bytes``; those never offloaded count in
        that.

        Fetches at least one, unless the limit is strict or 0."""
        still_here = self._still_here_bytes(ride)
        for other in ride.to_come():
            if other.here is not None or other.back is not None:
                continue
            ahead = self._ahead_bytes + still_here
            first_one = ahead == 0 and self.ahead_bytes > 0 and not self.is_strict
            if ahead + other.size > self.ahead_bytes and not first_one:
                return
            self._load(other)

    def _still_here_bytes(self, ride: Ride) -> int:
        """Bytes that backward has yet to ask for and that need not be fetched."""
        total = 0
        for reference, size in (*self._leaving, *self._staying):
            parcel = reference()
            if parcel is not None and parcel.here is not None and parcel.number not in ride.asked:
                total += size
        return max(0, total - self.stay_bytes)

    # --- endings

    @locked
    def close(self) -> None:
        """Stop offloading and fetching. The lanes must be empty."""
        self._closed = True
        self._orphans.clear()
        self._lingering.clear()
        self._leaving.clear()
        self._unsent.clear()
        self._slabs.close()

    def bury(self, parcel: Parcel) -> None:
        """Set the memory of an offloaded tensor without notes aside. Runs in a finalizer, on any thread."""
        if parcel.here is not None and parcel.stored is not None and not parcel.stored.done():
            self._orphans.append((parcel.here, parcel.stored, 0))
        if parcel.back is not None and parcel.loaded is not None and not parcel.asked_for:
            self._orphans.append((parcel.back, parcel.loaded, parcel.size))
        if parcel.slab is not None:
            self._slabs.give(parcel.slab, *(event for event in (parcel.stored, parcel.loaded) if event is not None))

    def _sweep(self) -> None:
        """Return the memory of dead tensors to torch; compute waits for the lanes that may use it."""
        self.place()
        while self._orphans:
            memory, event, size = self._orphans[0]
            if len(self._places) == 1:
                self._lanes.compute.wait(event)
            else:
                self._free_behind(memory, event)
            self._ahead_bytes -= size
            self._orphans.popleft()
        self._lingering = deque(entry for entry in self._lingering if not entry[1].done())


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
