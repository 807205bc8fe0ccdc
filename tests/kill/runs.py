"""Runs of `storm train` that are killed: starting them, killing them at a phase, and looking at what they leave.

What is looked at is read with code of its own, not with STORM's: a checkpoint that STORM wrongly takes for whole, or
wrongly refuses, would otherwise not be noticed.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import stormtorch

from ..forkserver import TRANSFORMERS, Popen
from ..training import tiny

DEMO_DATA = Path(stormtorch.__file__).parent / "demo_data"
STEPS, SAVE_EVERY, KEEP = 6, 2, 2


@dataclass(frozen=True)
class Moment:
    """Kill when ``phase`` begins for the ``count``-th time: exactly then, or ``delay_s`` later, while it goes on.

    ``signals``: what is sent instead, one after the other; after them the phase goes on."""

    phase: str
    count: int = 1
    delay_s: float | None = None
    signals: tuple[signal.Signals, ...] = (signal.SIGKILL,)


@dataclass(frozen=True)
class Ended:
    """How a run ended: ``status`` -9 if it was killed, and what its threads had begun last."""

    status: int
    phases: dict[str, str]

    @property
    def hit(self) -> list[str]:
        """What the kill hit: the phase of the training thread, and that of a writing one if it was at work."""
        found = [self.phases.get("m", "start")]
        writer = self.phases.get("w")
        return found + ([writer] if writer is not None and writer not in ("renamed", "removed") else [])


class Runs:
    """A server of processes, for as long as it is entered."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        source = str(Path(stormtorch.__file__).parent.parent)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
        self._server = Popen(
            [sys.executable, str(Path(__file__).with_name("announced.py"))],
            preload=TRANSFORMERS,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def __enter__(self) -> Self:
        assert self._answer() == "ready"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        try:
            self._server.wait(5)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        self._server.stdout.close()

    def run(self, arguments: list[str], log: Path, moment: Moment | None = None) -> Ended:
        """Run `storm` with ``arguments``, and kill it at ``moment`` if that comes."""
        pipe = self._folder / "phases"
        go = self._folder / "phases.go"
        for path in (pipe, go):
            path.unlink(missing_ok=True)
        os.mkfifo(pipe)
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        try:
            assert self._server.stdin is not None
            request: dict[str, object] = {"arguments": arguments, "log": str(log), "phases": str(pipe), "stop_at": None}
            if moment is not None and moment.delay_s is None:
                request["stop_at"] = (moment.phase, moment.count)
            self._server.stdin.write(json.dumps(request) + "\n")
            self._server.stdin.flush()
            pid = int(self._answer())
            phases = self._follow(reader, pid, moment, log)
            go.unlink(missing_ok=True)
        finally:
            os.close(reader)
        return Ended(int(self._answer()), phases)

    def _follow(self, reader: int, pid: int, moment: Moment | None, log: Path) -> dict[str, str]:
        """Read what is announced until the end of the process."""
        assert self._server.stdout is not None
        last: dict[str, str] = {}
        seen, rest, ended = 0, b"", False
        while not ended:
            answers = self._server.stdout.fileno()
            ready, _, _ = select.select([reader, answers], [], [], 400)
            assert ready, "nothing was heard of the run for 400 s"
            ended = answers in ready  # the server answers when it has reaped it; the pipe is whole then
            while data := _read(reader):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    thread, phase = line.decode().split()
                    last[thread] = phase
                    seen += moment is not None and phase == moment.phase
                    if moment is not None and seen == moment.count:
                        time.sleep(moment.delay_s or 0.0)
                        for place, number in enumerate(moment.signals):
                            more = place + 1 < len(moment.signals)
                            _send(pid, number, log, 60.0 if more and (place == 0 or number == signal.SIGINT) else 0.5)
                        (self._folder / "phases.go").touch()
                        moment = None
        return last

    def _answer(self) -> Any:
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        assert line, "the server of runs has ended"
        return json.loads(line)


def _send(pid: int, number: signal.Signals, log: Path, patience_s: float) -> None:
    """Two of a kind are one where the first was not heard yet: wait until the run has said something, or a while. The
    first of several is answered in words, and so is the first Ctrl-C."""
    size = log.stat().st_size
    os.kill(pid, number)
    end = time.monotonic() + patience_s
    while number != signal.SIGKILL and log.stat().st_size == size and time.monotonic() < end:
        time.sleep(0.005)


def _read(reader: int) -> bytes:
    try:
        return os.read(reader, 1 << 16)
    except BlockingIOError:
        return b""


@dataclass
class Training:
    """One training: its settings, its folder, and what must hold of it."""

    folder: Path
    kind: str = "bf16"  # a dtype, "lora", or "disk": states in scratch files
    log: Path = field(init=False)
    output: Path = field(init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        self.log, self.output = self.folder / "log.txt", self.folder / "run"

    def arguments(self, model: Path, *, steps: int = STEPS, **more: object) -> list[str]:
        self.scratch.mkdir(exist_ok=True)
        # RAM that is short has no room for sums of micro-batches.
        disk = {"disk": self.scratch, "ram": "480KiB", "accumulate": 1} if self.kind == "disk" else {}
        settings: dict[str, object] = {
            "model": model,
            "data": DEMO_DATA / "corpus.jsonl",
            "output": self.output,
            "device": "cpu",
            "dtype": "bf16" if self.kind in ("lora", "disk") else self.kind,
            "lora-rank": 2 if self.kind == "lora" else 0,
            "vram": "200KiB",
            "sequence": 64,
            "batch": 2,
            "accumulate": 2,
            "steps": steps,
            "lr": 1e-2,
            "save-every": SAVE_EVERY,
            "keep": KEEP,
            "log-every": 1,
            **disk,
            **more,
        }
        return ["train", *(str(word) for name, value in settings.items() for word in (f"--{name}", value))]

    @property
    def scratch(self) -> Path:
        return self.folder.parent / "scratch"

    @property
    def checkpoints(self) -> Path:
        return self.output / "checkpoints"

    def steps(self) -> dict[int, tuple[float, float, float]]:
        """Loss, norm and learning rate of each step, as the metrics have them."""
        found = {}
        for line in (self.output / "metrics.jsonl").read_text().splitlines():
            record = json.loads(line)
            if record["kind"] == "step":
                assert record["step"] not in found, f"step {record['step']} is twice in the metrics"
                found[record["step"]] = (record["loss"], record["grad_norm"], record["lr"])
        return found

    def resumed(self) -> list[Path]:
        """The checkpoints that runs said they go on from, oldest first."""
        lines = [line for line in self.log.read_text().splitlines() if line.startswith("resumed ")]
        return [Path(line.split()[1].rstrip(":")) for line in lines]

    def named_checkpoints(self) -> list[Path]:
        return sorted(self.checkpoints.glob("step-*")) if self.checkpoints.is_dir() else []

    def leftovers(self) -> set[Path]:
        return {path for path in self.output.rglob(".*") if path.name != ".lock"} if self.output.is_dir() else set()

    def content(self) -> dict[str, int]:
        """Every file with its size; those that tell a run's story may differ in it."""
        files = {file for file in self.output.rglob("*") if file.is_file()}
        return {
            str(file.relative_to(self.output)): file.stat().st_size for file in files if file.name != "metrics.jsonl"
        }


def what_is_wrong(checkpoint: Path) -> str | None:
    """Compare a checkpoint with its manifest, file by file; None if it is whole."""
    try:
        manifest = json.loads((checkpoint / "storm" / "manifest.json").read_text())
    except (OSError, ValueError) as error:
        return f"no manifest: {error}"
    there = {str(file.relative_to(checkpoint)) for file in checkpoint.rglob("*") if file.is_file()}
    if there != {*manifest["files"], "storm/manifest.json"}:
        return f"other files: {there ^ {*manifest['files'], 'storm/manifest.json'}}"
    for name, facts in manifest["files"].items():
        data = (checkpoint / name).read_bytes()
        if len(data) != facts["bytes"] or zlib.crc32(data) != int(facts["crc32"], 16):
            return f"{name}: {len(data)} bytes, {facts}"
    return None


def write_model(folder: Path) -> Path:
    """A Llama of a few thousand weights, with dropout, so that a wrong random state is seen in the losses."""
    return tiny.write_model(folder, attention_dropout=0.1)
