"""A process of the fork server is what `subprocess` would have started, but for the time that imports take."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .forkserver import Popen, run

SEEN = """
import json, os, sys
assert "torch" in BEFORE
print(json.dumps([sys.argv, os.getcwd(), os.environ.get("STORM_TEST"), os.getppid(), __name__, sys.stdin.read()]))
"""


def test_it_has_its_own_arguments_folder_environment_and_streams(tmp_path: Path) -> None:
    code = "import sys; BEFORE = set(sys.modules)\n" + SEEN
    (tmp_path / "script.py").write_text(code)
    commands = {"-c": ["-c", code], "script": [str(tmp_path / "script.py")], "-m": ["-m", "script"]}
    for kind, command in commands.items():
        process = Popen(
            [sys.executable, *command, "one", "two words"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "STORM_TEST": kind},
        )
        out, _ = process.communicate("said", timeout=500)
        argv0 = {"-c": "-c"}.get(kind, str(tmp_path / "script.py"))
        expected = [[argv0, "one", "two words"], str(tmp_path), kind, os.getpid(), "__main__", "said"]
        assert json.loads(out) == expected
        assert process.returncode == 0


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('one line')", 1, "one line\n"),
        ("import atexit, os; atexit.register(os.write, 2, b'at exit')", 0, "at exit"),
        ("import os, threading; threading.Timer(0.1, os.write, (2, b'joined')).start()", 0, "joined"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("import os; os.abort()", -signal.SIGABRT, ""),
        ("import warnings; warnings.simplefilter('error'); warnings.warn('x')", 1, "UserWarning: x\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT, "KeyboardInterrupt\n"),
    ],
)
def test_it_ends_as_an_interpreter_does(code: str, status: int, said: str) -> None:
    ours, real = (
        start([sys.executable, "-c", code], capture_output=True, text=True, timeout=500, check=False)
        for start in (run, subprocess.run)
    )
    assert ours.returncode == real.returncode == status, ours.stderr
    assert ours.stderr.endswith(said)
    assert real.stderr.endswith(said)
    assert bool(ours.stderr) == bool(real.stderr)


def test_it_can_be_killed_and_leaves_no_child(tmp_path: Path) -> None:
    with Popen([sys.executable, "-c", "import time; print('there', flush=True); time.sleep(100)"],
               stdout=subprocess.PIPE, cwd=tmp_path) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n"
        assert process.poll() is None
        process.kill()
    assert process.returncode == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_code_that_fails_is_refused_where_that_is_asked_for() -> None:
    with pytest.raises(subprocess.CalledProcessError):
        run([sys.executable, "-c", "raise SystemExit(3)"], check=True)
    with pytest.raises(subprocess.TimeoutExpired):
        run([sys.executable, "-c", "import time; time.sleep(100)"], timeout=0.2)
