"""What was taken between two steps counts until a step has shown it."""

from __future__ import annotations

import pytest

from stormtorch.memory.cuda.device_meter import PeakMeter


def test_growth_counts_until_it_is_seen() -> None:
    peak = [100]
    meter = PeakMeter(lambda: peak[0])
    assert meter.bytes() == 100
    with meter.growing(30):
        pass
    with meter.growing(5):
        pass
    assert meter.bytes() == 135
    assert meter.unseen_bytes == 35
    peak[0] = 134  # the next step, with somewhat less of other things
    assert meter.bytes() == 135
    with meter.growing(10):
        pass
    assert meter.bytes() == 145
    peak[0] = 150
    assert meter.bytes() == 150
    assert meter.unseen_bytes == 0
    assert meter.grown_bytes == 45


def test_a_growth_that_is_a_peak_itself() -> None:
    """A step took 20 bytes on top of 10; then 100 were taken, and a few more, all without that step."""
    peak = [30]
    meter = PeakMeter(lambda: peak[0])
    with meter.growing(100):
        peak[0] = 110
    assert meter.bytes() == 130
    peak[0] = 112
    assert meter.bytes() == 130


def test_growth_that_fails_does_not_count() -> None:
    meter = PeakMeter(lambda: 100)
    with pytest.raises(MemoryError), meter.growing(30):
        raise MemoryError
    assert meter.bytes() == 100
    assert meter.grown_bytes == 0
