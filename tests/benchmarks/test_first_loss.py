"""The benchmark of the first loss: both ways reach one, and every part of the time is written down."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.wide
def test_both_ways_reach_a_loss(tmp_path: Path) -> None:
    for package in ("transformers", "safetensors"):
        pytest.importorskip(package)
    words = "--size tiny --device cpu --vram 24MiB --rows 2 --sequence 32 --rounds 1 --commit this"
    command = [sys.executable, "-m", "benchmarks.finetune.first_loss", *words.split(), "--out", str(tmp_path / "table")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    table = (tmp_path / "table.md").read_text()
    assert "commit: this" in table
    rows = {cells[1].strip(): cells for line in table.splitlines() if len(cells := line.split("|")) > 7}
    for way in ("plain", "storm"):
        read, optimizer, streamed, forward, everything = (float(cell) for cell in rows[way][2:7])
        assert read > 0
        assert forward > 0
        assert everything == pytest.approx(read + optimizer + streamed + forward, abs=0.03)
