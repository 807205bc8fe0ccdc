"""What a user sees when something is wrong: the exit status, and one line on stderr that says what and where."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import stormtorch
from stormtorch.cli.main import main

from .runs import DEMO_DATA, what_is_wrong, write_model

transformers: Any = pytest.importorskip("transformers")


class Command:
    """`storm train` on a small model in ``folder``; every run of it is made in this process."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.model, self.data, self.output = folder / "model", folder / "data.jsonl", folder / "run"
        self._capsys = capsys
        write_model(self.model)
        shutil.copy(DEMO_DATA / "corpus.jsonl", self.data)

    def __call__(self, *more: str) -> tuple[int, list[str]]:
        """The exit status, and the lines on stderr that are not progress."""
        self._capsys.readouterr()
        status = main([*arguments(self.model, self.data, self.output), *more])
        errors = self._capsys.readouterr().err.splitlines()
        assert not any("Traceback" in line for line in errors), errors
        return status, [line for line in errors if not line.startswith("100%") and "native kernels:" not in line]

    def refused(self, *more: str) -> str:
        """Its one line."""
        status, errors = self(*more)
        assert status == 1
        assert len(errors) == 1, errors
        assert errors[0].startswith("storm train: ")
        return errors[0]

    def checkpoint(self, step: int) -> Path:
        return self.output / "checkpoints" / f"step-{step:08d}"

    def records(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.output / "metrics.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if record["kind"] == kind]


def arguments(model: Path, data: Path, output: Path) -> list[str]:
    where = ["train", "--model", str(model), "--data", str(data), "--output", str(output), "--device", "cpu"]
    how = "--dtype fp32 --sequence 32 --batch 2 --steps 6 --lr 1e-3 --save-every 2 --log-every 1"
    return [*where, *how.split()]


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path, capsys)


def test_an_unreadable_line_of_data(command: Command) -> None:
    lines = command.data.read_text().splitlines()
    lines[6] = lines[6][:-1]
    command.data.write_text("\n".join(lines))
    assert f"{command.data}, line 7: not JSON" in command.refused()
    assert not list((command.output / "data").glob("*/*.npy"))  # nothing half-made is left


def test_the_tokenizer_of_another_model(command: Command) -> None:
    config = json.loads((command.model / "config.json").read_text())
    (command.model / "config.json").write_text(json.dumps(config | {"vocab_size": 100, "pad_token_id": 0}))
    said = command.refused()
    assert f"{command.data}, line 1: token " in said
    assert "the model's vocabulary of 100, the tokenizer has 257" in said


def test_a_shard_that_is_not_there(command: Command) -> None:
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(str(command.model)))
    model.save_pretrained(str(command.model), max_shard_size="50KB")
    shards = sorted(command.model.glob("model-*.safetensors"))
    assert len(shards) > 2
    shards[1].rename(shards[1].with_suffix(".elsewhere"))
    assert str(shards[1]) in command.refused()
    shards[1].with_suffix(".elsewhere").rename(shards[1])
    with shards[2].open("r+b") as file:
        file.truncate(shards[2].stat().st_size - 10)
    assert str(shards[2]) in command.refused()


def test_a_checkpoint_that_is_damaged(command: Command) -> None:
    assert command() == (0, [])
    expected = [(record["step"], record["loss"]) for record in command.records("step")]
    for step in (6, 4):
        file = command.checkpoint(step) / "model.safetensors"
        data = bytearray(file.read_bytes())
        data[-5] ^= 1
        file.write_bytes(data)
        status, errors = command()
        assert str(file) in errors[0]
        assert len(errors) == 1, errors
        if step == 6:  # the one before it is taken, and what was damaged is written again
            assert status == 0
            assert "storm train: " in errors[0]
            assert [(record["step"], record["loss"]) for record in command.records("step")] == expected
            assert what_is_wrong(command.checkpoint(6)) is None
            shutil.rmtree(command.checkpoint(6))
        else:  # none is left, and no run begins again over them
            assert status == 1
            assert command.checkpoint(4).is_dir()


def test_a_truncated_checkpoint_is_never_chosen(command: Command) -> None:
    assert command() == (0, [])
    expected = [(record["step"], record["loss"]) for record in command.records("step")]
    os.truncate(command.checkpoint(6) / "storm" / "state.pt", 100)
    status, _ = command()
    assert status == 0
    assert [record["checkpoint"] for record in command.records("resume")] == [str(command.checkpoint(4))]
    assert [(record["step"], record["loss"]) for record in command.records("step")] == expected
    assert what_is_wrong(command.checkpoint(6)) is None


def test_a_folder_that_is_no_checkpoint_of_ours(command: Command, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(str(command.model)))
    model.save_pretrained(str(foreign))
    said = command.refused("--resume", str(foreign))
    assert str(foreign) in said
    assert "--model" in said  # what opens it


def test_another_model_than_the_checkpoints(command: Command) -> None:
    assert command("--steps", "2", "--schedule", "constant") == (0, [])
    config = json.loads((command.model / "config.json").read_text())
    (command.model / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))
    said = command.refused("--steps", "4", "--schedule", "constant")
    assert str(command.checkpoint(2)) in said
    assert what_is_wrong(command.checkpoint(2)) is None


def test_a_loss_that_is_no_number(command: Command) -> None:
    status, errors = command("--lr", "1e30", "--clip", "0", "--warmup", "0", "--save-every", "1")
    assert status == 3
    assert len(errors) == 1, errors
    step = int(errors[0].split("tep ", 1)[1].split()[0].rstrip(",:"))
    saved = [int(path.name[5:]) for path in (command.output / "checkpoints").glob("step-*")]
    assert all(number < step for number in saved), (errors, saved)
    losses = [record["loss"] for record in command.records("step")]
    assert all(map(math.isfinite, losses))


# In a mount namespace of its own: a file system of little room, filled by the checkpoints themselves.
FULL_DISK = """
import json, subprocess, sys
from pathlib import Path
from stormtorch.cli.main import main
folder, arguments = Path(sys.argv[1]), json.loads(sys.argv[2])
subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={sys.argv[3]}", "none", str(folder)], check=True)
seen = {"statuses": []}
for room in ("first", "more"):
    if room == "more":
        subprocess.run(["mount", "-o", "remount,size=64m", str(folder)], check=True)
    seen["statuses"].append(main(arguments))
    seen[room] = sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())
lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
seen["losses"] = [(r["step"], r["loss"]) for r in map(json.loads, lines) if r["kind"] == "step"]
print("\\n" + json.dumps(seen))
"""


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs a mount namespace, and there is no unshare here")
@pytest.mark.parametrize(
    ("checkpoints", "weights_fit"),
    [(2.1, False), pytest.param(2.6, True, marks=pytest.mark.wide)],
    ids=["full", "nearly full"],
)
def test_a_disk_that_is_full(checkpoints: float, weights_fit: bool, command: Command, tmp_path: Path) -> None:
    assert command() == (0, [])
    expected = [[record["step"], record["loss"]] for record in command.records("step")]
    one = sum(file.stat().st_size for file in command.checkpoint(6).rglob("*") if file.is_file())
    rows = sum(file.stat().st_size for file in (command.output / "data").rglob("*") if file.is_file())
    small = tmp_path / "small"
    small.mkdir()
    # For two checkpoints and what is kept free besides; while the third is written there would be three. The weights
    # alone are a third of one.
    room = rows + int(checkpoints * one) + (1100 << 10)
    inner = arguments(command.model, command.data, small / "run")
    script = ["unshare", "-rm", sys.executable, "-c", FULL_DISK, str(small), json.dumps(inner), str(room)]
    environment = {**os.environ, "PYTHONPATH": str(Path(stormtorch.__file__).parent.parent)}
    done = subprocess.run(script, capture_output=True, text=True, timeout=500, check=False, env=environment)
    if "Operation not permitted" in done.stderr or "ermission denied" in done.stderr:
        pytest.skip(f"no mount namespace for this user: {done.stderr.splitlines()[0]}")
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert "Traceback" not in done.stderr
    assert f"{small}/run/checkpoints" in done.stderr
    last = ["step-00000006"] if weights_fit else []
    assert seen["first"] == ["step-00000002", "step-00000004", *last]  # the last good ones, and nothing half-written
    # The model is not saved, and the user must know. With room it goes on; but where the weights alone were saved, with
    # nothing left to train, that is still what there is.
    assert seen["statuses"] == [1, int(weights_fit)]
    assert seen["more"] == ["step-00000004", "step-00000006"]
    assert seen["losses"] == expected
