"""The benchmarks run tiny here, so that they do not rot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.wide
def test_micro_benchmarks_run_tiny(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.micro", "--tiny", "--out", str(tmp_path / "result")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "result.json").read_text())["rows"]
    assert {row["case"] for row in rows} == {"link", "pinning", "adamw", "files"}
    assert all(row["ours"] > 0 for row in rows)
    assert "| link |" in (tmp_path / "result.md").read_text()


def test_an_unknown_case_is_refused() -> None:
    command = [sys.executable, "-m", "benchmarks.micro", "nothing"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 2
    assert "There are link, pinning" in done.stderr
