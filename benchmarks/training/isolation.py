"""Runs one case in a process of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from benchmarks.watched import watch

from .cases import Case
from .results import Result


def run_isolated(
    case: Case, command: list[str], file: Path, log: Path, *, cwd: Path, environment: Mapping[str, str] | None = None
) -> Result:
    """The result that the process wrote to ``file``, or why there is none. Its output is appended to ``log``.

    ``environment``: variables that it has beside ours."""
    watched = watch(command, file, log, title=case.settings, limit_s=case.limit_s, cwd=cwd, environment=environment)
    if watched.failed:
        return Result(case=case, failed=watched.failed, ram_bytes=watched.ram_bytes)
    return replace(Result.from_json(json.loads(file.read_text())), ram_bytes=watched.ram_bytes)
