"""Where a checkpoint is put, and who else is there: links, other processes, file systems that cannot everything."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from stormtorch.checkpoint import all_complete, complete, newest, prune, sweep
from stormtorch.checkpoint.files import disk
from stormtorch.checkpoint.files.disk import DiskCalls
from stormtorch.checkpoint.folders.folder import OURS, remove
from stormtorch.checkpoint.folders.manifest import read_manifest
from stormtorch.checkpoint.saving.draft import Draft
from stormtorch.core.errors import StorageError

from ..forkserver import run as run_process
from .made import Run

CANNOT = OSError(errno.EINVAL, "Invalid argument")


@pytest.fixture
def run() -> Any:
    made = Run()
    made.step()
    yield made
    made.session.close()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_link_leads_to_its_target(tmp_path: Path, run: Run) -> None:
    (tmp_path / "large disk").mkdir()
    (tmp_path / "last").symlink_to("large disk/last")  # which is not there yet
    for _ in range(2):
        run.session.save(tmp_path / "last")
        assert names(tmp_path) == ["large disk", "last"]
        assert names(tmp_path / "large disk") == ["last"]
        assert (tmp_path / "last").is_symlink()
        assert complete(tmp_path / "last")
        run.step()


def test_links_are_not_counted_and_only_they_are_pruned(tmp_path: Path, run: Run) -> None:
    for step in (1, 2, 3):
        run.session.save(tmp_path / "run" / f"step-{step}")
        run.step()
    (tmp_path / "run" / "latest").symlink_to("step-3")
    assert [path.name for path in all_complete(tmp_path / "run")] == ["step-1", "step-2", "step-3"]
    assert newest(tmp_path / "run") == tmp_path / "run" / "step-3"
    (tmp_path / "run" / "step-1").rename(tmp_path / "elsewhere")
    (tmp_path / "run" / "step-1").symlink_to(tmp_path / "elsewhere")
    assert [path.name for path in prune(tmp_path / "run", 2)] == ["step-1"]
    assert names(tmp_path / "run") == ["latest", "step-2", "step-3"]
    assert complete(tmp_path / "elsewhere")


def test_odd_names_and_a_working_directory_that_changes(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    go = tmp_path / "go"

    def write(fd: int, view: memoryview, offset: int) -> int:
        while not go.exists():
            time.sleep(0.01)
        return os.pwrite(fd, view, offset)

    monkeypatch.setattr(disk, "CALLS", DiskCalls(pwrite=write))
    run.session.save("läufe/Schritt 1 グ", wait=False)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    go.touch()
    run.session.synchronize()
    run.session.save(tmp_path / "läufe" / "Schritt 1 グ")
    assert names(tmp_path / "läufe") == ["Schritt 1 グ"]
    assert complete(tmp_path / "läufe" / "Schritt 1 グ")
    assert names(tmp_path / "other") == []


def test_permissions_are_those_that_the_user_gives_to_new_files(tmp_path: Path, run: Run) -> None:
    before = os.umask(0o027)
    try:
        run.session.save(tmp_path / "one")
    finally:
        os.umask(before)
    assert (tmp_path / "one").stat().st_mode & 0o777 == 0o750
    for path in (tmp_path / "one").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o750 if path.is_dir() else 0o640)


def test_new_parents_are_forced_to_the_disk_too(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []

    def sync(fd: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{fd}").readlink()))

    monkeypatch.setattr(disk, "CALLS", DiskCalls(sync=sync))
    run.session.save(tmp_path / "a" / "b" / "step-1")
    assert {str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")} <= set(synced)


def test_a_name_that_is_too_long(tmp_path: Path, run: Run) -> None:
    for name in ("x" * 250, "x" * 300):
        with pytest.raises(StorageError, match="Cannot create"):
            run.session.save(tmp_path / name)
    assert names(tmp_path) == []


def test_a_place_that_takes_no_folders_is_named_as_the_user_did(run: Run) -> None:
    with pytest.raises(StorageError, match=r"^Cannot create /proc/x: no folders can be made there \[ENOENT\]"):
        run.session.save("/proc/x")


# ----------------------------------------------------------------------------------------------------- file systems


def test_a_file_system_that_forces_no_folders_and_knows_no_sizes(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sync(fd: int) -> None:
        if Path(f"/proc/self/fd/{fd}").is_dir():
            raise CANNOT

    monkeypatch.setattr(disk, "CALLS", DiskCalls(sync=sync))
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: shutil._ntuple_diskusage(0, 0, 0))
    monkeypatch.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOLCK, "No locks available")))
    run.session.save(tmp_path / "one")
    assert complete(tmp_path / "one")
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    (tmp_path / f".two.writing-{int(ended.stdout)}-ab").mkdir()
    (tmp_path / f".two.writing-{os.getppid()}-ab").mkdir()
    assert sweep(tmp_path) == [tmp_path / f".two.writing-{int(ended.stdout)}-ab"]


class Killed(BaseException):
    """Stands in for a process that ends without removing anything."""


def test_replaced_in_two_steps_one_of_them_is_there_at_every_moment(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where names cannot be exchanged. After a kill between the two, `sweep` gives the old one its name back."""
    run.session.save(tmp_path / "last")
    really = os.rename

    def cannot(_one: str, _other: str) -> None:
        raise CANNOT

    for at in range(1, 5):
        draft = Draft(tmp_path / "last")
        draft.make()
        (draft.path / "weights").write_bytes(b"new")
        calls = [0]

        def rename(one: str, other: str, calls: list[int] = calls, at: int = at) -> None:
            calls[0] += 1
            if calls[0] == at:
                raise Killed
            really(one, other)

        def delete(path: str, calls: list[int] = calls, at: int = at) -> None:
            calls[0] += 1
            if calls[0] == at:
                raise Killed
            shutil.rmtree(path)

        monkeypatch.setattr(disk, "CALLS", DiskCalls(exchange=cannot, rename=rename, remove=delete))
        monkeypatch.setattr(os, "rename", lambda *_: None)  # the dead put nothing back
        try:
            draft.publish(100 + at, {}, {})
            killed = False
        except Killed:
            killed = True
        monkeypatch.undo()
        draft._end()  # as its lock does
        OURS.clear()
        sweep(tmp_path)
        assert names(tmp_path) == ["last"], at
        assert complete(tmp_path / "last")
        assert killed == (at < 4)
        assert (read_manifest(tmp_path / "last").step == 100 + at) == (at >= 3)


def test_what_cannot_be_renamed_puts_the_old_one_back(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.session.save(tmp_path / "last")

    def cannot(_one: str, _other: str) -> None:
        raise CANNOT

    def rename(one: str, other: str) -> None:
        if ".writing-" in one:
            raise OSError(errno.EIO, "Input/output error")
        Path(one).rename(other)

    monkeypatch.setattr(disk, "CALLS", DiskCalls(exchange=cannot, rename=rename))
    run.step()
    with pytest.raises(StorageError, match="Cannot rename"):
        run.session.save(tmp_path / "last")
    assert names(tmp_path) == ["last"]
    assert read_manifest(tmp_path / "last").step == 1


# --------------------------------------------------------------------------------------------------- other processes


def test_a_lock_tells_who_lives_whatever_numbers_and_clocks_say(tmp_path: Path) -> None:
    """Our own number in another container, a process that seems younger than its folder, one that is long at it."""
    folders = [
        tmp_path / f".a.writing-{os.getpid()}-ab",
        tmp_path / f".b.writing-{os.getppid()}-ab",
        tmp_path / ".c.writing-1-ab",
    ]
    for path in folders:
        path.mkdir()
        os.utime(path, (1000, 1000))
    script = (
        "import fcntl, os, sys\n"
        "for path in sys.argv[1:]: fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_SH)\n"
        "print('locked', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, *map(str, folders)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"locked\n"
        assert sweep(tmp_path) == []
        other.kill()
    assert sorted(sweep(tmp_path)) == folders


def test_a_draft_is_locked_while_it_lives(tmp_path: Path) -> None:
    draft = Draft(tmp_path / "one")
    draft.make()
    script = (
        "import os, sys, time\n"
        "from stormtorch.checkpoint import sweep\n"
        "os.getpid = lambda: int(sys.argv[2])\n"  # as in another container
        "print(len(sweep(sys.argv[1])))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    def swept() -> int:
        arguments = [sys.executable, "-c", script, str(tmp_path), str(os.getpid())]
        return int(run_process(arguments, capture_output=True, check=True, env=environment).stdout)

    assert swept() == 0
    os.close(draft._fd or -1)
    draft._fd = None
    assert swept() == 1
    draft.discard()


def test_two_processes_prune_at_once(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2, 3):
        run.session.save(tmp_path / f"step-{step}")
        run.step()

    def rename(one: str, other: str) -> None:
        if one.endswith("step-1"):
            remove_by_another(one)
        Path(one).rename(other)

    def remove_by_another(path: str) -> None:
        monkeypatch.setattr(disk, "CALLS", DiskCalls())
        remove(Path(path))

    monkeypatch.setattr(disk, "CALLS", DiskCalls(rename=rename))
    prune(tmp_path, 1)
    assert names(tmp_path) == ["step-3"]


def test_two_sessions_save_to_one_name(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Run(seed=1)
    other.step()

    def rename(one: str, two: str) -> None:
        monkeypatch.setattr(disk, "CALLS", DiskCalls())
        other.session.save(tmp_path / "one")  # just before
        Path(one).rename(two)

    monkeypatch.setattr(disk, "CALLS", DiskCalls(rename=rename))
    run.session.save(tmp_path / "one")
    assert names(tmp_path) == ["one"]
    run.session.load(tmp_path / "one")
    other.session.close()
