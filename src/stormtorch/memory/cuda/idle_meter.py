"""Measures how much of the time the GPU is idle because the host has not launched anything.

A thread of C code (csrc/sampler.c) asks some hundred times a second whether the stream that computes has finished all
enqueued work. Waits for lanes do not count: the stream has not finished then. Three corrections are added. Where the
driver was busy with a launch and could not answer at once, the GPU is assumed to be in the state in which most launches
find it. The same holds for questions that waited too briefly to be noticed, of which there is a certain time in each
launch. And for each launch the GPU needs a moment before the kernel runs, whether it was idle or not.

The road not taken: a thousand questions a second, each after a pause of up to 40 microseconds, took 3 per cent of one
core; a step whose optimizer runs on all cores was 3 per cent slower."""

from __future__ import annotations

import ctypes
import os
import time
import weakref

import torch

from ...core.events import Sink, Span, What
from ...native.library import Library, SamplerCounts, library
from .driver import device_index, driver

_PERIOD_NS = 3_000_000
_LAUNCH_NS = 16_000  # no launch takes longer, unless the queue of the GPU is full; most take 3 to 10 µs
# Without a running kernel, for each launch that was found. A kernel starts 2.0 to 2.6 µs late (H200, four models), but
# only 35 to 70 % of the launches are found, and gaps of 5 to 20 µs are not. With this value seven traces of
# torch.profiler agree within 2 points of the time.
_START_NS = 5_500
_UNNOTICED_NS = 2_500  # the end of each launch, in which a question waits less than BLOCKED_NS of csrc/sampler.c says
_FADES = 0.9  # weight of earlier launches, from one reading to the next


class IdleMeter:
    """Counts from construction to ``close``. ``watch`` names the stream."""

    def __init__(self, native: Library, handle: int) -> None:
        self._c, self._handle = native.c, handle
        self._stream = 0
        self._last = SamplerCounts()
        self._idle_s = 0.0
        self._launches = self._onto_idle = 0.0  # launches seen lately, and those of them onto an idle GPU
        self._watched_ns = 0.0  # the time in which they were seen
        self._emitted = time.perf_counter(), 0.0, 0.0  # when, and the readings
        # Also at exit, before the driver ends: the thread must not call it then.
        self._end = weakref.finalize(self, _close, native, handle, os.getpid())

    def watch(self, stream: int) -> None:
        """Ask about ``stream`` from now on."""
        if stream != self._stream and self._end.alive:
            self._stream = stream
            self._c.storm_sampler_watch(self._handle, stream)

    def read(self) -> tuple[float, float]:
        """The seconds that samples stand for so far, and those of them in which the stream had finished."""
        if not self._end.alive:
            return 0.0, 0.0
        now, last = SamplerCounts(), self._last
        self._c.storm_sampler_read(self._handle, ctypes.byref(now))
        self._last = now
        self._launches = self._launches * _FADES + now.launches - last.launches
        self._onto_idle = self._onto_idle * _FADES + now.launches_after_yes - last.launches_after_yes
        self._watched_ns = self._watched_ns * _FADES + now.watched_ns - last.watched_ns
        onto_idle = self._onto_idle / self._launches if self._launches else 0.0
        per_ns = self._launches / self._watched_ns if self._watched_ns else 0.0
        counted_ns = now.counted_ns - last.counted_ns
        idle_ns = now.idle_ns - last.idle_ns + onto_idle * (now.blocked_ns - last.blocked_ns)
        idle_ns += per_ns * (_START_NS + onto_idle * _UNNOTICED_NS) * counted_ns
        self._idle_s += min(float(counted_ns), idle_ns) / 1e9
        return now.counted_ns / 1e9, self._idle_s

    def emit(self, sink: Sink) -> None:
        """Tell ``sink`` what was counted since the last call."""
        (before_s, counted_before_s, idle_before_s), (counted_s, idle_s) = self._emitted, self.read()
        if counted_s > counted_before_s:
            self._emitted = time.perf_counter(), counted_s, idle_s
            share = (idle_s - idle_before_s) / (counted_s - counted_before_s)
            sink(Span(What.GPU_IDLE, before_s, self._emitted[0], share=share))

    def close(self) -> None:
        self._end()


def _close(native: Library, handle: int, owner_pid: int) -> None:
    if os.getpid() == owner_pid:  # a forked child has no such thread
        native.c.storm_sampler_close(handle)


def idle_meter_for(device: torch.device, *, period_ns: int = _PERIOD_NS) -> IdleMeter | None:
    """A meter for ``device``; None without a GPU or without the C library."""
    native, found = library(), driver() if device.type == "cuda" else None
    query = None if found is None else found.query(device_index(device))
    if native is None or query is None:
        return None
    handle, stream = ctypes.c_void_p(), torch.cuda.current_stream(device).cuda_stream
    status = native.c.storm_sampler_open(*query, stream, period_ns, _LAUNCH_NS, ctypes.byref(handle))
    return IdleMeter(native, handle.value or 0) if status == 0 else None
