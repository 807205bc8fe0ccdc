"""The benchmark of models runs tiny on the CPU; its cases, ratios and comparisons of numbers are right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.masters import MasterAdamW
from benchmarks.models.build import CONFIGS, known
from benchmarks.models.cases import MODELS, Case, parse
from benchmarks.models.results import Result, same_numbers, speed_of_resident, table
from benchmarks.training.fsdp2 import blocks_of
from torch import nn

from ..forkserver import run

ROOT = Path(__file__).parents[2]


def models(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.models", *words]
    return run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)


@pytest.mark.wide
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", [name for name in MODELS if name != "dit-2b"])
def test_a_tiny_model_trains_to_the_numbers_of_resident(model: str, tmp_path: Path) -> None:
    for package in ("transformers", "accelerate", "peft"):
        pytest.importorskip(package)
    words = ["--methods", "resident", "storm", "accelerate", "--tiny", "--commit", "this"]
    done = models(model, *words, "--out", str(tmp_path / "t"))
    assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "t.log").read_text()
    report = json.loads((tmp_path / "t.json").read_text())
    results = [Result.from_json({k: v for k, v in row.items() if k != "of_resident"}) for row in report["rows"]]
    assert (report["commit"], [result.failed for result in results]) == ("this", [""] * len(results))
    assert [result.case.method for result in results[:2]] == ["resident", "storm"]
    assert all(same_numbers(result, results).startswith("yes") for result in results[1:])
    assert f"| {model} |" in done.stdout


@pytest.mark.wide
def test_a_model_without_its_package_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORM_PEERS", str(tmp_path / "nothing"))
    done = models("dit-2b", "--methods", "resident", "--tiny")
    assert done.returncode == 0
    assert "| dit-2b |" in done.stdout
    row = next(line for line in done.stdout.splitlines() if line.startswith("| dit-2b"))
    assert "FAILED: ModuleNotFoundError: diffusers" in row or "100%" in row  # or it is installed here


@pytest.mark.wide
def test_a_case_out_of_time_is_a_result(tmp_path: Path) -> None:
    done = models("llama-2b", "--methods", "fsdp2", "--tiny", "--limit", "0.1", "--out", str(tmp_path / "t"))
    assert done.returncode == 0, "a peer that fails is a result"
    assert "FAILED: stopped after 0.1 s" in (tmp_path / "t.md").read_text()


def test_cases_are_read_from_their_names() -> None:
    both = parse("llama-2b", methods=("storm", "resident"))
    assert [(case.method, case.shape, case.vram) for case in both] == [
        ("resident", "8x1024", ""),
        ("storm", "8x1024", "12GiB"),
        ("resident", "16x1024", ""),
        ("storm", "16x1024", "24GiB"),
    ]
    (only,) = parse("vit-2b:4x1024", methods=("storm",), vram="9GiB")
    assert (only.rows, only.sequence, only.tokens, only.vram) == (4, 1024, 4096, "9GiB")
    assert {model.config for model in MODELS.values()} | {model.tiny for model in MODELS.values()} <= set(CONFIGS)
    with pytest.raises(ValueError, match=r"no such case: 'gpt:8'.* llama-2b, qwen-1b"):
        parse("gpt:8")
    assert known("tiny-vit") == "tiny-vit"


def case(method: str, **settings: Any) -> Case:
    return Case(**{"model": "llama-2b", "method": method, "rows": 8, "sequence": 1024, "vram": "", **settings})


def test_each_is_compared_with_the_fastest_resident_run_of_its_shape() -> None:
    results = [
        Result(case=case("resident"), step_s=0.8),
        Result(case=case("resident-checkpoint"), step_s=1.0),
        Result(case=case("resident", rows=16), step_s=0.1),
        Result(case=case("resident-masters"), failed="OutOfMemoryError: a | b"),
        Result(case=case("storm", vram="12GiB"), step_s=1.6, rss_bytes=2**30),
    ]
    assert [speed_of_resident(result, results) for result in results] == [1, 0.8, 1, None, 0.5]
    failed, storm = table(results).splitlines()[-2:]
    assert "| FAILED: OutOfMemoryError: a / b |" in failed
    assert storm.startswith("| llama-2b |  | 8x1024 | storm | 12GiB | 1.600 |  | 5,120 | 50% |")
    assert failed.count("|") == storm.count("|")


def test_numbers_are_compared_with_those_of_the_same_precision() -> None:
    plain = Result(case=case("resident"), losses=[2.0, 1.0])
    masters = Result(case=case("resident-masters"), losses=[2.0, 1.5, 1.0])
    results = [plain, masters]
    assert [same_numbers(result, results) for result in results] == ["", ""], "there is nothing to compare with"
    assert same_numbers(Result(case=case("storm"), losses=[2.0, 1.5]), results) == "yes, 2 steps"
    other = Result(case=case("storm"), losses=[2.0, 3.0])
    assert same_numbers(other, results) == "no: from step 2 of 2, at most 1.0e+00"
    unclipped = same_numbers(Result(case=case("storm-backward"), losses=[2.0, 3.0]), results)
    assert unclipped.endswith("; not clipped")
    assert same_numbers(Result(case=case("resident-checkpoint"), losses=[2.0]), results) == "yes, 1 steps"
    assert same_numbers(Result(case=case("storm"), losses=[2.0]), [plain]) == "", "bf16 updates are other numbers"


def test_masters_keep_what_bf16_would_lose() -> None:
    weight = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = MasterAdamW([weight], lr=1e-3, weight_decay=0.0)
    for _ in range(6):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        assert weight.grad is None
    assert weight.dtype == torch.bfloat16
    assert float(weight.detach()[0]) == pytest.approx(1 - 6e-3, abs=3e-3), "each update alone is rounded away"


def test_blocks_are_found_without_lists_inside_of_them() -> None:
    def block() -> nn.Module:
        return nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])})

    layers = nn.ModuleList([block(), block()])
    assert blocks_of(nn.ModuleDict({"embed": nn.Linear(2, 2), "inner": nn.ModuleDict({"layers": layers})})) == [*layers]
