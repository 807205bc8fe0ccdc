"""Lanes for a device that is host memory: worker threads, so that copies really happen later than requested."""

from __future__ import annotations

import time

import torch

from ...core.events import Sink, Span, What
from ...core.tags import Tag
from .flags import Flag
from .lane import Delay, Event, Lane, as_bytes, check_copy
from .thread import CpuEvent, ThreadLane


class CpuLane(ThreadLane):
    """Copies within host memory."""

    def __init__(self, name: str, sink: Sink | None = None, delay: Delay | None = None) -> None:
        super().__init__(name, delay)
        self._sink = sink

    def copy(self, target: torch.Tensor, source: torch.Tensor, tag: Tag, unit: int | None = None) -> None:
        size = check_copy(target, source)
        name, sink = self.name, self._sink

        def copy() -> None:
            start_s = time.perf_counter()
            as_bytes(target).copy_(as_bytes(source))
            if sink is not None:
                sink(Span(What.COPY, start_s, time.perf_counter(), name, tag, size, unit))

        self.enqueue(copy)

    def fill(self, target: torch.Tensor, byte: int) -> None:
        def fill() -> None:
            as_bytes(target).fill_(byte)

        self.enqueue(fill)


class CpuComputeLane(Lane):
    """The calling thread itself: work is done at once, and waiting blocks."""

    name = "compute"

    def copy(self, target: torch.Tensor, source: torch.Tensor, tag: Tag, unit: int | None = None) -> None:  # noqa: ARG002
        check_copy(target, source)
        with torch.inference_mode():
            as_bytes(target).copy_(as_bytes(source))

    def fill(self, target: torch.Tensor, byte: int) -> None:
        with torch.inference_mode():
            as_bytes(target).fill_(byte)

    def record(self) -> Event:
        return CpuEvent()

    def wait(self, event: Event) -> None:
        event.synchronize()

    def write_flag(self, flag: Flag, value: int) -> None:
        flag.set(value)

    def wait_flag(self, flag: Flag, value: int) -> None:
        flag.wait(value)

    def synchronize(self) -> None:
        pass

    def close(self) -> None:
        pass
