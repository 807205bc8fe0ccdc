"""Runs one case in a process of its own, and ends it, workers included, when it takes too long."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import asdict
from pathlib import Path

from benchmarks.about import ROOT
from benchmarks.process import end, start, why_it_ended

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
            process = start(command, cwd=ROOT, output=output)
        except OSError as error:
            return Result(case=case, failed=f"no interpreter {python}: {error.strerror}")
        late = False
        try:
            process.wait(timeout=case.limit_s)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            code = end(process)
    if file.exists():
        result = Result.from_json(json.loads(file.read_text()))
        return Result(case=result.case, failed=result.failed, figures={**result.figures, "load": load})
    if late:
        return Result(case=case, failed=f"stopped after {case.limit_s:g} s")
    return Result(case=case, failed=why_it_ended(code, log))
