"""How the optimizer's work is divided."""

from __future__ import annotations

import pytest

from stormtorch.streams.optimizer.shares import Rates, device_share


def share(
    mode: str,
    *,
    cpu: float = 4e9,
    link: float = 50e9,
    busy: float = 0.5,
    step: float = 1.0,
    stalled: float | None = None,
    now: float = 0.0,
    ahead: float = 0.0,
) -> float:
    rates = Rates(cpu_elements_per_s=cpu, load_bytes_per_s=link, cpu_busy_s=busy, step_s=step, stalled_s=stalled)
    part, reason = device_share(rates, mode=mode, share=now, weight_bytes=2, state_bytes=12, ahead=ahead)
    assert f"{part:.0%}" in reason
    return part


def test_in_forward_both_end_together() -> None:
    part = share("forward")
    assert (1 - part) / 4e9 == pytest.approx((2 + 12 * part) / 50e9)
    assert share("forward", cpu=1e9) > part > share("forward", link=10e9)
    assert share("forward", cpu=1e12) == 0


def test_with_updates_ahead_the_rest_is_divided() -> None:
    """The CPU copies the weights of those home, and all weights are loaded."""
    part = share("forward", ahead=0.5)
    assert (0.5 * (1 - part) + 0.5 * 4 / 26) / 4e9 == pytest.approx((2 + 12 * 0.5 * part) / 50e9)
    assert share("forward", ahead=0.9, link=30e9) == 0  # to load the weights takes longer than what the CPU has left
    assert share("forward", ahead=1.0) == 0


def test_in_backward_the_cpu_does_what_fits_into_a_step() -> None:
    assert share("backward", busy=0.5) == 0
    part = share("backward", busy=1.6)
    assert (1 - part) * 1.6 == pytest.approx(0.8)
    assert share("backward", busy=0.8, now=0.5) == pytest.approx(0.5)


def test_with_a_ring_the_cpu_does_what_fits_into_backward() -> None:
    assert share("backward", busy=0.5, stalled=0.0) == 0
    part = share("backward", busy=1.6, stalled=0.0)
    assert (1 - part) * 1.6 == pytest.approx(0.8 * 2 / 3)
    assert share("backward", busy=0.8 * 2 / 3, now=0.5, stalled=0.0) == pytest.approx(0.5)


def test_the_time_in_which_backward_waited_for_the_cpu_is_not_the_cpus() -> None:
    """Else a CPU that holds backward up would seem to have time: the step is longer for it."""
    part = share("backward", busy=1.2, step=0.8, stalled=0.0)
    assert part > 0.5
    assert share("backward", busy=1.2, step=1.5, stalled=0.7) == pytest.approx(part)


def test_nothing_changes_before_something_was_measured() -> None:
    rates = Rates(cpu_elements_per_s=0, load_bytes_per_s=0, cpu_busy_s=0, step_s=1)
    assert device_share(rates, mode="forward", share=0.25, weight_bytes=2, state_bytes=12)[0] == 0.25
