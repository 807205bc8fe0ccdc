"""Several methods on one machine, each in a process of its own, taking turns.

Where the host is the limit, the same steps take a fifth longer now than a minute ago. Methods that follow each other,
each all at once, are then told apart by when they ran. Here each trains a few steps, waits for the others, and goes on.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, Queue
from types import TracebackType
from typing import Any, Self

from benchmarks.about import ROOT

_POLL_S = 1.0


class Method:
    """A process of one.py. What it prints besides is in the log."""

    def __init__(self, name: str, command: list[str], log: Path) -> None:
        self.name, self._log = name, log.open("a")
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", "benchmarks.trainer.one", *command],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._said: Queue[dict[str, Any]] = Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._reader.join()
        self._log.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(('{"turn"', '{"outcome"')):
                self._said.put(json.loads(line))
            else:
                self._log.write(line)

    def turn(self, until_s: float) -> dict[str, Any] | None:
        """Let it train for a turn. Its outcome, if that was the last one with this shape and budget."""
        try:
            assert self._process.stdin is not None
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
        except OSError:
            return self._failed(f"ended with status {self._process.wait()}")
        while True:
            try:
                outcome: dict[str, Any] | None = self._said.get(timeout=_POLL_S).get("outcome")
                return outcome
            except Empty:
                if time.monotonic() > until_s:
                    self._process.kill()
                    return self._failed("not over in time")
                if self._process.poll() is not None and not self._reader.is_alive() and self._said.empty():
                    return self._failed(f"ended with status {self._process.returncode}")

    def _failed(self, why: str) -> dict[str, Any]:
        return {"method": self.name, "failed": why}


def outcomes(methods: list[Method], until_s: float) -> Iterator[list[dict[str, Any]]]:
    """For each shape and budget, in the order in which processes go through them, what each method has measured."""
    while True:
        found: dict[str, dict[str, Any]] = {}
        number = 0
        while len(found) < len(methods):
            for method in methods if number % 2 == 0 else reversed(methods):  # there and back: none is always the first
                if method.name not in found and (outcome := method.turn(until_s)) is not None:
                    found[method.name] = outcome
            number += 1
        yield [found[method.name] for method in methods]
