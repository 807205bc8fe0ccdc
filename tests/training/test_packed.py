"""Law: training on a packed folder gives the losses of training on its text, also when it is stopped and goes on."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path
from typing import Any

import pytest

from stormtorch.cli.main import main
from stormtorch.core.errors import SettingError

from .test_resume import elsewhere, stop_after
from .tiny import checkpoint, losses, one_thread, records, run, settings, write_model, write_text  # noqa: F401

pytest.importorskip("transformers")


def packed(folder: Path, name: str, model: Path) -> str:
    source, out = write_text(folder / f"{name}.jsonl"), folder / name
    assert main(["data", "pack", str(source), "--out", str(out), "--tokenizer", str(model)]) == 0
    return str(out)


def test_losses_are_those_of_the_text(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    held_out = str(write_text(tmp_path / "held_out.jsonl", documents=5))
    common: dict[str, Any] = {"model": str(model), "eval_every": 4}
    text = settings(tmp_path, eval_data=(held_out,), **common)
    assert run(text) == 0
    assert main(["data", "pack", held_out, "--out", str(tmp_path / "held"), "--tokenizer", str(model)]) == 0
    data = packed(tmp_path, "packed", model)
    chosen = elsewhere(text, "packed-run", data=(data,), eval_data=(str(tmp_path / "held"),))
    assert run(chosen, stop_after(3, signal.SIGINT)) == 130
    assert run(chosen) == 0
    assert losses(chosen) == losses(text)
    assert [record["loss"] for record in records(chosen, "evaluation")] == [
        record["loss"] for record in records(text, "evaluation")
    ]
    name = "model.safetensors"
    assert (checkpoint(chosen, 8) / name).read_bytes() == (checkpoint(text, 8) / name).read_bytes()
    assert run(dataclasses.replace(chosen, data=text.data)) == 0  # the same tokens: the same run


def test_a_folder_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", vocab_size=100, eos_token_id=0, pad_token_id=0)
    with pytest.raises(SettingError, match=r"token 256 is beyond the model's vocabulary of 100\. It was packed with"):
        run(settings(tmp_path, model=str(model), data=(packed(tmp_path, "packed", model),)))
