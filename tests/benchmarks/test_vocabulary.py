"""The benchmark of large vocabularies: every way trains a tiny model, within a budget, and is written down."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.wide
def test_every_way_trains_a_tiny_model(tmp_path: Path) -> None:
    for package in ("transformers", "peft", "safetensors"):
        pytest.importorskip(package)
    cases = ["llama:trainer", "gemma:full", "gemma:lora"]
    command = [sys.executable, "-m", "benchmarks.vocabulary", *cases, "--tiny", "--vram", "4MiB", "--commit", "this"]
    command += ["--limit", "300", "--out", str(tmp_path / "table")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    table = (tmp_path / "table.md").read_text()
    assert "commit: this" in table
    rows = {cells[1].strip(): cells for line in table.splitlines() if len(cells := line.split("|")) > 7}
    for case in cases:
        losses = [float(loss) for loss in rows[case][7].split(",")]
        assert len(losses) == 3
        assert all(8 < loss < 10 for loss in losses), "about the logarithm of 8,192 classes"
