"""Whether GPUDirect Storage works for a directory: looked for, then really tried, never at the price of a hang.

How it works. Without a GPU or the kernel module nvidia-fs there is nothing to try. Else a child process opens NVIDIA's
cuFile driver and registers a file (gds_child.py). It is a process of its own because ``cuFileDriverOpen`` may spin for
minutes, crash, or leave threads and a log file behind: the child gets a time limit, an empty folder to work in, and is
killed with all that it has started.

Compatibility mode, in which cuFile copies through RAM and claims success, is switched off for the child.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_NVIDIA_FS = Path("/proc/driver/nvidia-fs")
_CHILD = Path(__file__).with_name("gds_child.py")
_MOST_OUTPUT = 1 << 16
_GONE_S = 1.0  # after a kill; a process inside a driver call may stay until the driver lets it go


@dataclass(frozen=True)
class GdsFinding:
    """Whether GPUDirect Storage works, and why or why not, in a phrase."""

    works: bool
    reason: str


def probe_gds(
    directory: Path,
    *,
    has_gpu: bool,
    limit_s: float = 10.0,
    nvidia_fs: Path = _NVIDIA_FS,
    child: Sequence[str] | None = None,
) -> GdsFinding:
    """Find out in at most ``limit_s`` and a second. ``child``: a command to ask in place of our own, for tests."""
    if not has_gpu:
        return GdsFinding(False, "torch sees no CUDA device")
    if not nvidia_fs.exists():
        return GdsFinding(False, f"the kernel module nvidia-fs is not loaded (there is no {nvidia_fs})")
    command = [*(child or [sys.executable, "-P", str(_CHILD)]), str(directory.resolve()), str(round(limit_s) + 1)]
    status, output = _ask(command, limit_s)
    if status is None:
        return GdsFinding(False, f"the probe gave no answer in {limit_s:g} s, and was stopped")
    with contextlib.suppress(ValueError, LookupError, TypeError, RecursionError):  # it may have printed anything
        answer = json.loads(output.decode().strip().splitlines()[-1])
        if isinstance(answer["works"], bool):
            return GdsFinding(answer["works"], " ".join(str(answer["reason"]).split())[:200])
    if status < 0:
        return GdsFinding(False, f"the probe was ended by signal {-status} ({_signal_name(-status)})")
    return GdsFinding(False, f"the probe ended with status {status} and no answer that can be read")


def _ask(command: Sequence[str], limit_s: float) -> tuple[int | None, bytes]:
    """Run a command; returns its status, None if its time was up, and what it printed. It is gone afterwards."""
    environment = {**os.environ, "CUFILE_ALLOW_COMPAT_MODE": "false", "CUFILE_FORCE_COMPAT_MODE": "false"}
    end_s = time.monotonic() + limit_s
    with tempfile.TemporaryDirectory(prefix="storm-doctor-", ignore_cleanup_errors=True) as folder:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            return error.errno or 1, b""
        assert process.stdout is not None
        try:
            output = _read_until(process.stdout.fileno(), end_s)
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(max(end_s - time.monotonic(), 0.0)), output
            return None, output
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # what it has started, too
            process.stdout.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GONE_S)


def _read_until(number: int, end_s: float) -> bytes:
    """What comes until the pipe is closed, the time is up, or it is too much for an answer."""
    output = b""
    with selectors.DefaultSelector() as selector:
        selector.register(number, selectors.EVENT_READ)
        while len(output) < _MOST_OUTPUT and selector.select(max(end_s - time.monotonic(), 0.0)):
            if not (more := os.read(number, 4096)):
                break
            output += more
    return output


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
