"""Whatever file operation fails, or is the last one of the process: the last good checkpoint is there, nothing else is.

The operations of one save are counted first; then each of them fails in turn, or kills a child.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stormtorch.checkpoint import complete, newest, prune, sweep
from stormtorch.checkpoint.files import disk
from stormtorch.checkpoint.files.disk import DiskCalls
from stormtorch.checkpoint.folders.manifest import read_manifest
from stormtorch.core.errors import CheckpointError, StorageError, StormError, WrongModel

from ..forkserver import run as run_process
from .made import Run, disk_bytes, equal, session_of, small, weights

COUNTED = ("mkdir", "open", "pwrite", "sync", "rename", "exchange", "remove")


def counting(at: int, action: Callable[[str], None]) -> tuple[DiskCalls, list[str]]:
    """Calls that do ``action`` before number ``at``, and the names of those that were made."""
    made: list[str] = []
    lock = threading.Lock()

    def wrapped(name: str) -> Callable[..., Any]:
        real = getattr(DiskCalls(), name)

        def call(*arguments: Any) -> Any:
            with lock:
                made.append(name)
                hit = len(made) == at
            if hit:
                action(name)
            return real(*arguments)

        return call

    return dataclasses.replace(DiskCalls(), **{name: wrapped(name) for name in COUNTED}), made


def operations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    run = Run()
    run.step()
    run.session.save(tmp_path / "counted")
    calls, made = counting(0, lambda _name: None)
    monkeypatch.setattr(disk, "CALLS", calls)
    run.session.save(tmp_path / "counted")  # over the first: every operation that there is
    monkeypatch.setattr(disk, "CALLS", DiskCalls())
    run.session.close()
    assert set(made) == set(COUNTED)
    return made


def test_every_operation_fails_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = len(operations(tmp_path / "counting", monkeypatch))
    assert count > 15
    run = Run()
    run.step()
    folder = tmp_path / "run"
    run.session.save(folder / "good")
    baseline, kept = disk_bytes(folder), weights(run.model)
    outcomes = []
    for at in range(1, count + 1):

        def fail(name: str) -> None:
            raise OSError(errno.EIO, f"{name} failed")

        calls, _ = counting(at, fail)
        monkeypatch.setattr(disk, "CALLS", calls)
        run.step()
        try:
            run.session.save(folder / "good" if at % 2 else folder / "next", wait=at % 3 > 0)
            run.session.synchronize()
        except StorageError as error:
            outcomes.append(str(error))
        monkeypatch.setattr(disk, "CALLS", DiskCalls())
        sweep(folder)
        assert complete(folder / "good"), f"operation {at}"
        assert {path.name for path in folder.iterdir()} <= {"good", "next"}, f"operation {at}"
        if (folder / "next").exists():
            assert complete(folder / "next")
            prune(folder, 1)
            (newest(folder) or folder).rename(folder / "good")
        assert disk_bytes(folder) < baseline + 4096
    assert len(outcomes) > count * 2 // 3
    assert all(str(folder) in message for message in outcomes), outcomes
    run.session.load(folder / "good")
    assert kept.keys() == weights(run.model).keys()
    run.session.close()


CHILD = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = {paths!r}
from tests.checkpoint.made import Run, disk_bytes
from tests.checkpoint.test_faults import counting
from stormtorch.checkpoint import complete, newest, prune, sweep
from stormtorch.checkpoint.files import disk
import torch._dynamo  # which the first optimizer imports, in a second and a half

def forked(action):
    pid = os.fork()
    if not pid:
        try:
            action()
        except BaseException as error:
            print("raised", repr(error), flush=True)
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def first():
    run = Run()
    run.step()
    run.session.save(folder / "good")

def last(at, name):
    run = Run()
    run.session.load(newest(folder))
    run.step()
    disk.CALLS, _ = counting(at, lambda name: (print(at, name, flush=True), os.kill(os.getpid(), signal.SIGKILL)))
    run.session.save(folder / name)

folder = Path(sys.argv[1])
assert forked(first) == 7
baseline = disk_bytes(folder)
for argument in sys.argv[2:]:
    at, name = argument.split("=")
    print("exit", forked(lambda: last(int(at), name)), flush=True)
    assert newest(folder) is not None
    sweep(folder)
    assert complete(folder / "good"), at
    assert {{path.name for path in folder.iterdir()}} <= {{"good", "next"}}, at
    prune(folder, 1)
    newest(folder).rename(folder / "good")
    assert disk_bytes(folder) < baseline + 4096, at
"""


def test_killed_at_an_operation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By SIGKILL. What is newest then can be loaded, and nothing else is left."""
    made = operations(tmp_path / "counting", monkeypatch)
    child = CHILD.format(paths=[str(Path(__file__).parents[2]), *sys.path])
    chosen = {made.index(kind) + 1 for kind in COUNTED} | set(range(3, len(made), 3))
    every = [f"{at}={'next' if at % 9 == 0 else 'good'}" for at in sorted(chosen)]
    ended = run_process(
        [sys.executable, "-c", child, str(tmp_path / "run"), *every],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "raised" not in ended.stdout
    lines = [line.split() for line in ended.stdout.splitlines()]
    killed = {line[1] for line in lines if line[0] != "exit"}
    assert killed == set(COUNTED)
    assert sum(line == ["exit", "-9"] for line in lines) > len(every) * 2 // 3  # the others had fewer operations
    run = Run(seed=1)
    run.session.load(tmp_path / "run" / "good")
    assert read_manifest(tmp_path / "run" / "good").step > 1
    run.session.close()


def test_a_full_disk_is_seen_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    run.step()
    run.session.save(tmp_path / "good")
    calls, made = counting(0, lambda _name: None)
    monkeypatch.setattr(disk, "CALLS", dataclasses.replace(calls, free_bytes=lambda _folder: 5000))
    with pytest.raises(StorageError, match=r"needs .*iB, and 4\.9 KiB are free") as caught:
        run.session.save(tmp_path / "next", wait=False)
    assert caught.value.errno == errno.ENOSPC
    assert "pwrite" not in made
    assert [path.name for path in tmp_path.iterdir()] == ["good"]
    monkeypatch.setattr(disk, "CALLS", DiskCalls())
    run.step()
    run.session.save(tmp_path / "next")
    run.session.close()


def test_a_disk_that_fills_up_while_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    run.step()
    run.session.save(tmp_path / "good")
    left = [3000]

    def write(fd: int, view: memoryview, offset: int) -> int:
        """As the kernel does it: a part, then nothing more."""
        size = min(left[0], len(view))
        if not size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left[0] -= size
        return os.pwrite(fd, view[:size], offset)

    monkeypatch.setattr(disk, "CALLS", DiskCalls(pwrite=write))
    with pytest.raises(StorageError, match=r"no space is left on the filesystem \[ENOSPC\] \(.* written, .* free\)"):
        run.session.save(tmp_path / "next")
    assert [path.name for path in tmp_path.iterdir()] == ["good"]
    monkeypatch.setattr(disk, "CALLS", DiskCalls())
    run.step()
    run.session.save(tmp_path / "next")
    run.session.close()


def test_writes_that_are_short_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    run.step()
    run.session.save(tmp_path / "one")
    monkeypatch.setattr(disk, "CALLS", DiskCalls(pwrite=lambda fd, view, at: os.pwrite(fd, view[:1000], at)))
    run.session.save(tmp_path / "two")
    monkeypatch.setattr(disk, "CALLS", DiskCalls(pread=lambda fd, view, at: os.preadv(fd, [view[:777]], at)))
    run.session.load(tmp_path / "two")
    run.session.close()
    for file in ("model.safetensors", "storm/optimizer.safetensors"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_ctrl_c_while_saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    run.step()
    run.session.save(tmp_path / "good")

    pressed = threading.Lock()

    def write(fd: int, view: memoryview, offset: int) -> int:
        if len(view) > 1000 and pressed.acquire(blocking=False):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)
        return os.pwrite(fd, view, offset)

    monkeypatch.setattr(disk, "CALLS", DiskCalls(pwrite=write))
    with pytest.raises(KeyboardInterrupt):
        run.session.save(tmp_path / "next")
    monkeypatch.setattr(disk, "CALLS", DiskCalls())
    assert [path.name for path in tmp_path.iterdir()] == ["good"]
    run.step()
    run.session.save(tmp_path / "next")
    run.session.close()


# ------------------------------------------------------------------------------------------------ damaged and foreign


@pytest.mark.parametrize("file", ["model.safetensors", "storm/optimizer.safetensors", "storm/state.pt"])
def test_a_flipped_bit_is_found_and_the_file_named(tmp_path: Path, file: str) -> None:
    run = Run()
    run.step()
    run.session.save(tmp_path / "one")
    run.session.save(tmp_path / "two")
    path = tmp_path / "one" / file
    data = bytearray(path.read_bytes())
    data[-100] ^= 4
    path.write_bytes(data)
    assert complete(tmp_path / "one")  # the sizes are right
    with pytest.raises(CheckpointError, match=rf"{path} is damaged: checksum"):
        run.session.load(tmp_path / "one")
    if file != "storm/state.pt":  # which is looked at before anything changes
        with pytest.raises(StormError, match=r"only a part of .*/one was loaded"):
            run.session.save(tmp_path / "three")
    run.session.load(tmp_path / "two")
    run.session.save(tmp_path / "three")
    run.session.close()


def test_one_line_for_each_thing_that_can_be_wrong(tmp_path: Path) -> None:
    run = Run()
    run.step()
    run.session.save(tmp_path / "good")
    run.session.close()

    def refused(run: Run, path: Path, kind: type[Exception], words: str) -> None:
        before = weights(run.model)
        with pytest.raises(kind, match=words) as caught:
            run.session.load(path)
        assert "\n" not in str(caught.value)
        assert equal(before, weights(run.model))
        run.session.close()

    refused(Run(blocks=4), tmp_path / "good", WrongModel, r"'blocks.3.weight', 'blocks.3.bias' are missing there")
    refused(Run(blocks=2), tmp_path / "good", WrongModel, r"'blocks.2.weight'.* are not in the model")
    refused(
        Run(width=8), tmp_path / "good", WrongModel, r"'scale' has shape \(16,\) there and \(8,\) in the model|shape"
    )
    refused(Run(), tmp_path / "nowhere", CheckpointError, r"nowhere is not a folder")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "model.safetensors").write_bytes((tmp_path / "good" / "model.safetensors").read_bytes())
    refused(Run(), tmp_path / "foreign", CheckpointError, "is not a checkpoint of STORM.*load_weights")
    (tmp_path / "good" / "storm" / "optimizer.safetensors").rename(tmp_path / "aside")
    refused(Run(), tmp_path / "good", CheckpointError, r"optimizer.safetensors is missing")
    (tmp_path / "aside").rename(tmp_path / "good" / "storm" / "optimizer.safetensors")

    def other(make: Callable[[Any], torch.optim.Optimizer], words: str) -> None:
        model = small()
        with session_of(model, make(model)) as session, pytest.raises(WrongModel, match=words):
            session.load(tmp_path / "good")

    other(lambda model: torch.optim.SGD(model.parameters()), "was saved with AdamW, this session has SGD")
    other(lambda model: torch.optim.AdamW(model.head.parameters()), "group 0 held 8 parameters and here holds 1")
    other(lambda model: torch.optim.AdamW(model.parameters(), amsgrad=True), "amsgrad=False")
    other(
        lambda model: torch.optim.AdamW([{"params": [p]} for p in model.parameters()]),
        "group 0 held 8 parameters and here holds 1",
    )


def test_another_dtype(tmp_path: Path) -> None:
    run = Run()
    run.session.save(tmp_path / "good")
    run.session.close()
    model = small().to(torch.bfloat16)
    with session_of(model) as session, pytest.raises(WrongModel, match=r"torch.float32, the model in torch.bfloat16"):
        session.load(tmp_path / "good")


def test_what_could_not_be_read_back_is_refused_when_saving(tmp_path: Path) -> None:
    run = Run()

    class Own:
        pass

    with pytest.raises(StormError, match=r"also\['own'\] cannot be saved"):
        run.session.save(tmp_path / "one", also={"fine": [1, "a"], "own": {"deep": Own()}})
    assert list(tmp_path.iterdir()) == []
    run.session.save(tmp_path / "one", also={"fine": [1, "a"]})
    with pytest.raises(CheckpointError, match=r"nothing for also\['scheduler'\]. It has \['fine'\]"):
        run.session.load(tmp_path / "one", also={"scheduler": run.optimizer})
    with pytest.raises(StormError, match=r"also\['fine'\] has no load_state_dict"):
        run.session.load(tmp_path / "one", also={"fine": 3})
    run.session.close()


def test_gradients_that_nobody_used_are_spoken_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    run.step()
    run.session.save(tmp_path / "one")
    assert "no gradients" not in caplog.text
    run.model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    run.session.save(tmp_path / "two")
    assert "no gradients" in caplog.text
    run.session.close()


def test_a_closed_session_says_so(tmp_path: Path) -> None:
    run = Run()
    run.session.close()
    with pytest.raises(StormError, match="closed"):
        run.session.save(tmp_path / "one")
    with pytest.raises(StormError, match="closed"):
        run.session.load(tmp_path / "one")
