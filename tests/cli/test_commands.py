from __future__ import annotations

import os
import subprocess
import sys

import pytest

from stormtorch.cli.main import main

from ..forkserver import run


def storm(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "import sys; from stormtorch.cli.main import main; sys.exit(main())", *arguments]
    return run(command, capture_output=True, text=True, timeout=500, check=False)


@pytest.mark.gpu
def test_the_demo_on_the_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--steps", "8"]) == 0
    assert "streamed loss" in capsys.readouterr().out


def test_the_doctor_names_every_tier(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for word in ("native kernels:", "host:", "device", "disk:", "I/O"):
        assert word in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["demo", "--device", "cpu", "--vram", "8G"], ["--vram='8G'", "Accepted", "GiB"]),
        (["demo", "--device", "tpu:0"], ["device='tpu:0'", "Accepted: cpu"]),
        (["demo", "--device", "cpu", "--steps", "1"], ["--steps 1", "Accepted: 2"]),
        (
            ["demo", "--device", "cpu", "--steps", "2", "--vram", "100"],
            ["100 B of device memory", "vram='100'", "Raise it"],
        ),
        (["doctor", "--disk", "/no/such/place"], ["/no/such/place", "not a directory"]),
    ],
)
def test_bad_input_gets_one_clear_line(arguments: list[str], words: list[str]) -> None:
    done = storm(*arguments)
    assert done.returncode == 1
    lines = [line for line in done.stderr.strip().splitlines() if "native kernels:" not in line]  # without a compiler
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert all(word in lines[0] for word in words), lines[0]


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_output_that_nobody_reads_is_no_error(unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "stormtorch.cli", "doctor"]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    try:
        done = run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=500, env=environment)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_no_command_shows_usage() -> None:
    done = storm()
    assert done.returncode == 2
    assert "usage: storm" in done.stderr
