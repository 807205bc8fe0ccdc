"""benchmarks/gpu.sh and the summary of its tables, with a stand-in for python3 that writes tables at once."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from benchmarks.about import ROOT
from benchmarks.disk.cases import CASES
from benchmarks.summary import number, rows

STAND_IN = """#!/bin/bash
case "$*" in *benchmarks.summary*) exec {python} "$@" ;; esac
echo "$PWD $*" >> {calls}
while [ $# -gt 0 ]; do [ "$1" = --out ] && out=$2; [ "$1" = "{slow}" ] && sleep 100; shift; done
[ -n "$out" ] || exit 0
case $out in *activations*) mkdir -p "$out"; out=$out/forward_backward ;; esac
step=0.9; case $PWD in */older) step=1.0 ;; esac
printf '| case | batch | step s |\\n|---|---|---|\\n| storm | 8 | %s |\\n' "$step" > "$out.md"
"""


def run(tmp_path: Path, *parts: str, slow: str = "nothing", **environment: str) -> tuple[int, str, list[str]]:
    """Status, what was said, and the calls of python3."""
    calls, older, stand_in = tmp_path / "calls", tmp_path / "older", tmp_path / "bin" / "python3"
    older.mkdir()
    stand_in.parent.mkdir()
    stand_in.write_text(STAND_IN.format(python=sys.executable, calls=calls, slow=slow))
    stand_in.chmod(0o755)
    path = f"{stand_in.parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "benchmarks/gpu.sh", str(tmp_path / "out"), *parts],
        cwd=ROOT,
        env={**os.environ, "PATH": path, "OLD": str(older), "TMPDIR": str(tmp_path), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr, calls.read_text().splitlines()


def test_groups_are_run_part_by_part_and_commits_in_turns(tmp_path: Path) -> None:
    status, said, calls = run(tmp_path, "first", "second", "third", "rest")
    assert status == 0, said
    modules = {call.split(" -m ")[1].split()[0] for call in calls if " -m " in call}
    assert modules == {
        "pytest", "benchmarks.trainer.paired", "benchmarks.inference", "benchmarks.training", "benchmarks.data",
        "benchmarks.training.opening", "benchmarks.activations", "benchmarks.trainer.long", "benchmarks.vocabulary",
        "benchmarks.finetune.first_loss",
    }  # fmt: skip
    main = [call.split()[0] for call in calls if "storm-backward storm-forward+clip" in call]
    assert main == [str(ROOT), str(tmp_path / "older")] * 2
    for name in ("main", "small", "large", "activations", "data"):
        assert f"{name}: storm 8: step s 0.900 of {1 + (name == 'main')}; older: 1.000" in said
    assert "so 0.900" in said
    assert "paired-qwen-1b: storm 8: step s 0.9" in said
    files = {file.name for file in (tmp_path / "out").iterdir()}
    assert files == {"tables.md", "logs.txt", "files.tar.gz", "summary.txt"}  # a machine may return eight at most
    with tarfile.open(tmp_path / "out" / "files.tar.gz") as archive:
        assert {"./main-2-older.md", "./activations-1/forward_backward.md", "./generate.log"} <= set(archive.getnames())
    assert "### activations-1/forward_backward.md" in (tmp_path / "out" / "tables.md").read_text()
    assert not list(tmp_path.glob("stormtorch-gpu.*"))


def test_parts_with_a_disk_have_cases_that_exist(tmp_path: Path) -> None:
    status, said, calls = run(tmp_path, "disk", "disk-large", "disk-peer", "disk-peer-weights", "disk-trainer")
    assert status == 0, said
    words = [
        call.split(" benchmarks.disk ")[1].split(" --")[0].split() for call in calls if " benchmarks.disk " in call
    ]
    cases = [[word for word in found if not word.startswith("--")] for found in words]
    assert len(cases) == 5
    assert {case for found in cases[1:] for case in found} <= set(CASES)


@pytest.mark.wide
def test_what_runs_at_the_limit_is_ended_and_what_is_left_is_named(tmp_path: Path) -> None:
    status, said, _ = run(tmp_path, "activations", "long", "generate", slow="benchmarks.trainer.long", LIMIT="23")
    assert status != 0
    assert "activations: storm 8: step s 0.900 of 1" in said
    assert "long: exit 124 (the limit of all parts)" in said
    assert "generate: exit none (not begun, for want of time)" in said


def test_a_part_that_does_not_exist_is_named(tmp_path: Path) -> None:
    status, said, _ = run(tmp_path, "mian")
    assert status != 0
    assert "no such part: mian" in said


def test_tables_are_read() -> None:
    text = "# Title\n\n| case | step s |\n|---|---|\n| a, b | 13.7 (14.8) |\n| c | FAILED: late |\n"
    text += "\n| x |\n|---|\n| 1,024 |\n"
    found = list(rows(text))
    assert found == [{"case": "a, b", "step s": "13.7 (14.8)"}, {"case": "c", "step s": "FAILED: late"}, {"x": "1,024"}]
    assert [number(row.get("step s", row.get("x", ""))) for row in found] == [13.7, None, 1024.0]
