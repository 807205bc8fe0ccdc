"""``storm train`` where something goes wrong around it: one line, a documented exit status, no work lost."""

from __future__ import annotations

import errno
import io
import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stormtorch.cli.live import Live
from stormtorch.cli.main import main
from stormtorch.core.notices import forget_notices, say_once
from stormtorch.training.run import loop

from .test_train import STATUS, Terminal, flags, lines_of, started

MODULE = """
import warnings
import torch
from torch import nn

class Model(nn.Module):
    calls = 0

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(257, 16), nn.Linear(16, 257)

    def loss(self, input_ids, labels):
        logits = self.head(self.embed(input_ids))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

class Tuple(Model):
    def forward(self, input_ids, labels):
        return self.loss(input_ids, labels), None

class Plain(Model):
    def forward(self, input_ids, labels):
        return self.loss(input_ids, labels)

class Late(Plain):
    def forward(self, input_ids, labels):
        self.calls += 1
        if self.calls == 3:
            raise RuntimeError("the third time\\nand more of it")
        return super().forward(input_ids, labels)

class Constant(Model):
    def forward(self, input_ids, labels):
        return torch.zeros(())

class Warns(Plain):
    def forward(self, input_ids, labels):
        warnings.warn("the first line\\nand a stack of others")
        return super().forward(input_ids, labels)

def raises():
    raise ValueError("no luck today")

def leaves():
    raise SystemExit(5)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    pytest.importorskip("transformers")
    (tmp_path / "mishaps_of_a_test.py").write_text(MODULE)
    (tmp_path / "no_python_of_a_test.py").write_text("def make(:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "mishaps_of_a_test"
    sys.modules.pop("mishaps_of_a_test", None)


def own(folder: Path, model: str, *more: str) -> list[str]:
    given = flags(folder, "--tokenizer", str(folder / "model"), "--steps", "5", "--log-every", "1", *more)
    return [*given, "--model", model]


@pytest.mark.parametrize("kind", ["Tuple", "Plain"])
def test_losses_as_models_return_them(tmp_path: Path, module: str, kind: str) -> None:
    assert main(own(tmp_path, f"{module}:{kind}")) == 0


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("mishaps_of_a_test:raises", "raised ValueError: no luck today (" + "{folder}/mishaps_of_a_test.py, line"),
        ("mishaps_of_a_test:leaves", "raised SystemExit: 5"),
        ("mishaps_of_a_test:Constant", "The loss is not computed from weights"),
        ("no_python_of_a_test:make", "SyntaxError: invalid syntax ({folder}/no_python_of_a_test.py, line 1)"),
    ],
)
def test_models_that_raise(
    tmp_path: Path, module: str, capsys: pytest.CaptureFixture[str], model: str, words: str
) -> None:
    assert module
    assert main(own(tmp_path, model)) == 1
    [line] = lines_of(capsys)
    assert words.format(folder=tmp_path) in line


def test_what_nobody_foresaw_is_one_line_and_a_file(
    tmp_path: Path, module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(own(tmp_path, f"{module}:Late", "--save-every", "1")) == 1
    [line] = lines_of(capsys)
    assert line.startswith(f"storm train: RuntimeError: the third time ({tmp_path}/mishaps_of_a_test.py, line ")
    trace = (tmp_path / "run" / "error.txt").read_text()
    assert "and more of it" in trace
    assert "Traceback" in trace
    assert main(own(tmp_path, f"{module}:Plain", "--save-every", "1")) == 1  # another model: not resumed by mistake


def test_warnings_are_one_line(tmp_path: Path, module: str, capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert main(own(tmp_path, f"{module}:Warns")) == 0
    assert lines_of(capsys) == ["storm train: UserWarning: the first line"]


def test_notices_go_where_warnings_go(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's own way out would write into the line that is redrawn."""
    pytest.importorskip("transformers")
    forget_notices()
    real: Any = getattr(loop, "forward_backward")  # noqa: B009  # imported there, and not to be exported

    def tells(*given: Any, **settings: Any) -> Any:
        say_once("a fallback was taken")
        return real(*given, **settings)

    monkeypatch.setattr(loop, "forward_backward", tells)
    assert main(flags(tmp_path, "--steps", "2")) == 0
    assert lines_of(capsys) == ["storm train: a fallback was taken"]
    assert not logging.getLogger("stormtorch").handlers


class Gone(io.StringIO):
    """A pipe whose reader has left."""

    def write(self, _: str) -> int:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def test_nobody_reads_any_more() -> None:
    errors = io.StringIO()
    live = Live(out=Gone(), errors=errors)
    for _ in range(3):
        live.log(STATUS)
        live.say("something")
    live.close()
    assert errors.getvalue().count("The reader closed the output") == 1
    live = Live(out=Gone(), errors=Gone())  # a terminal that was closed
    live.say("something")
    live.warn("something")
    live.reading(10)(10)
    live.close()


def test_a_process_without_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert main(flags(tmp_path, "--steps", "1")) == 0
    assert main(flags(tmp_path, "--steps", "2", "--lr", "2")) == 1


def test_a_terminal_that_cannot_redraw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    out = Terminal()
    live = Live(out=out, errors=out)
    live.show(STATUS)
    live.log(STATUS)
    live.reading(10)(10)
    live.close()
    assert "\x1b" not in out.getvalue()
    assert out.getvalue().count("step 30/100") == 1


def test_a_terminal_that_goes_leaves_a_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with started(tmp_path, "--save-every", "0") as child:
        os.kill(child.pid, signal.SIGHUP)
        _, errors = child.communicate(timeout=500)
    assert child.returncode == 129
    assert "Traceback" not in errors
    [saved] = (tmp_path / "run" / "checkpoints").iterdir()
    assert (saved / "storm" / "manifest.json").is_file()


def test_the_help_has_groups_and_defaults(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = capsys.readouterr().out
    assert text.startswith("usage: storm train --model MODEL --data PATH [PATH ...] [flags]\n")
    groups = ("model and memory:", "data:", "training:", "LoRA:", "run and checkpoints:", "metrics, evaluation")
    assert [text.index(f"\n{group}") for group in groups] == sorted(text.index(f"\n{group}") for group in groups)
    for words in ("(default: 1024)", "(default: yes)", "(default: storm-run)", "exit status: 0 trained"):
        assert words in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("arguments", [["--mod", "x"], ["--epoch", "3"]])
def test_flags_are_not_guessed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["train", "--model", "x", "--data", "y", *arguments])
    assert caught.value.code == 2
    assert arguments[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--learning-rate", "1e-4"], "there is no --learning-rate. Did you mean --lr?"),
        (["--learning_rate=1e-4"], "there is no --learning_rate. Did you mean --lr?"),
        (["-lr", "1e-4"], "Did you mean --lr?"),
        (["--max-seq-length", "8"], "Did you mean --sequence?"),
        (["--epoch", "3"], "Did you mean --epochs?"),
        (["--lora-r", "8"], "Did you mean --lora-rank?"),
        (["--squence", "8"], "Did you mean --sequence?"),
        (["--wandb"], "there is no --wandb. All numbers are in metrics.jsonl"),
        (["--frobnicate"], "there is no --frobnicate. See --help."),
        (["surplus"], "unrecognized arguments: surplus"),
    ],
)
def test_flags_that_do_not_exist_get_a_suggestion(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["train", "--model", "x", *flags] if flags != ["surplus"] else ["train", *flags])
    assert caught.value.code == 2
    errors = capsys.readouterr().err
    assert errors.startswith("usage: storm train --model MODEL --data PATH [PATH ...] [flags]\n")
    assert words in errors.splitlines()[-1]


def test_other_commands_suggest_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["data", "pack", "x", "--out", "y", "--tokeniser", "z"])
    errors = capsys.readouterr().err
    assert errors.startswith("usage: storm data pack ")
    assert "there is no --tokeniser. Did you mean --tokenizer?" in errors


def test_several_processes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As torchrun and `accelerate launch` start them; the folder of the run is not touched."""
    pytest.importorskip("transformers")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(flags(tmp_path)) == 1
    [line] = lines_of(capsys)
    assert "WORLD_SIZE=2" in line
    assert not (tmp_path / "run").exists()
