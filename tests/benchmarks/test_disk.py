"""The benchmark of disks runs tiny on the CPU, and its table says what a step needs at least."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks.disk import one, zero_infinity
from benchmarks.disk.__main__ import main
from benchmarks.disk.cases import CASES
from benchmarks.disk.figures import moved_bytes
from benchmarks.disk.table import COLUMNS, text
from benchmarks.summary import rows
from benchmarks.training import deepspeed_ops
from benchmarks.training.workload import SIZES

from ..forkserver import run

ROOT = Path(__file__).parents[2]
TINY = ("--size", "tiny", "--device", "cpu", "--micro-batch", "1", "--steps", "2", "--commit", "this")
ROW: dict[str, Any] = {
    "parameters": 1000, "tokens": 500, "step_s": 2.0, "losses": [7.0, 6.5], "read_bytes": 0.0, "written_bytes": 0.0,
    "hidden": None, "rate": 0.0, "vram_bytes": 0, "ram_bytes": 2**30, "anonymous_bytes": 2**29,
}  # fmt: skip
ON_DISK = ROW | {"read_bytes": 4e9, "written_bytes": 2e9, "rate": 2e9, "hidden": 0.5}


def measured(run: Callable[..., Any], tmp_path: Path, *words: str) -> dict[str, dict[str, str]]:
    """The rows by their cases."""
    command = [sys.executable, "-m", "benchmarks.disk", *words, *TINY, "--directory", str(tmp_path)]
    done = run(
        [*command, "--out", str(tmp_path / "t")], cwd=ROOT, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr + (tmp_path / "t.log").read_text()
    table = (tmp_path / "t.md").read_text()
    assert table in done.stdout
    assert "commit: this" in table
    return {row["case"]: row for row in rows(table)}


def moved(row: dict[str, str]) -> tuple[float, float]:
    read, written = row["GB a step"].split(" + ")
    return float(read), float(written)


@pytest.mark.wide
@pytest.mark.timeout(600)
def test_states_on_disk_by_hand(tmp_path: Path) -> None:
    found = measured(subprocess.run, tmp_path, "ram", "all")
    assert found["ram"]["loss"] == found["all"]["loss"]
    assert moved(found["ram"]) == (0, 0)
    assert moved(found["all"]) == (0.02, 0.02)  # 8 bytes a parameter, of 2.9e6
    assert float(found["all"]["disk GB/s"]) > 0


@pytest.mark.wide
@pytest.mark.timeout(600)
def test_states_on_disk_through_the_trainer(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    found = measured(subprocess.run, tmp_path, "trainer-ram", "trainer-all", "--accumulate", "2")
    assert found["trainer-ram"]["loss"] == found["trainer-all"]["loss"]
    assert found["trainer-ram"]["tokens"] == "256"
    assert found["trainer-ram"]["hidden"] == ""
    assert found["trainer-all"]["hidden"] != ""
    assert "disk        1.8 MiB of optimizer states" in (tmp_path / "t.log").read_text()


def test_a_peer_without_its_packages_is_a_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STORM_PEERS", str(tmp_path / "nothing"))
    row = measured(run, tmp_path, "ds-states")["ds-states"]
    assert row["parameters"].startswith("FAILED: no peers' packages in")


def test_a_peer_that_the_disk_has_no_room_for_is_refused_before_anything_is_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    built = []
    monkeypatch.setattr(deepspeed_ops, "build", lambda *words: built.append(words))
    options = argparse.Namespace(size="11b", device="cuda", directory=str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: argparse.Namespace(free=60 * 10**9))
    with pytest.raises(OSError, match=r"needs \d{3} GB of disk for 11,\d{3},\d{3},\d{3} parameters; .* has 60 free"):
        zero_infinity.prepare(CASES["ds-states"], options, tmp_path)
    assert not built
    monkeypatch.setattr(zero_infinity, "alone_in_the_world", lambda: None)
    options = argparse.Namespace(size="3b", device="cpu", directory=str(tmp_path))
    zero_infinity.prepare(CASES["ds-states"], options, tmp_path)
    assert built == [("cpu", "CPUAdamBuilder", "AsyncIOBuilder")]


def test_weights_go_to_disk_with_states_only_where_the_case_says_so(tmp_path: Path) -> None:
    options = argparse.Namespace(micro_batch=2, accumulate=3, device="cuda")
    for name, where in (("ds-states", "cpu"), ("ds-all", "nvme")):
        config = zero_infinity._config(CASES[name], options, tmp_path, {"queue_depth": 8}, SIZES["3b"].vocabulary)
        zero = config["zero_optimization"]
        assert zero["offload_param"]["device"] == where
        assert zero["offload_optimizer"]["device"] == "nvme"
        assert zero["offload_optimizer"]["nvme_path"] == str(tmp_path)
        assert config["aio"] == {"queue_depth": 8}
        assert config["gradient_accumulation_steps"] == 3


def test_a_cases_own_time_begins_when_it_is_prepared_and_its_error_is_a_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ready = tmp_path / "ready"
    there = []

    def prepare(*_: object) -> None:
        there.append(ready.exists())

    def fail(*_: object) -> None:
        there.append(ready.exists())
        raise ValueError("no such thing")

    monkeypatch.setattr(zero_infinity, "prepare", prepare)
    monkeypatch.setattr(zero_infinity, "measure", fail)
    monkeypatch.setattr(one, "_rate", lambda _: 1e9)
    options = argparse.Namespace(directory=str(tmp_path), device="cpu")
    assert one.measure(CASES["ds-states"], options, ready) == {"failed": "ValueError: no such thing"}
    assert there == [False, True]
    assert [file.name for file in tmp_path.iterdir()] == ["ready"]


def test_libraries_of_the_driver_are_found_by_their_names() -> None:
    lines = [
        "7f01-7f02 r-xp 00000000 08:01 1 /usr/lib/x86_64-linux-gnu/libcuda.so.580.65",
        "7f03-7f04 r-xp 00000000 08:01 2 /opt/torch/nvidia/cu13/lib/libcudart.so.13",
        "7f05-7f06 r-xp 00000000 08:01 3 /opt/torch/lib/libtorch_cuda.so",
        "7f07-7f08 rw-p 00000000 00:00 0",
    ]
    assert deepspeed_ops.cuda_libraries("\n".join(lines)) == {
        "libcuda": "/usr/lib/x86_64-linux-gnu/libcuda.so.580.65",
        "libcudart": "/opt/torch/nvidia/cu13/lib/libcudart.so.13",
    }


def test_a_step_needs_the_time_in_ram_or_that_of_the_disk() -> None:
    made = text([("ram", ROW), ("all", ON_DISK), ("trainer-all", ON_DISK)], {"commit": "this"})
    found = {row["case"]: row for row in rows(made)}
    assert found["ram"]["least s"] == ""
    assert found["ram"]["tokens/s"] == "250"
    assert (found["all"]["least s"], found["all"]["of least"]) == ("3.000", "0.67")
    assert found["all"]["GB a step"] == "4.00 + 2.00"
    slow = {row["case"]: row for row in rows(text([("ram", ROW | {"step_s": 8.0}), ("all", ON_DISK)], {}))}
    assert slow["all"]["least s"] == "8.000"
    other = {row["case"]: row for row in rows(text([("ram", ROW | {"step_s": 8.0}), ("trainer-all", ON_DISK)], {}))}
    assert other["trainer-all"]["least s"] == "3.000"  # ram is another loop


def test_a_failure_is_a_row_as_wide_as_the_others() -> None:
    line = text([("ds-all", {"failed": "a | b\nc", "ram_bytes": 0})], {}).splitlines()[-3]
    assert line.startswith("| ds-all | FAILED: a / b c |")
    assert line.count("|") == len(COLUMNS) + 1


def test_an_unknown_case_and_backward_with_accumulation_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, said in ((["half"], "no case 'half'; there are ram"), (["all", "--accumulate", "2"], "--step forward")):
        monkeypatch.setattr(sys, "argv", ["disk", *words])
        with pytest.raises(SystemExit):
            main()
        assert said in capsys.readouterr().err


def test_what_this_process_moves_is_counted(tmp_path: Path) -> None:
    before = moved_bytes()
    (tmp_path / "file").write_bytes(bytes(2**20))
    assert moved_bytes()[1] >= before[1] + 2**20
