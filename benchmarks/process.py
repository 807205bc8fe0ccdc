"""A case's process: it leads a process group, which ends with it and with the process that started it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import IO

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)  # found before the fork: nothing may be loaded after it


def start(
    command: list[str], *, cwd: Path, output: IO[str], environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """``environment``: variables that it has beside ours. Ends with this thread, even where this process is killed: one
    that is left would take cores and memory from all that is measured later."""
    return subprocess.Popen(
        command,
        cwd=cwd,
        env={**os.environ, **(environment or {})},
        stdout=output,
        stderr=output,
        start_new_session=True,
        preexec_fn=_end_with_parent,  # noqa: PLW1509  # one call of the kernel, which takes no lock
    )


def _end_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end(process: subprocess.Popen[bytes]) -> int:
    """Ends the whole group: a worker may outlive the process that started it. Returns that one's code."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def why_it_ended(code: int, log: Path) -> str:
    """For a process that has left no result."""
    died = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"{died}: {lines[-1][:160] if lines else ''}"
