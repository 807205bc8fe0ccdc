"""The benchmark of inference runs tiny on the CPU: every case generates the same tokens, the figures add up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.wide
def test_a_tiny_model_generates_in_every_case(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    command = [
        sys.executable, "-m", "benchmarks.inference", "--tiny", "--commit", "this", "--out", str(tmp_path / "t"),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "t.log").read_text()
    table = (tmp_path / "t.md").read_text()
    assert table in done.stdout
    assert "commit: this" in table
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    rows = {line[0]: dict(zip(lines[0], line, strict=True)) for line in lines[2:]}
    assert set(rows) == {"link", "resident", "storm", "storm-no-cudnn", "accelerate", "accelerate-no-cudnn"}
    assert rows["storm"]["tokens"] == rows["accelerate"]["tokens"] == rows["resident"]["tokens"] != ""
    loaded, absent = (float(rows["storm"][column].split()[0]) for column in ("loaded a token", "not resident"))
    assert loaded == pytest.approx(absent, rel=0.2)  # some of it is on its way when a token is there
    assert float(rows["storm"]["of the link"]) > 0
    assert float(rows["storm"]["of vram"]) > 0.9
    assert "units are resident" in (tmp_path / "t.log").read_text()


@pytest.mark.wide
def test_a_tiny_mixture_of_experts(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    command = [sys.executable, "-m", "benchmarks.inference", "resident", "storm", "--tiny", "--size", "moe-30b"]
    command += ["--commit", "this", "--out", str(tmp_path / "t")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "t.log").read_text()
    rows = [line.strip("| ").split(" | ") for line in (tmp_path / "t.md").read_text().splitlines()]
    found = {row[0]: row[-1] for row in rows if row[0] in ("resident", "storm")}
    assert found["resident"] == found["storm"] != ""
