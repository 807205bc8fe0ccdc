"""The benchmark of ``storm train``: it writes a model, trains it, kills it, resumes it, and says what that took."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.wide
def test_a_tiny_model_goes_all_the_way(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("safetensors")
    command = [
        sys.executable, "-m", "benchmarks.finetune", "tiny", "--vram", "512MiB", "--batch", "1", "--sequence", "64",
        "--steps", "6", "--dtype", "fp32", "--commit", "this", "--scratch", str(tmp_path), "--out", str(tmp_path / "t"),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    table = (tmp_path / "t.md").read_text()
    assert "commit: this" in table
    for column in ("weights read", "tokens/s", "saved", "checkpoint", "resumed", "peak RSS"):
        assert column in table
    assert "resumed" in (tmp_path / "t.log").read_text()
    assert not list(tmp_path.glob("finetune-*")), "files were left behind"
