"""Measures how much of the time the GPU is idle because the host has not launched anything.

A thread of C code (csrc/sampler.c) asks some hundred times a second whether the stream that computes has finished all
enqueued work. Waits for lanes do not count: the stream has not finished then. Two corrections are added, for time in
which the stream has unfinished work though nothing runs: from the moment at which the driver takes a launch onto an
idle GPU until the kernel runs, and between two kernels of which the second waits for the first.

The road not taken: a thousand questions a second, each after a pause of up to 40 microseconds, took 3 per cent of one
core; a step whose optimizer runs on all cores was 3 per cent slower."""

from __future__ import annotations

import ctypes
import os
import time
import weakref
from dataclasses import dataclass

import torch

from ...core.events import Sink, Span, What
from ...native.library import Library, SamplerCounts, library
from .driver import device_index, driver

_PERIOD_NS = 3_000_000
_LAUNCH_NS = 16_000  # no launch takes longer, unless the queue of the GPU is full; most take 3 to 10 µs
# Both from traces of torch.profiler, each question of the sampler beside them (H200, three models of transformers, ten
# runs). A launch onto an idle GPU takes 13 µs on a fast host, 8 on a slow one, where more is seen as idle; a kernel
# behind another one starts 1.5 µs late. Half of the stops and two thirds of the launches are found.
_STOP_NS = 11_000  # of idle time, for each time that work was found to run out
_GAP_NS = 2_600  # for each launch found
_FADES = 0.9  # weight of earlier launches, from one reading to the next


@dataclass
class _Rate:
    """How many events there are in a nanosecond, lately."""

    events: float = 0.0
    watched_ns: float = 0.0

    def of(self, events: int, watched_ns: int) -> float:
        """With those of the time since the last reading."""
        self.events, self.watched_ns = self.events * _FADES + events, self.watched_ns * _FADES + watched_ns
        return self.events / self.watched_ns if self.watched_ns else 0.0


class IdleMeter:
    """Counts from construction to ``close``. ``watch`` names the stream."""

    def __init__(self, native: Library, handle: int) -> None:
        self._c, self._handle = native.c, handle
        self._stream = 0
        self._last = SamplerCounts()
        self._idle_s = 0.0
        self._launches, self._stops = _Rate(), _Rate()
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
        lost = _GAP_NS * self._launches.of(now.launches - last.launches, now.watched_ns - last.watched_ns)
        lost += _STOP_NS * self._stops.of(now.stops - last.stops, now.exposed_ns - last.exposed_ns)
        counted_ns = now.counted_ns - last.counted_ns
        self._idle_s += min(float(counted_ns), now.idle_ns - last.idle_ns + lost * counted_ns) / 1e9
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
