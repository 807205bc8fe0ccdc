"""Spans of what streams did are told in order, once they are over, with few questions to the driver."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stormtorch.core.events import Span, What
from stormtorch.memory.lanes.cuda import _TOGETHER, EventTimer


class _Gpu:
    """Streams whose events end when a test says so: all up to a number, counted over its streams."""

    def __init__(self) -> None:
        self.recorded = self.reached = self.asked = 0

    def event(self, **_: Any) -> Any:
        event = SimpleNamespace(number=0)

        def record(_stream: Any) -> None:
            self.recorded += 1
            event.number = self.recorded

        def query() -> bool:
            self.asked += 1
            return bool(event.number <= self.reached)

        event.record, event.query = record, query
        return event


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> _Gpu:
    gpu = _Gpu()
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    return gpu


def timer_into(spans: list[Span], gpu: _Gpu) -> EventTimer:
    def span(start: Any, end: Any) -> tuple[float, float]:
        assert end.number <= gpu.reached, "times of what has not ended"
        return float(start.number), float(end.number)

    return EventTimer(spans.append, SimpleNamespace(span=span))  # type: ignore[arg-type]


def stream(handle: int) -> Any:
    return SimpleNamespace(cuda_stream=handle)


def work(timer: EventTimer, handle: int, unit: int) -> None:
    timer.finish(stream(handle), timer.mark(stream(handle)), What.COPY, "load", None, 8, unit)


@pytest.mark.parametrize("ended", [0, 1, 7, 20])
def test_what_has_ended_is_told_and_nothing_else(gpu: _Gpu, ended: int) -> None:
    spans: list[Span] = []
    timer = timer_into(spans, gpu)
    for unit in range(20):
        work(timer, 1, unit)
    assert gpu.asked == 0
    gpu.reached = 2 * ended
    timer.emit()
    assert [span.unit for span in spans] == list(range(ended))
    assert gpu.asked <= 6
    gpu.reached = gpu.recorded
    timer.emit()
    assert [span.unit for span in spans] == list(range(20))


def test_it_looks_by_itself_where_much_is_pending(gpu: _Gpu) -> None:
    spans: list[Span] = []
    timer = timer_into(spans, gpu)
    for unit in range(50 * _TOGETHER):
        gpu.reached = gpu.recorded  # all so far
        work(timer, 1, unit)
    assert len(spans) >= 49 * _TOGETHER
    assert gpu.asked < 0.3 * len(spans)


def test_a_gpu_that_is_far_behind_is_not_asked_each_time(gpu: _Gpu) -> None:
    timer = timer_into([], gpu)
    for unit in range(50 * _TOGETHER):
        work(timer, 1, unit)
    assert gpu.asked < 0.5 * 50 * _TOGETHER


def test_streams_do_not_wait_for_each_other(gpu: _Gpu) -> None:
    spans: list[Span] = []
    timer = timer_into(spans, gpu)
    work(timer, 1, 0)
    gpu.reached = gpu.recorded
    stuck = gpu.event()
    stuck.number = 10**9
    timer.finish(stream(2), stuck, What.WAIT, "weights", unit=1)
    timer._pending[2][0] = timer._pending[2][0]._replace(end=stuck)
    work(timer, 1, 2)
    gpu.reached = gpu.recorded
    timer.emit()
    assert [span.unit for span in spans] == [0, 2]


def test_a_signal_handler_may_look_meanwhile(gpu: _Gpu) -> None:
    spans: list[Span] = []
    timer = timer_into(spans, gpu)
    sink = timer._sink

    def disturbed(span: Span) -> None:
        timer.emit()
        sink(span)

    timer._sink = disturbed
    for unit in range(5):
        work(timer, 1, unit)
    gpu.reached = gpu.recorded
    timer.emit()
    assert [span.unit for span in spans] == list(range(5))
