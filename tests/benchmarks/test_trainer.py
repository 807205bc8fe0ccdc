"""The benchmarks through Trainer run tiny on the CPU, and read a profile right."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.trainer.paired import middle_mean, ratio
from benchmarks.trainer.profiled import busy_s, gaps, running

ROOT = Path(__file__).parents[2]


def test_kernels_that_overlap_count_once() -> None:
    def event(kind: str, start: float, length: float, stream: int = 7) -> dict[str, Any]:
        return {"cat": kind, "ts": start, "dur": length, "args": {"stream": stream}}

    events = [event("kernel", 0, 10), event("kernel", 5, 10), event("gpu_memcpy", 0, 100, 13), event("kernel", 50, 1)]
    assert busy_s(running(events)) == pytest.approx(16e-6)
    assert busy_s(running([*events, event("gpu_memset", 40, 5)])) == pytest.approx(21e-6)  # compute's own
    assert busy_s(running([])) == 0
    assert gaps(running(events))["gaps below 100 us, ns"] == 35_000


def test_ratios_of_turns() -> None:
    assert middle_mean([1.0, 2.0, 3.0, 100.0]) == 2.5
    assert ratio([[2.0, 2.0], [4.0, 4.0]], [[1.0, 1.0], [2.0, 2.0]]) == "2.000 ± 0.000"
    assert ratio([[1.0], [3.0]], [[1.0], [1.0]]) == "2.000 ± 1.000"


@pytest.mark.wide
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("trainer", ["tiny", "--shapes", "2x16", "--vram", "64MiB", "--warm", "1", "--steps", "3"]),
        ("trainer.long", ["--model", "tiny", "--sequence", "32", "--vram", "2MiB", "--warm", "1", "--steps", "1"]),
    ],
)
def test_they_run_tiny(module: str, words: list[str], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    command = [sys.executable, "-m", f"benchmarks.{module}", *words, "--commit", "this", "--out", str(tmp_path / "t")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    table = (tmp_path / "t.md").read_text()
    assert "FAILED" not in table
    assert "| auto |" in table
    assert "| checkpoint |" in table


@pytest.mark.wide
@pytest.mark.timeout(600)
def test_pairs_run_tiny(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    words = ["tiny", "--shapes", "2x16", "--vram", "64MiB", "--warm", "2", "--rounds", "2", "--commit", "this"]
    command = [sys.executable, "-m", "benchmarks.trainer.paired", *words, "--out", str(tmp_path / "t")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    row = (tmp_path / "t.md").read_text().splitlines()[-1]
    assert row.startswith("| tiny | 2x16 | 64MiB | 0.")
    assert "±" in row
