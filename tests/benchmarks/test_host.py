"""The benchmark of the host's time runs tiny, and compares each way with plain PyTorch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.wide
def test_it_runs_tiny(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    words = ["--widths", "64", "--warm", "1", "--steps", "2", "--rounds", "1", "--clip"]
    command = [sys.executable, "-m", "benchmarks.host", *words, "--commit", "this", "--out", str(tmp_path / "t")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    table = (tmp_path / "t.md").read_text()
    assert all(f"| 64 | {way} | yes |" in table for way in ("resident", "half", "recompute"))


def test_an_unknown_way_is_named() -> None:
    command = [sys.executable, "-m", "benchmarks.host", "thirds"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert "no way 'thirds'; there are resident, half, recompute" in done.stderr
