"""What stands above every table: the code and the machine."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def commit() -> str:
    """The commit of the working tree, marked if there is more in it; "unknown" without git."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def machine() -> str:
    """Imports torch, which must not hold the GPU while the cases run: ask when they are over."""
    from benchmarks.micro.rows import machine as described

    return described()
