"""``storm train`` as a user calls it: flags, files, the line, what is printed and the exit status."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import stormtorch
from stormtorch.cli.live import Live, status_line
from stormtorch.cli.main import main
from stormtorch.training.reporting import Status
from stormtorch.training.run import loop
from stormtorch.training.settings.train_settings import TrainSettings

from ..forkserver import TRANSFORMERS, Popen

DEMO = Path(stormtorch.__file__).parent / "demo_data"
STATUS = Status(
    step=30,
    total=100,
    loss=2.5,
    tokens_per_s=12345.6,
    left_s=3725.0,
    vram_bytes=3 << 30,
    vram_limit_bytes=8 << 30,
    ram_bytes=1 << 30,
    ram_limit_bytes=16 << 30,
)


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What stands on stderr, but for the notice that there are no native kernels."""
    return [line for line in capsys.readouterr().err.strip().splitlines() if "native kernels:" not in line]


def flags(folder: Path, *more: str) -> list[str]:
    """A few steps of a small model, from a config that is made here."""
    model = folder / "model"
    model.mkdir(exist_ok=True)
    config = json.loads((DEMO / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "hidden_size": 48, "num_hidden_layers": 2}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).write_bytes((DEMO / name).read_bytes())
    return [
        *("train", "--model", str(model), "--data", str(DEMO / "corpus.jsonl"), "--output", str(folder / "run")),
        *("--device", "cpu", "--dtype", "fp32", "--sequence", "32", "--batch", "2", "--lr", "1e-3", *more),
    ]


def test_print_config_says_what_would_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: there\ndata: [a.jsonl]\nlr: 1e-4\nbatch: 3\npacking: true\n")
    assert main(["train", "--config", str(file), "--print-config", "--batch", "5", "--no-packing"]) == 0
    printed = capsys.readouterr().out
    assert all(line in printed for line in ("model: there", "lr: 0.0001", "batch: 5", "packing: false"))
    file.write_text(printed)
    assert main(["train", "--config", str(file), "--print-config"]) == 0
    assert capsys.readouterr().out == printed


def test_every_setting_has_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = capsys.readouterr().out
    for item in dataclasses.fields(TrainSettings):
        assert f"--{item.name.replace('_', '-')}" in text


def test_settings_are_read_without_torch() -> None:
    code = (
        "import sys\n"
        "from stormtorch.cli.main import main\n"
        "assert main(['train', '--model', 'a', '--data', 'b', '--print-config']) == 0\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, timeout=500)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--lr", "-1"], "lr='-1' is not accepted. Accepted: a number above 0."),
        (["--vram", "8G"], "vram='8G' is not a byte size"),
        (["--device", "tpu"], "device='tpu'"),
        (["--config", "absent.yaml"], "--config absent.yaml cannot be read"),
        (["--model", "nowhere"], "--model nowhere"),
        (["--data", "absent.jsonl"], "absent.jsonl does not exist"),
        (["--vram", "10KiB"], "Raise it"),
        (["--vram", "8"], "The limit is vram='8'. Did you mean '8GiB'? Raise it"),
        (["--vram=-1GiB"], "vram='-1GiB' is not a byte size"),
        (["--output", "/proc/storm"], "Cannot create /proc/storm: no folders can be made there"),
        (["--ram", "200KiB"], "are needed"),
    ],
)
def test_mistakes_get_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], words: str) -> None:
    pytest.importorskip("transformers")
    assert main(flags(tmp_path, *more)) == 1
    lines = lines_of(capsys)
    assert len(lines) == 1, lines
    assert lines[0].startswith("storm train: ")
    assert words in lines[0]


def test_a_run_is_told_from_beginning_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    assert main(flags(tmp_path, "--steps", "3", "--log-every", "1", "--vram", "600KiB")) == 0
    out = capsys.readouterr().out
    for words in (
        "LlamaForCausalLM: ",
        "random, seed 0",
        "3 steps of 2 rows (64 tokens)",
        "cpu, whose memory is RAM too, at most 600.0 KiB of it (vram='600KiB')",
        "step 1/3",
        "device 600.0/600.0 KiB",
        "step 3/3",
        "peaks: device",
        "The trained model is ",
        "AutoModelForCausalLM.from_pretrained(",
    ):
        assert words in out, words


@contextlib.contextmanager
def started(folder: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
    """The command in a process of its own, when it has logged its first step."""
    command = [sys.executable, "-m", "stormtorch.cli", *flags(folder, "--log-every", "1", "--steps", "100000", *more)]
    child = Popen(command, preload=TRANSFORMERS, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        metrics = folder / "run" / "metrics.jsonl"
        end = time.monotonic() + 300
        while not (metrics.exists() and metrics.read_text().count("\n") > 2):
            assert child.poll() is None, child.communicate()
            assert time.monotonic() < end
            time.sleep(0.05)
        yield child
    finally:
        child.kill()
        child.communicate()


def test_ctrl_c_ends_it_with_a_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with started(tmp_path) as child:
        os.kill(child.pid, signal.SIGINT)
        out, errors = child.communicate(timeout=500)
    assert child.returncode == 130
    assert "Traceback" not in errors
    assert "The same command resumes from there." in out
    [saved] = (tmp_path / "run" / "checkpoints").iterdir()
    assert (saved / "model.safetensors").is_file()


def test_a_loss_that_is_no_number_is_status_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    assert main(flags(tmp_path, "--steps", "50", "--lr", "1e30", "--clip", "0", "--save-every", "1")) == 3
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("storm train: ")
    assert "not finite" in last or "the loss is" in last


def test_a_device_that_is_out_of_memory_gets_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")

    def out_of_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore of it.")

    monkeypatch.setattr(loop, "forward_backward", out_of_memory)
    assert main(flags(tmp_path, "--steps", "3")) == 1
    [line] = lines_of(capsys)
    assert "Tried to allocate 2.00 GiB. Lower --batch" in line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_line_on_a_terminal_is_redrawn_and_others_stand_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    out, now = Terminal(), [0.0]
    live = Live(out=out, errors=out, clock=lambda: now[0])
    live.show(STATUS)
    live.show(STATUS)  # too soon to be drawn again
    live.log(STATUS)  # it is on the line already
    live.say("said")
    live.close()
    line = status_line(STATUS)
    assert out.getvalue() == f"\r{line}\x1b[K\r\x1b[Ksaid\n"
    assert line == ("step 30/100  ETA 1:02:05  loss 2.5000  12,346 tokens/s  VRAM 3.0/8.0 GiB  RAM 1.0/16.0 GiB")


def test_the_last_state_of_the_line_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    out = Terminal()
    live = Live(out=out, errors=out)
    done = dataclasses.replace(STATUS, step=100, ram_bytes=5 << 20)
    live.show(done)
    live.say("said")
    assert out.getvalue() == f"\r{status_line(done)}\x1b[K\nsaid\n"
    assert status_line(done).endswith("RAM 5.0 MiB/16.0 GiB")


def test_what_does_not_fit_on_the_terminal_is_left_out_and_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    line = status_line(STATUS)
    for width in (len(line), 80, 60, 10):
        monkeypatch.setenv("COLUMNS", str(width + 1))
        out = Terminal()
        Live(out=out, errors=out).show(STATUS)
        shown = out.getvalue().removeprefix("\r").removesuffix("\x1b[K")
        assert len(shown) <= width
        assert line == shown or line.startswith(f"{shown}  ") or width == 10
    assert "VRAM 3.0/8.0 GiB" in status_line(STATUS, 79)
    assert "device 3.0/8.0 GiB" in status_line(dataclasses.replace(STATUS, on_gpu=False))


def test_elsewhere_only_logged_steps_get_a_line() -> None:
    out, errors = io.StringIO(), io.StringIO()
    live = Live(out=out, errors=errors)
    live.show(STATUS)
    live.log(STATUS)
    live.warn("wrong")
    live.reading(100)(100)
    live.close()
    assert out.getvalue() == status_line(STATUS) + "\n"
    assert errors.getvalue() == "storm train: wrong\n"
