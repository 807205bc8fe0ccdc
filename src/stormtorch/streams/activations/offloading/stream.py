"""Offloads activations to RAM while compute goes on, and prefetches them just before backward needs them.

Tensors that autograd saves are handled by storage: views of one storage are one offloaded tensor (`Offloaded`), which
is copied once and comes back with every view's exact strides.

**Offloading.** The store lane copies a tensor as soon as the operation that saved it has been launched. The device's
copy is held in a queue until the queue exceeds ``window_bytes``; then compute waits for the oldest store, on the GPU,
and the memory returns to torch. So the peak is bounded however far the host runs ahead, without ``record_stream``.

**Coming back.** The order in which backward asks is remembered from the pass before, or assumed to be the reverse of
the order of saving. Whenever backward has asked for one tensor, the next ones are prefetched, up to ``ahead_bytes``.
Those saved last are never offloaded: backward begins with them.

**RAM runs out.** Where ``ram`` has no room for a tensor, it remains on the device, unless ``must_leave`` makes that an
error; the caller reads ``refused_bytes`` and may recompute instead.

**Ending.** An offloaded tensor lives as long as autograd keeps notes of it. Dropped graphs free theirs, and
``retain_graph`` keeps them, without any call.

**Several user streams.** Torch hands freed memory out again on the stream that allocated it, in that stream's order. So
compute may wait for a lane on the GPU, and free memory at once, only where one stream has all memory. As soon as a
second stream has some, memory that a lane still uses is held until that lane is done with it."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch

from ....core.errors import OutOfBudget, StaleGraph
from ....core.sizes import KiB
from ....core.tags import Tag
from ....memory.cuda.allocator import streams_with_memory
from ....memory.lanes.lane import Event
from ....memory.pools.device import bytes_for_graph, bytes_of
from ....memory.pools.host import HostPool
from ....memory.pools.pool import Piece
from ...bridge.lock import locked
from ...bridge.torch_private import (
    StorageReference,
    has_plain_storage,
    is_made_from_weights,
    sequence_number,
)
from ...settings import Trial
from ..plans.room import WAY, Surroundings
from .offloaded import Held, Note, Offloaded, Ride, Undecided, span_of, stale

_SMALL_BYTES = 64 * KiB  # smaller tensors cost more to move than to keep


class ActivationStream:
    """Offloads tensors and fetches them. ``pack`` and ``unpack`` are autograd's saved-tensor hooks."""

    def __init__(
        self, around: Surroundings, weights: Callable[[], Iterable[torch.Tensor]], *, must_leave: bool, trial: Trial
    ) -> None:
        """``weights``: parameters and buffers permanently on the device. They and their casts are not offloaded.
        ``must_leave``: whether a lack of RAM is an error."""
        self.around, self._lanes, self._waits, self.lock = around, around.lanes, around.waits, around.lock
        self._slabs = HostPool(
            ledger=around.ledger,
            tag=Tag.ACTIVATIONS,
            lanes=around.lanes,
            page_lock=around.page_lock,
            pageable=around.lanes.ring is not None,
            poison=around.lanes.store if trial.poison else None,
        )
        self._weights, self._must_leave = weights, must_leave
        self._small_bytes = _SMALL_BYTES if trial.small_bytes is None else trial.small_bytes
        self._addresses: set[int] = set()  # of the weights
        self.window_bytes = self.ahead_bytes = around.limit_bytes // WAY
        self.is_strict = False  # whether ``ahead_bytes`` holds even where it is less than one tensor
        self._leaving: deque[tuple[weakref.ref[Offloaded], int]] = deque()  # with their sizes
        self._leaving_bytes = 0
        self._staying: list[tuple[weakref.ref[Offloaded], int]] = []  # not offloaded: backward will begin with them
        self._ahead_bytes = 0
        self._known: dict[tuple[int, int, int, int], tuple[StorageReference, weakref.ref[Offloaded]]] = {}
        self._ride = Ride(None)
        self._past: Ride | None = None
        self.stay_bytes = 0  # bytes saved last that need not be offloaded, beside those in the window
        self._lingering: deque[tuple[torch.Tensor, Event]] = deque()
        self._unsent: deque[tuple[weakref.ref[Offloaded], int]] = deque()  # saved by an operation that may not have run
        self._places: set[Hashable] = set()  # the streams that have computed or have memory
        self._passes, self._closed = 0, False
        self.refused_bytes = 0  # of this pass: bytes that remained because RAM is short
        self._least_refused = 0  # of this pass: no tensor as large as that is tried again; 0: none was refused
        self._orphans: deque[tuple[torch.Tensor, Event, int]] = deque()  # with their part of _ahead_bytes
        self.misses = 0  # tensors that were not prefetched when backward asked for them

    def place(self) -> Hashable:
        """The place where compute runs: on a GPU, the stream."""
        place = self._lanes.compute.place()
        self._places.add(getattr(place, "cuda_stream", place))
        return place

    def _bound_lingering(self) -> None:
        """Keep no more of such memory than may be in flight now. The host waits where there is more."""
        self._lingering = deque(entry for entry in self._lingering if not entry[1].done())
        most = min(self.window_bytes, self.ahead_bytes) if self.is_strict else self.window_bytes
        while sum(memory.nbytes for memory, _ in self._lingering) > most:
            self._lingering.popleft()[1].synchronize()

    @property
    def has_offloaded(self) -> bool:
        """Whether this pass has offloaded anything so far."""
        return bool(self._ride.offloaded)

    @locked
    def travelling_bytes(self) -> int:
        """Bytes of this pass that are on the device: in flight, or not sent."""
        alive = filter(None, (reference() for reference in self._ride.offloaded))
        return sum(offloaded.size for offloaded in alive if offloaded.here is not None or offloaded.back is not None)

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
        offloaded = known[1]() if known is not None and not known[0].gone else None
        if offloaded is None:
            offloaded = Offloaded(self._ride, bytes_of(tensor)[first : first + size], first, self.place(), self.bury)
            self._known[key] = (StorageReference(storage), weakref.ref(offloaded))
            self._ride.add(offloaded)
            if made:
                self._send_or_keep(offloaded)
            else:
                self._unsent.append((weakref.ref(offloaded), sequence_number()))
        return Note(offloaded, tensor)

    def _send_what_is_made(self, *, now: bool = False) -> None:
        """Store the tensors whose operation has run, or all of them ``now``.

        Autograd saves a tensor when it has made the operation's node; some operations, such as ``rrelu``, write to it
        after that. When the next node is made, the operation has run."""
        number = -1 if now or not self._unsent else sequence_number()
        while self._unsent and self._unsent[0][1] != number:
            offloaded = self._unsent.popleft()[0]()
            if offloaded is not None:
                self._send_or_keep(offloaded)

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
        if tensor.is_conj() or tensor.is_neg() or tensor.numel() == 0:
            return False
        if tensor.untyped_storage().nbytes() < self._small_bytes:
            return False
        return not self.is_weight(tensor) and span_of(tensor)[1] >= self._small_bytes

    def is_weight(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor``, with plain storage, is a parameter, a buffer, or a cast of one."""
        return tensor.untyped_storage().data_ptr() in self._addresses or is_made_from_weights(tensor)

    def _send_or_keep(self, offloaded: Offloaded) -> None:
        """Offload it, unless it would still be in the window when backward begins, judging by the last pass."""
        ride = self._ride
        stay_bytes = max(self.stay_bytes, self.window_bytes // 2)
        to_come = ride.expected_bytes - ride.saved_bytes + (offloaded.size if self.is_strict else 0)
        if ride.as_expected and to_come < stay_bytes:
            self._staying.append((weakref.ref(offloaded), offloaded.size))
            self._make_way()
            return
        staying, self._staying = self._staying, []
        for other in (*_alive(staying), offloaded):  # this pass differs from the last
            self._store(other)

    def _store(self, offloaded: Offloaded) -> None:
        store = self._lanes.store
        assert offloaded.here is not None
        offloaded.slab = self._slab_for(offloaded.size)
        if offloaded.slab is None:
            return
        store.wait(self._lanes.compute.record())
        store.copy(offloaded.slab.bytes, offloaded.here, Tag.ACTIVATIONS)
        offloaded.stored = store.record()
        self._leaving.append((weakref.ref(offloaded), offloaded.size))
        self._leaving_bytes += offloaded.size
        self._make_way()

    def _slab_for(self, size: int) -> Piece | None:
        """RAM for a tensor; None where there is too little and that is no error."""
        if self._must_leave:
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
            reference, size = self._leaving.popleft()
            self._leaving_bytes -= size
            if (oldest := reference()) is not None:
                assert oldest.here is not None
                assert oldest.stored is not None
                self._release(oldest.here, oldest.stored, "activations leaving")
                oldest.here = None

    def _release(self, memory: torch.Tensor, event: Event, cause: str | None = None) -> None:
        """Return ``memory``, which a lane uses until ``event``, to torch: compute waits."""
        self.place()
        if len(self._places) > 1:
            self._lingering.append((memory, event))
            self._bound_lingering()
        elif cause is None:
            self._lanes.compute.wait(event)
        else:
            self._waits.wait(event, cause)

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
        offloaded = saved.offloaded
        result = saved.view(self._fetch(offloaded, saved))
        offloaded.ride.asked[offloaded.number] = None
        offloaded.ride.latest = offloaded.number
        self._load_ahead(offloaded.ride)
        if offloaded.back is not None and offloaded.has_served_all():
            offloaded.back = None  # all notes were served; a second backward fetches it again
        return result

    def _fetch(self, offloaded: Offloaded, note: Note) -> torch.Tensor:
        if offloaded.here is not None:
            return offloaded.here
        if offloaded.back is None:
            self.misses += 1
            self._load(offloaded)
        assert offloaded.back is not None
        assert offloaded.loaded is not None
        if not offloaded.asked_for:
            offloaded.asked_for = True
            self._ahead_bytes -= offloaded.size
        if note.arrival != offloaded.arrivals:
            note.arrival = offloaded.arrivals
            offloaded.served += 1
        self._waits.wait(offloaded.loaded, "activations")
        if offloaded.place != self.place() and offloaded.back.is_cuda:
            offloaded.back.record_stream(torch.cuda.current_stream(offloaded.back.device))
        return offloaded.back

    def _load(self, offloaded: Offloaded) -> None:
        load = self._lanes.load
        assert offloaded.slab is not None
        assert offloaded.stored is not None
        memory = bytes_for_graph(offloaded.size, self._lanes.device)
        load.wait(self._lanes.compute.record())  # compute may still use the memory for something else
        load.wait(offloaded.stored)
        load.copy(memory, offloaded.slab.bytes, Tag.ACTIVATIONS)
        offloaded.back, offloaded.loaded, offloaded.place = memory, load.record(), self.place()
        offloaded.arrivals, offloaded.asked_for, offloaded.served = offloaded.arrivals + 1, False, 0
        self._ahead_bytes += offloaded.size

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
        waiting = _alive((*self._leaving, *self._staying))
        sizes = [each.size for each in waiting if each.here is not None and each.number not in ride.asked]
        return max(0, sum(sizes) - self.stay_bytes)

    # --- endings

    @locked
    def close(self) -> None:
        """Stop offloading and fetching. The lanes must be empty."""
        self._closed = True
        queues: tuple[deque[Any], ...] = self._orphans, self._lingering, self._leaving, self._unsent
        for queue in queues:
            queue.clear()
        self._slabs.close()

    def bury(self, offloaded: Offloaded) -> None:
        """Set the memory of an offloaded tensor without notes aside. Runs in a finalizer, on any thread."""
        if offloaded.here is not None and offloaded.stored is not None and not offloaded.stored.done():
            self._orphans.append((offloaded.here, offloaded.stored, 0))
        if offloaded.back is not None and offloaded.loaded is not None and not offloaded.asked_for:
            self._orphans.append((offloaded.back, offloaded.loaded, offloaded.size))
        if offloaded.slab is not None:
            self._slabs.give(
                offloaded.slab, *(event for event in (offloaded.stored, offloaded.loaded) if event is not None)
            )

    def _sweep(self) -> None:
        """Return the memory of dead tensors to torch; compute waits for the lanes that may use it."""
        self.place()
        while self._orphans:
            memory, event, size = self._orphans[0]
            self._release(memory, event)
            self._ahead_bytes -= size
            self._orphans.popleft()
        self._bound_lingering()


def _alive(entries: Iterable[tuple[weakref.ref[Offloaded], int]]) -> list[Offloaded]:
    """Those of which autograd still keeps notes."""
    return [offloaded for reference, _ in entries if (offloaded := reference()) is not None]
