"""How many cores a process may keep busy, and what is left for the thread that launches work."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stormtorch.native import cores


@pytest.mark.parametrize(
    ("count", "quota", "threads", "first"),
    [(1, 99, 1, 0), (2, 99, 1, 1), (4, 99, 3, 1), (5, 99, 3, 2), (16, 99, 14, 2), (16, 3.9, 2, 0), (16, 0.5, 1, 0)],
)
def test_share_of_the_worker(
    count: int, quota: float, threads: int, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(count)))
    monkeypatch.setattr(cores, "own_quota", lambda: quota)
    assert cores.worker_share() == (threads, list(range(first, count)))


def test_files_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each update on the CPU asks how many threads it may use."""
    cores.usable_count()
    reads: list[Path] = []

    def read_text(path: Path) -> str:
        reads.append(path)
        return ""

    monkeypatch.setattr(cores, "read_text", read_text)
    assert cores.usable_count() >= 1
    assert not reads


def test_quota_of_the_tightest_group(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("0::/outer/inner\n")
    inner = tmp_path / "root/outer/inner"
    inner.mkdir(parents=True)
    assert cores.quota_cores(tmp_path / "root", membership) == float("inf")
    (inner / "cpu.max").write_text("max 100000\n")
    assert cores.quota_cores(tmp_path / "root", membership) == float("inf")
    (inner.parent / "cpu.max").write_text("250000 100000\n")
    assert cores.quota_cores(tmp_path / "root", membership) == 2.5


def test_quota_of_version_one(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("-1\n")
    assert cores.quota_cores(tmp_path, tmp_path / "none") == float("inf")
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("400000\n")
    assert cores.quota_cores(tmp_path, tmp_path / "none") == 4
