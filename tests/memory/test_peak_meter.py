"""What was taken between two steps counts until a step has shown it."""

from __future__ import annotations

from stormtorch.memory.cuda.peak_meter import PeakMeter


def test_growth_counts_until_it_is_seen() -> None:
    peak = [100]
    meter = PeakMeter(lambda: peak[0])
    assert meter.bytes() == 100
    meter.grew(30)
    meter.grew(5)
    assert meter.bytes() == 135
    peak[0] = 134  # the next step, with somewhat less of other things
    assert meter.bytes() == 134
    meter.grew(10)
    assert meter.bytes() == 144
    peak[0] = 150
    assert meter.bytes() == 150
