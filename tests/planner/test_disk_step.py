"""What a step with its states on disk costs, by numbers counted by hand."""

from __future__ import annotations

import pytest

from stormtorch.planner.disk_step import Dtype, disk_step


@pytest.mark.parametrize(
    ("dtype", "state_bytes", "ram_bytes"),
    [("bf16", 80e9, 32e9), ("fp16", 96e9, 32e9), ("fp32", 64e9, 64e9)],
)
def test_eight_billion_parameters(dtype: Dtype, state_bytes: float, ram_bytes: float) -> None:
    step = disk_step(8 * 10**9, mixed_bytes_per_s=2e9, dtype=dtype)
    assert step.state_bytes == state_bytes
    assert step.seconds == pytest.approx(state_bytes / 1e9)  # each byte is read and written
    assert step.ram_bytes == ram_bytes
    assert ram_bytes / 2 < step.ram_backward_bytes < ram_bytes


def test_the_states_are_those_of_a_session() -> None:
    """Two moments, and what a weight lacks to its master."""
    moments = 4 + 4
    assert disk_step(1, mixed_bytes_per_s=1.0, dtype="bf16").state_bytes == moments + 2
    assert disk_step(1, mixed_bytes_per_s=1.0, dtype="fp16").state_bytes == moments + 4
    assert disk_step(1, mixed_bytes_per_s=1.0, dtype="fp32").state_bytes == moments


def test_the_life_of_a_drive() -> None:
    step = disk_step(3 * 10**9, mixed_bytes_per_s=2.4e9)
    assert step.drive_life(1000, 600e12) == pytest.approx(0.05)
    assert step.seconds == pytest.approx(25.0)
