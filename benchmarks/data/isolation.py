"""Runs one case in a process of its own, and ends it, workers included, when it takes too long."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from dataclasses import asdict
from pathlib import Path

from benchmarks.about import ROOT

from .cases import Case
from .results import Result


def run_isolated(case: Case, *, python: str, file: Path, log: Path, prepare: bool = False) -> Result:
    """The result that the process wrote to ``file``, or why there is none. Its output is appended to ``log``."""
    module = "benchmarks.data.one"
    command = [python, "-u", "-m", module, json.dumps(asdict(case)), str(file), *(["--prepare"] if prepare else [])]
    load = os.getloadavg()[0]
    with log.open("a") as output:
        output.write(f"\n=== {'data of ' if prepare else ''}{case.settings}\n")
        output.flush()
        try:
            process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
        except OSError as error:
            return Result(case=case, failed=f"no interpreter {python}: {error.strerror}")
        late = False
        try:
            process.wait(timeout=case.limit_s)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            _end(process)
    if file.exists():
        result = Result.from_json(json.loads(file.read_text()))
        return Result(case=result.case, failed=result.failed, figures={**result.figures, "load": load})
    if late:
        return Result(case=case, failed=f"stopped after {case.limit_s:g} s")
    code = process.returncode
    died = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    return Result(case=case, failed=f"{died}: {_last_line(log)}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the whole group, which is the case's alone: a worker may outlive the process that started it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:160] if lines else ""
