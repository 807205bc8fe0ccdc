"""What the meter makes of the sampler's counts."""

from __future__ import annotations

import ctypes
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stormtorch.memory.cuda.idle_meter import IdleMeter, idle_meter_for


class _Counted:
    """A C library whose sampler has counted what a test says."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.c: Any = SimpleNamespace(storm_sampler_read=self._read, storm_sampler_close=lambda _handle: None)

    def _read(self, _handle: int, out: Any) -> None:
        found = ctypes.cast(out, ctypes.POINTER(out._obj.__class__)).contents
        for name, value in self.counts.items():
            setattr(found, name, value)


def test_answers_count_as_they_are() -> None:
    native = _Counted()
    meter = IdleMeter(native, 1)  # type: ignore[arg-type]
    native.counts = {"counted_ns": 10**9, "idle_ns": 25 * 10**7}
    assert meter.read() == (1.0, 0.25)
    native.counts = {"counted_ns": 3 * 10**9, "idle_ns": 75 * 10**7}
    assert meter.read() == (3.0, 0.75)


def test_each_launch_that_is_found_stands_for_its_gap() -> None:
    native = _Counted()
    meter = IdleMeter(native, 1)  # type: ignore[arg-type]
    native.counts = {"counted_ns": 10**9, "launches": 10, "watched_ns": 1_000_000}  # 10 in a millisecond
    counted_s, idle_s = meter.read()
    assert counted_s == 1.0
    assert idle_s == pytest.approx(10 * 2.6e-3)
    native.counts = {"counted_ns": 11 * 10**8, "idle_ns": 10**8, "launches": 10**6, "watched_ns": 1_000_000}
    assert meter.read()[1] <= idle_s + 0.1 + 1e-9  # never idle for longer than it was looked at


def test_a_launch_onto_an_idle_gpu_takes_its_moment() -> None:
    native = _Counted()
    meter = IdleMeter(native, 1)  # type: ignore[arg-type]
    native.counts = {"counted_ns": 10**9, "idle_ns": 2 * 10**8, "stops": 4, "exposed_ns": 1_000_000}
    assert meter.read()[1] == pytest.approx(0.2 + 4 * 11e-3)


def test_a_closed_meter_says_nothing() -> None:
    meter = IdleMeter(_Counted(), 1)  # type: ignore[arg-type]
    meter.close()
    assert meter.read() == (0.0, 0.0)


@pytest.mark.gpu
def test_a_busy_gpu_is_told_from_an_idle_one() -> None:
    device = torch.device("cuda", 0)
    meter = idle_meter_for(device, period_ns=200_000)
    if meter is None:
        pytest.skip("installed without the C library")
    factor = torch.randn(4096, 4096, device=device)
    torch.cuda.synchronize()
    before = meter.read()
    torch.cuda._sleep(600_000_000)
    factor @ factor
    torch.cuda.synchronize()
    busy = meter.read()
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    time.sleep(0.3)
    idle = meter.read()
    meter.close()
    assert (busy[1] - before[1]) / (busy[0] - before[0]) < 0.1
    assert (idle[1] - busy[1]) / (idle[0] - busy[0]) > 0.9
