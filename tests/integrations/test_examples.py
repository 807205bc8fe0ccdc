"""The examples run, as a user would run them, on a model and data of a few kilobytes."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("datasets")

import datasets  # type: ignore[import-untyped]
import torch
from transformers import AutoModelForCausalLM

import stormtorch as storm

from .small import assert_same, llama
from .words import word_tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    llama().save_pretrained("model")
    word_tokenizer().save_pretrained("model")


def run(name: str, rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, *more: str) -> dict[str, Any]:
    """The names that the script leaves behind."""
    Path("data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", [name, "--model", "model", "--data", "data.jsonl", "--cpu", *more])
    return runpy.run_path(str(EXAMPLES / name), run_name="__main__")


@pytest.mark.parametrize("name", ["hf_trainer.py", "trl_sft.py"])
def test_defaults_for_a_cpu_take_seconds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few steps on short rows, in fp32: bf16 takes many CPUs a hundred times as long."""
    if name == "trl_sft.py":
        pytest.importorskip("trl")
    chat = {"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]}
    left = run(name, [chat if name == "trl_sft.py" else {"text": "what is a number " * 100}] * 64, monkeypatch)
    trainer = left["trainer"]
    assert trainer.state.global_step <= 5
    assert next(trainer.model.parameters()).dtype == torch.float32
    assert max(len(row["input_ids"]) for row in trainer.train_dataset) <= 128


def test_trainer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"text": "what is a number " * 4}] * 32
    left = run("hf_trainer.py", rows, monkeypatch, "--steps", "2", "--vram", "400KiB")
    assert left["trainer"].state.global_step == 2
    assert left["trainer"].storm_report.device_peak_bytes <= 400 * 1024
    assert "peaks: device" in capsys.readouterr().out
    AutoModelForCausalLM.from_pretrained("run")


def test_sft(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("trl")
    peft = pytest.importorskip("peft")
    row = {
        "prompt": [{"role": "user", "content": "what is 3"}],
        "completion": [{"role": "assistant", "content": "3 is a number"}],
    }
    left = run("trl_sft.py", [row] * 32, monkeypatch, "--steps", "2")
    assert left["trainer"].state.global_step == 2
    assert "peaks: device" in capsys.readouterr().out
    peft.PeftModel.from_pretrained(llama(), "run")


@pytest.mark.parametrize("document", ["README.md", "docs/loop.md"])
def test_the_loop_of_the_readme(document: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As it is printed, in a folder that has a config like the demo's, of a smaller model, where a clone has it."""
    place = Path("src", "stormtorch", "demo_data", "config.json")
    (tmp_path / place).parent.mkdir(parents=True)
    config = json.loads((EXAMPLES.parent / place).read_text())
    smaller = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 4}
    (tmp_path / place).write_text(json.dumps({**config, **smaller}))
    section = (EXAMPLES.parent / document).read_text(encoding="utf-8").partition("# Your own loop\n")[2]
    block = section.partition("```python\n")[2].partition("```\n")[0]
    left: dict[str, Any] = {}
    exec(compile(block, document, "exec"), left)
    assert left["loss"] < 7.0
    assert "steps 20, " in capsys.readouterr().out
    AutoModelForCausalLM.from_pretrained("checkpoints/step-20")


def test_fabric(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What it saves is what the same script saves without STORM, bit for bit."""
    pytest.importorskip("lightning_fabric", reason="needs lightning-fabric")
    streamed, plain = (_fabric(monkeypatch, stream) for stream in (storm.stream, _not_streamed))
    printed = capsys.readouterr().out
    assert "peaks: device 400.0 KiB" in printed
    lines = [line for line in printed.splitlines() if line.startswith("step ")]
    assert len(lines) == 8
    assert lines[:4] == lines[4:]
    assert list(streamed) == ["model", "optimizer", "scheduler"]
    assert_same(streamed["model"], plain["model"])
    for mine, others in zip(*(state["optimizer"]["state"].values() for state in (streamed, plain)), strict=True):
        assert_same(mine, others)


def _fabric(monkeypatch: pytest.MonkeyPatch, stream: Any) -> dict[str, Any]:
    """What the script has saved."""
    monkeypatch.setattr(storm, "stream", stream)
    monkeypatch.setattr(sys, "argv", ["fabric.py", "--accelerator", "cpu", "--steps", "4"])
    runpy.run_path(str(EXAMPLES / "fabric.py"), run_name="__main__")
    saved: dict[str, Any] = torch.load("fabric.ckpt")
    return saved


def _not_streamed(*_: Any, **__: Any) -> Any:
    return SimpleNamespace(report=str, close=lambda: None)
