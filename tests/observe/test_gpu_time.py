"""How the GPU spent its time: busy, waiting for the host, waiting for lanes."""

from __future__ import annotations

import pytest

from stormtorch.core.events import Span, What
from stormtorch.observe.recorder import Mark, Recorder
from stormtorch.observe.report import gpu_time


def mark(at_s: float, waited_s: float, looked_s: float, idle_s: float) -> Mark:
    return Mark(at_s=at_s, waited_s=waited_s, looked_s=looked_s, idle_s=idle_s)


def test_shares_add_up() -> None:
    gpu = gpu_time([mark(10.0, 1.0, 1.0, 0.5), mark(14.0, 2.0, 5.0, 1.5)])
    assert gpu is not None
    assert (gpu.busy, gpu.waits_for_host, gpu.waits_for_lanes) == pytest.approx((0.5, 0.25, 0.25))
    assert str(gpu) == "busy 50%, waits for the host 25%, waits for lanes 25%"


def test_nothing_is_said_where_nothing_was_seen() -> None:
    assert gpu_time([]) is None
    assert gpu_time([mark(0.0, 0.0, 0, 0), mark(1.0, 0.5, 0, 0)]) is None


def test_the_recorder_marks_the_last_steps() -> None:
    recorder = Recorder()
    for step in range(50):
        if step:
            recorder(Span(What.GPU_IDLE, step, step + 1, share=0.1))
        recorder(Span(What.WAIT, 0.0, 0.01, "weights"))
        recorder.step()
    marks = recorder.snapshot().marks
    assert len(marks) == 33
    assert (marks[-1].looked_s, marks[-1].idle_s) == pytest.approx((49, 4.9))
    gpu = gpu_time(marks)
    assert gpu is not None
    assert gpu.waits_for_host == pytest.approx(0.1)
