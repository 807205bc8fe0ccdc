"""Ctrl-C at every line of a save, of a wait for one and of a step beside one: nothing hangs, nothing is left.

A tracing function stands in for the keyboard: it raises at the n-th line of our own files on the main thread.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from stormtorch.checkpoint import complete
from stormtorch.checkpoint.files import disk
from stormtorch.checkpoint.files.disk import DiskCalls
from stormtorch.core.errors import StormError
from stormtorch.core.tags import Tag, Tier

from ..forkserver import run as run_process
from ..keyboard import Keyboard
from ..thinning import daily
from .made import Run

OURS = (
    "/checkpoint/saver.py",
    "/checkpoint/saving/writing.py",
    "/checkpoint/folders/folder.py",
    "/checkpoint/state/snapshot.py",
)


def unfinished(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    "wait", [pytest.param(True, marks=pytest.mark.wide), False], ids=["wait, every third", "behind"]
)
def test_ctrl_c_at_every_line_of_a_save(tmp_path: Path, wait: bool) -> None:
    run = Run()
    run.step()
    run.session.save(tmp_path / "good")
    threads = threading.active_count()
    at, missed = 1, 0
    while True:
        keyboard = Keyboard(at, OURS)
        ended = keyboard.during(lambda: run.session.save(tmp_path / "next", wait=wait))
        if ended and keyboard.lines < at:
            break
        missed += ended
        run.session.synchronize()  # would hang if anything still waited for anything
        assert unfinished(tmp_path) == [], keyboard.where
        assert complete(tmp_path / "good")
        assert run.session.ledger.used_bytes(Tier.HOST, Tag.CHECKPOINT) == 0
        at += daily(8, 3) if wait else daily(3, 1)
    assert at > 100
    assert missed == 0
    run.step()
    run.session.save(tmp_path / "next")
    assert threading.active_count() == threads
    run.session.close()


def test_ctrl_c_at_every_line_of_what_a_step_does_for_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it was copying is not lost, neither for the file nor for those who wait for it."""
    run = Run()
    run.step()
    run.session.save(tmp_path / "expected")
    run.session.save(tmp_path / "first")
    expected = (tmp_path / "expected" / "storm" / "optimizer.safetensors").read_bytes()
    still = run.session._saver._durable.still
    for at in range(1, 400, daily(5, 2)):
        go = threading.Event()

        def write(fd: int, view: memoryview, offset: int, go: threading.Event = go) -> int:
            assert go.wait(300)
            return os.pwrite(fd, view, offset)

        monkeypatch.setattr(disk, "CALLS", DiskCalls(pwrite=write))
        run.session.save(tmp_path / "next", wait=False)
        keyboard = Keyboard(at, OURS)
        ended = keyboard.during(lambda: still.before_change(0))
        go.set()
        still.before_change(None)
        run.session.synchronize()
        assert (tmp_path / "next" / "storm" / "optimizer.safetensors").read_bytes() == expected
        assert run.session.ledger.used_bytes(Tier.HOST, Tag.CHECKPOINT) == 0
        if ended:
            break
    assert at > 20
    run.session.close()


# ------------------------------------------------------------------------------------------- processes that end early

ENDING = """
import os, sys, threading, time
from pathlib import Path
sys.path[:0] = {paths!r}
from stormtorch.checkpoint.files import disk
from tests.checkpoint.made import Run

folder, how = Path(sys.argv[1]), sys.argv[2]

def write(fd, view, offset):
    time.sleep(0.05)
    if how == "full":
        raise OSError(28, "No space left on device")
    return os.pwrite(fd, view, offset)

def main():
    run = Run()
    run.step()
    disk.CALLS = disk.DiskCalls(pwrite=write)
    run.session.save(folder / "one", wait=False)
    if how == "forked":
        if not os.fork():
            run.session._saver.finish()  # the save is the parent's
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
    if how == "raises":
        raise SystemExit(5)

main()  # and everything in it is forgotten, unclosed
"""


@pytest.mark.parametrize(
    ("how", "status", "words"),
    [
        pytest.param("plain", 0, "", marks=pytest.mark.wide),
        ("raises", 5, ""),
        ("forked", 0, ""),
        ("full", 0, "A save in the background failed: "),
    ],
    ids=str,
)
def test_a_script_that_ends_without_close(tmp_path: Path, how: str, status: int, words: str) -> None:
    script = ENDING.format(paths=[str(Path(__file__).parents[2]), *sys.path])
    ended = run_process(
        [sys.executable, "-c", script, str(tmp_path), how],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == status, ended.stderr
    assert words in ended.stderr
    assert unfinished(tmp_path) == []
    assert complete(tmp_path / "one") == (how != "full")


def test_an_exception_beside_a_save_does_not_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    run.step()

    def write(fd: int, view: memoryview, offset: int) -> int:
        time.sleep(0.02)
        return os.pwrite(fd, view, offset)

    monkeypatch.setattr(disk, "CALLS", DiskCalls(pwrite=write))
    run.session.save(tmp_path / "one", wait=False)
    hook = run.model.head.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), run.session:
        run.step()
    hook.remove()
    assert complete(tmp_path / "one")


# ------------------------------------------------------------------------------------------------------------- hooks


def test_saving_in_a_forward_hook_and_not_in_a_backward_one(tmp_path: Path) -> None:
    run = Run()
    run.step()
    run.session.save(tmp_path / "before")
    hook = run.model.head.register_forward_hook(lambda *_: run.session.save(tmp_path / "within"))
    run.step()
    hook.remove()
    for file in ("model.safetensors", "storm/optimizer.safetensors"):
        assert (tmp_path / "before" / file).read_bytes() == (tmp_path / "within" / file).read_bytes()

    def called(*_: object) -> None:
        run.session.save(tmp_path / "inside")

    hook = run.model.head.weight.register_post_accumulate_grad_hook(called)
    with pytest.raises(StormError, match="Cannot save inside a backward pass"):
        run.step()
    hook.remove()
    assert not (tmp_path / "inside").exists()
    run.optimizer.zero_grad()
    hook = run.model.head.register_forward_hook(lambda *_: run.session.load(tmp_path / "before"))
    with pytest.raises(StormError, match="Cannot load inside a forward pass"):
        run.step()
    hook.remove()
    run.session.load(tmp_path / "before")
    run.step()
    run.session.close()


def test_ctrl_c_while_waiting_in_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    run.step()

    def write(fd: int, view: memoryview, offset: int) -> int:
        time.sleep(0.3)
        return os.pwrite(fd, view, offset)

    monkeypatch.setattr(disk, "CALLS", DiskCalls(pwrite=write))
    run.session.save(tmp_path / "one", wait=False)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        run.session.close()
    assert list(tmp_path.iterdir()) == []
    assert not hasattr(run.model.head.weight, "_storm")
