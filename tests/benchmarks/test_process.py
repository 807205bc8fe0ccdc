"""Processes of cases: nothing is left of them, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.about import ROOT
from benchmarks.process import end, start, why_it_ended

_PARENT = """
import sys
from pathlib import Path
from benchmarks.process import start
with open(sys.argv[1], "w") as output:
    child = start([sys.executable, "-c", "import time; time.sleep(60)"], cwd=Path("."), output=output)
    print(child.pid, flush=True)
    child.wait()
"""


def test_a_case_does_not_outlive_who_started_it(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(tmp_path / "log")], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        os.kill(child, 0)
        parent.kill()
    end_s = time.monotonic() + 300
    while _runs(child):
        assert time.monotonic() < end_s, "still there"
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # its parent may never read how it ended


def test_all_of_its_group_ends(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("w") as output:
        process = start(["sh", "-c", "sleep 60 & echo $!; wait"], cwd=tmp_path, output=output)
        while not log.read_text().strip():
            time.sleep(0.01)
        assert end(process) == -signal.SIGKILL
    worker = int(log.read_text())
    end_s = time.monotonic() + 300
    while _runs(worker):
        assert time.monotonic() < end_s, "still there"
        time.sleep(0.02)
    assert why_it_ended(-signal.SIGKILL, log) == f"was ended by SIGKILL: {worker}"
