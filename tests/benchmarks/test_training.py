"""The training benchmark runs tiny on the CPU, and its table, trace and refusals say what they should."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.training import opening
from benchmarks.training.cases import METHODS, SUITES, Case, parse
from benchmarks.training.peers import METHODS as STARTS
from benchmarks.training.results import Result, table
from benchmarks.training.trace import summary
from benchmarks.training.workload import SIZES, batch, build, loss_of

from ..forkserver import run

ROOT = Path(__file__).parents[2]
TINY = ("--size", "tiny", "--device", "cpu", "--micro-batch", "1", "--steps", "2")
CPU = torch.device("cpu")


def training(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.training", *words]
    return run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)


@pytest.mark.wide
def test_storm_trains_to_the_loss_of_resident_and_it_is_written_down(tmp_path: Path) -> None:
    done = training("resident", "storm", *TINY, "--out", str(tmp_path / "result"))
    assert done.returncode == 0, done.stderr + (tmp_path / "result.log").read_text()
    report = json.loads((tmp_path / "result.json").read_text())
    resident, storm = report["rows"]
    assert report["machine"]
    assert report["commit"]
    assert resident["case"]["steps"] == len(resident["steps_s"]) == 2
    assert resident["of_resident"] == 1
    assert resident["rss_bytes"] > 2**20
    assert 5 < resident["loss"] < 8
    assert storm["loss"] == pytest.approx(resident["loss"], abs=1e-4)
    assert storm["of_resident"] > 0
    assert "| resident | tiny | 1 |" in (tmp_path / "result.md").read_text()
    assert "| resident | tiny | 1 |" in done.stdout


@pytest.mark.wide
def test_a_case_out_of_time_is_a_result(tmp_path: Path) -> None:
    done = training("fsdp2", *TINY, "--limit", "0.1", "--out", str(tmp_path / "result"))
    assert done.returncode == 0, "a peer that fails is a result"
    assert "FAILED: stopped after 0.1 s" in (tmp_path / "result.md").read_text()


def test_a_peer_without_its_packages_is_a_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STORM_PEERS", str(tmp_path / "nothing"))
    done = training("ramtorch", *TINY)
    assert done.returncode == 0
    assert "FAILED: no peers' packages in" in done.stdout


@pytest.mark.parametrize("word", ["nothing", "storm-sideways", "fsdp2-forward", "storm@"])
def test_an_unknown_case_is_refused_with_the_known_ones(word: str) -> None:
    with pytest.raises(ValueError, match=r"no such case: .* resident, storm, fsdp2"):
        parse(word)


def test_cases_are_read_from_their_names() -> None:
    assert parse("storm-forward+clip@32") == (Case(method="storm", step="forward", clip=True, micro_batch=32),)
    assert parse("ramtorch-bf16") == (Case(method="ramtorch-bf16"),)
    assert parse("main") == SUITES["main"]
    assert set(METHODS) == set(STARTS)


def test_the_table_compares_with_the_resident_run_of_the_same_batch() -> None:
    results = [
        Result(case=Case(method="resident"), step_s=0.8, tokens=16384),
        Result(case=Case(method="resident", micro_batch=2), step_s=0.2, tokens=4096),
        Result(case=Case(method="storm", vram="14GiB"), step_s=1.0, wall_s=1.1, tokens=16384, rss_bytes=2**30),
        Result(case=Case(method="ds3"), failed="OutOfMemoryError: a | b"),
    ]
    storm, failed = table(results).splitlines()[-2:]
    assert storm.startswith("| storm-backward, 14GiB | 3b | 8 | 1.000 | 1.100 | 16,384 | 80% |")
    assert "| FAILED: OutOfMemoryError: a / b |" in failed
    assert storm.count("|") == failed.count("|")


def test_the_trace_tells_busy_from_idle(tmp_path: Path) -> None:
    def event(kind: str, name: str, start: float, length: float) -> dict[str, object]:
        return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": length}

    events = [
        event("kernel", "gemm", 0, 4000),
        event("kernel", "norm", 2000, 4000),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 7000, 1000),
        event("kernel", "attention", 8000, 2000),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 9000, 2000),
        event("cpu_op", "aten::mm", 0, 50000),
        {"ph": "i", "name": "mark", "ts": 0},
    ]
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"traceEvents": events}))
    text = summary(file)
    assert "| kernels | 72.7% | 0.008 |" in text
    assert "| host to device | 9.1% | 0.001 |" in text
    assert "| device to host | 18.2% | 0.002 |" in text
    assert "| 2.00 | 6.0 | 50% | 0% | attention |" in text
    assert "| 1.00 | 10.0 | 0% | 100% | the end |" in text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_dtype_starts_from_the_same_weights(dtype: torch.dtype) -> None:
    size = SIZES["tiny"]
    model = build(size, dtype=dtype, device=CPU)
    exact = build(size, dtype=torch.float32, device=CPU)
    assert sum(parameter.numel() for parameter in model.parameters()) == size.parameters
    for (name, ours), theirs in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert ours.dtype == dtype
        assert torch.equal(ours.float(), theirs), name
    weights = [parameter for parameter in exact.parameters() if parameter.dim() > 1]
    assert all(weight.std().item() == pytest.approx(0.02, rel=0.05) for weight in weights)
    first, second = (dict(layer.named_parameters())["mlp.gate.weight"] for layer in exact.layers[:2])
    assert not torch.equal(first, second)


def test_checkpointing_changes_no_number() -> None:
    size, losses, gradients = SIZES["tiny"], [], []
    tokens, targets = batch(size, 1, CPU)
    for checkpointing in (True, False):
        model = build(size, dtype=torch.float32, device=CPU, checkpointing=checkpointing)
        loss = loss_of(model(tokens), targets)
        loss.backward()
        losses.append(loss.item())
        gradients.append(model.embed.weight.grad)
    assert losses[0] == losses[1]
    assert gradients[0] is not None
    assert gradients[1] is not None
    assert torch.equal(gradients[0], gradients[1])


def test_what_is_timed_while_a_session_opens_exists() -> None:
    for module, name, _, _ in opening._TIMED:
        owner: object = importlib.import_module(module)
        for part in name.split("."):
            owner = getattr(owner, part)
        assert callable(owner), f"{module}.{name}"


@pytest.mark.wide
def test_what_opening_a_session_does_is_shown_as_a_timeline(tmp_path: Path) -> None:
    words = ("--size", "tiny", "--device", "cpu", "--vram", "1GiB", "--processes", "2", "--as-it-is")
    command = [sys.executable, "-m", "benchmarks.training.opening", *words, "--out", str(tmp_path / "opening")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    first, second = json.loads((tmp_path / "opening.json").read_text())["processes"]
    assert {span["name"] for span in first["spans"]} == {span["name"] for span in second["spans"]}
    assert {"touch", "move weights", "gradients' memory", "states' memory"} <= {span["name"] for span in first["spans"]}
    assert all(0 <= span["start_s"] <= span["end_s"] <= first["opened_s"] for span in first["spans"])
    assert "| opened, s |" in done.stdout
