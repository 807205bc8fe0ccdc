"""Calls of NVIDIA's driver library that torch does not offer, or offers at a price.

Page-locking goes through the driver rather than ``cudaHostRegister`` because the runtime keeps the last error of a
failed call, and torch would report it at some later, unrelated kernel launch; the driver keeps none. Waits and writes
of flags on a stream exist only here. Copies and streams of our own are here for their cost and their independence: see
``copy`` and ``create_stream``. This is the only file that knows the driver's names, and it can be imported where there
is no such library.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ...core.errors import StormError

_PART = 64 << 20  # bytes: 1.2 ms on a link of 55 GB/s
_REGISTER_FLAGS = 0x1 | 0x2  # CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP
_MEMORY_TYPE = ctypes.c_int(2)  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE
_HOST = 0x1  # CU_MEMORYTYPE_HOST
# CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, ..._HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED: torch
# requires both without a check
_MAPPING = (ctypes.c_int(102), ctypes.c_int(103))
_NON_BLOCKING = 0x1  # CU_STREAM_NON_BLOCKING
_NO_TIMING = 0x2  # CU_EVENT_DISABLE_TIMING
_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_WAIT_GEQ = 0x0  # CU_STREAM_WAIT_VALUE_GEQ: (int32)(word - value) >= 0, so that counters may wrap
_WRITE_DEFAULT = 0x0  # CU_STREAM_WRITE_VALUE_DEFAULT: earlier writes of the stream are visible before the value is


class DriverError(StormError, RuntimeError):
    """The driver refused a call; ``name`` is the driver's own reason, such as CUDA_ERROR_OUT_OF_MEMORY."""

    def __init__(self, call: str, name: str) -> None:
        super().__init__(f"{call} failed with {name}")
        self.call, self.name = call, name

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.call, self.name)


class StreamQuery(NamedTuple):
    """Addresses of the driver's functions: ``ask(stream)`` is 0 or ``no``, on a thread that has called
    ``enter(context)`` and ``relax``. In the order of ``storm_sampler_open``."""

    ask: int
    no: int
    enter: int
    relax: int
    context: int


class Driver:
    """Typed access to libcuda.

    Calls that belong to a device name it, and run in its primary context, which is torch's: the default stream has the
    same handle on every device, and a call in the wrong context would go to another device's without an error."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._contexts: dict[int, int] = {}
        self._others: dict[tuple[int, int], tuple[int, int]] = {}  # see ``_other``

    def register(self, device: int, address: int, size: int) -> None:
        """Page-lock ``[address, address + size)`` for copies by any device. Blocks; raises DriverError, and leaves no
        error behind."""
        with self._on(device):
            self._call("cuMemHostRegister_v2", _pointer(address), ctypes.c_size_t(size), ctypes.c_uint(_REGISTER_FLAGS))

    def unregister(self, device: int, address: int) -> None:
        """Undo ``register``. No copy from or to the range may still be running."""
        with self._on(device):
            self._call("cuMemHostUnregister", _pointer(address))

    def device_address(self, device: int, address: int) -> int:
        """The address by which ``device`` reaches registered host memory; the same number on most systems."""
        result = ctypes.c_uint64()
        with self._on(device):
            self._call("cuMemHostGetDevicePointer_v2", ctypes.byref(result), _pointer(address), ctypes.c_uint(0))
        return result.value

    def can_map(self, device: int) -> bool:
        """Whether addresses can be reserved first and memory mapped later, which expandable segments need."""
        handle, answer = ctypes.c_int(), ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(device))
        for attribute in _MAPPING:
            self._call("cuDeviceGetAttribute", ctypes.byref(answer), attribute, handle)
            if not answer.value:
                return False
        return True

    def _is_page_locked(self, address: int) -> bool:
        """Whether the memory is page-locked, by any code. ``Tensor.is_pinned`` is an operation of torch's, which
        dispatch modes would take for the model's."""
        kind = ctypes.c_uint()
        try:
            self._call("cuPointerGetAttribute", ctypes.byref(kind), _MEMORY_TYPE, ctypes.c_uint64(address))
        except DriverError as error:
            if error.name != "CUDA_ERROR_INVALID_VALUE":  # memory unknown to the driver
                raise
            return False
        return kind.value == _HOST

    def create_stream(self, device: int) -> int:
        """Create a stream that no other code has, and that does not wait for the default one.

        torch hands out its 32 streams in turn: a lane could then get the stream that the user computes on, and a wait
        for a flag would hold up the very work that leads to it."""
        stream = ctypes.c_void_p()
        with self._on(device):
            self._call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(_NON_BLOCKING))
        assert stream.value is not None
        return stream.value

    def copy(self, device: int, stream: int, target: int, source: int, size: int, *, host: Sequence[int] = ()) -> bool:
        """Enqueue a copy of ``size`` bytes between device and page-locked memory, in either direction. Returns False
        and does nothing if an address in ``host`` is not page-locked.

        Costs the host a fraction of ``Tensor.copy_`` on another stream: about 3 µs instead of 22.

        Large copies go in parts, so that user code's ``loss.item()`` need not wait for all of an embedding that is on
        its way. A copy engine stays with a stream that has more for it: behind parts on one stream, a copy of four
        bytes waited for 3.7 of 4.5 ms, as behind a single copy. So each part goes to another stream than the one before
        it, and waits for it there: 0.45 ms, for 0.3 % of the rate."""
        with self._on(device):
            if not all(map(self._is_page_locked, host)):
                return False
            here = stream
            try:
                for first in range(0, size, _PART):
                    if first:
                        here = self._hand_over(device, stream, here)
                    self._call(
                        "cuMemcpyAsync",
                        ctypes.c_uint64(target + first),
                        ctypes.c_uint64(source + first),
                        ctypes.c_size_t(min(_PART, size - first)),
                        _pointer(here),
                    )
            finally:  # also after Ctrl-C: what is enqueued on ``stream`` next must come after all parts
                if here != stream:
                    self._hand_over(device, stream, here)
        return True

    def _hand_over(self, device: int, stream: int, here: int) -> int:
        """Let ``stream`` or its other one, whichever is not ``here``, go on where ``here`` is; returns it."""
        other, event = self._other(device, stream)
        there = stream if here == other else other
        self._call("cuEventRecord", _pointer(event), _pointer(here))
        self._call("cuStreamWaitEvent", _pointer(there), _pointer(event), ctypes.c_uint(0))
        return there

    def _other(self, device: int, stream: int) -> tuple[int, int]:
        """The stream that takes every other part of ``stream``'s large copies, and the event of their order. It has
        nothing else to do, and ends with the process, like all streams of ours (streams.py)."""
        known = self._others.get((device, stream))
        if known is None:
            event = ctypes.c_void_p()
            self._call("cuEventCreate", ctypes.byref(event), ctypes.c_uint(_NO_TIMING))
            assert event.value is not None
            known = self._others.setdefault((device, stream), (self.create_stream(device), event.value))
        return known

    def write_value(self, device: int, stream: int, device_address: int, value: int) -> None:
        """Enqueue: once all earlier work of ``stream`` is done, store ``value`` in the 32-bit word."""
        self._value("cuStreamWriteValue32_v2", device, stream, device_address, value, _WRITE_DEFAULT)

    def wait_value(self, device: int, stream: int, device_address: int, value: int) -> None:
        """Enqueue: later work of ``stream`` waits until ``(int32)(word - value) >= 0``."""
        self._value("cuStreamWaitValue32_v2", device, stream, device_address, value, _WAIT_GEQ)

    def _value(self, call: str, device: int, stream: int, device_address: int, value: int, flags: int) -> None:
        with self._on(device):
            self._call(
                call,
                _pointer(stream),
                ctypes.c_uint64(device_address),
                ctypes.c_uint32(value & 0xFFFFFFFF),
                ctypes.c_uint(flags),
            )

    def query(self, device: int) -> StreamQuery | None:
        """Functions by which a thread of C code asks whether a stream has finished; None if the driver lacks them."""
        names = ("cuStreamQuery", "cuCtxSetCurrent", "cuThreadExchangeStreamCaptureMode")
        if not all(hasattr(self._library, name) for name in names):
            return None
        ask, enter, relax = (ctypes.cast(self._library[name], ctypes.c_void_p).value or 0 for name in names)
        context = self._contexts.get(device) or self._retain(device)
        return StreamQuery(ask=ask, enter=enter, relax=relax, context=context, no=_NOT_READY)

    @contextlib.contextmanager
    def _on(self, device: int) -> Iterator[None]:
        """Make the primary context of ``device`` current on this thread, if another or none is."""
        context = self._contexts.get(device) or self._retain(device)
        current = ctypes.c_void_p()
        self._call("cuCtxGetCurrent", ctypes.byref(current))
        if current.value == context:
            yield
            return
        self._call("cuCtxPushCurrent_v2", _pointer(context))
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(current))

    def _retain(self, device: int) -> int:
        torch.cuda.init()
        handle, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(device))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
        assert context.value is not None
        self._contexts[device] = context.value
        return context.value

    def _call(self, name: str, *arguments: object) -> None:
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise DriverError(name, "CUDA_ERROR_NOT_FOUND (the driver is too old)") from None
        code = function(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(ctypes.c_int(code), ctypes.byref(text))
            raise DriverError(name, text.value.decode() if text.value else f"error {code}")


def device_index(device: torch.device) -> int:
    """The number of a CUDA device; ``cuda`` alone is the current one."""
    return torch.cuda.current_device() if device.index is None else device.index


def _pointer(address: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(address)


@functools.cache
def driver() -> Driver | None:
    """The driver, or None on a machine where torch sees no CUDA device."""
    if not torch.cuda.is_available():
        return None
    try:
        return Driver(ctypes.CDLL("libcuda.so.1"))
    except OSError:
        return None
