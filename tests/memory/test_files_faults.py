"""Files on a disk that fails: one clear line, the errno, nothing left behind, and the next request works."""

from __future__ import annotations

import errno
import mmap
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stormtorch.core.budget import Budget
from stormtorch.core.errors import SettingError, StorageError
from stormtorch.core.events import Span
from stormtorch.core.sizes import GiB, round_down
from stormtorch.core.tags import Tag, Tier
from stormtorch.memory.books.ledger import Ledger
from stormtorch.memory.disk.calls import SystemCalls
from stormtorch.memory.disk.files import File, open_file
from stormtorch.memory.disk.scratch import create_scratch

from .made import create_file

REAL = SystemCalls()
Transfer = Callable[[int, memoryview, int], int]


def aligned(size: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)


def noise(size: int, seed: int = 0) -> torch.Tensor:
    return aligned(size).copy_(torch.frombuffer(bytearray(random.Random(seed).randbytes(size)), dtype=torch.uint8))


def open_ledger(limit: int = GiB) -> Ledger:
    return Ledger(Budget(tier=Tier.DISK, limit_bytes=limit, given="disk='test'"))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208  # Path.iterdir would itself hold a descriptor longer


class Disk:
    """System calls with a fault that is switched on after the file is open."""

    def __init__(self) -> None:
        self.read: Transfer = REAL.pread
        self.write: Transfer = REAL.pwrite
        self.calls = SystemCalls(pread=self._read, pwrite=self._write)

    def _read(self, fd: int, view: memoryview, offset: int) -> int:
        return self.read(fd, view, offset)

    def _write(self, fd: int, view: memoryview, offset: int) -> int:
        return self.write(fd, view, offset)


def failing(code: int) -> Callable[..., Any]:
    def call(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    return call


@pytest.fixture(params=["auto", False], ids=["direct", "buffered"])
def file(request: pytest.FixtureRequest, tmp_path: Path, disk: Disk) -> Iterator[File]:
    """A file of 64 blocks whose disk can be made to fail."""
    with create_file(tmp_path / "f", 64 * 4096, direct=request.param, block_bytes=4096, calls=disk.calls) as file:
        if request.param == "auto" and file.mode != "direct":
            pytest.skip(f"no direct I/O in the temporary directory: {file.mode_reason}")
        yield file


@pytest.fixture
def disk() -> Disk:
    return Disk()


# --- transfers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT, errno.EXDEV])
def test_a_failed_write_is_one_clear_line(file: File, disk: Disk, code: int) -> None:
    disk.write = failing(code)
    future = file.pwrite(noise(3 * 4096), 0)
    with pytest.raises(
        StorageError, match=rf"^Cannot write bytes 0 to 4096 of {file.name}: .+ \[{errno.errorcode[code]}\]\. .+\.$"
    ) as told:
        future.result()
    assert told.value.errno == code
    assert isinstance(told.value.__cause__, OSError)
    assert told.value.__cause__.errno == code
    assert "\n" not in str(told.value)
    disk.write = REAL.pwrite
    assert file.write(noise(3 * 4096), 0) == 3 * 4096


@pytest.mark.parametrize("direct", ["auto", False])
def test_eio_in_the_middle_stops_that_request_alone(tmp_path: Path, disk: Disk, direct: Any) -> None:
    block = 512 << 10  # the threads join smaller ones
    data = noise(64 * block)
    file = create_file(tmp_path / "f", data.nbytes, direct=direct, block_bytes=block, calls=disk.calls)
    file.write(data, 0)
    begun: list[int] = []

    def read(fd: int, view: memoryview, offset: int) -> int:
        begun.append(offset)
        if offset == 20 * block:
            raise OSError(errno.EIO, "medium error")
        if offset > 20 * block:
            time.sleep(0.005)  # the rest would take 70 ms, the news of the failure less than one
        return REAL.pread(fd, view, offset)

    disk.read = read
    back = aligned(8 * block)
    bad, good = file.pread(aligned(64 * block), 0), file.pread(back, 40 * block)
    with pytest.raises(StorageError, match=f"read bytes {20 * block} to {21 * block} of .*I/O error"):
        bad.result()
    assert good.result() == 8 * block
    assert torch.equal(back, data[40 * block : 48 * block])
    assert 20 * block in begun
    assert 63 * block not in begun, "blocks were read long after the request had failed"
    file.close()


def test_a_failed_request_leaves_no_record(tmp_path: Path, disk: Disk) -> None:
    records: list[Span] = []
    with create_file(tmp_path / "f", 4096, direct=False, calls=disk.calls, sink=records.append) as file:
        disk.read = failing(errno.EIO)
        with pytest.raises(StorageError):
            file.read(bytearray(10), 0)
        assert not records


@pytest.mark.parametrize("seed", range(6))
def test_short_reads_and_writes_go_on_where_they_stopped(file: File, disk: Disk, seed: int) -> None:
    """The kernel's count is the only truth: what lies beyond it is spoilt in memory and not written in the file."""
    rng, unit, lock = random.Random(seed), file.alignment, threading.Lock()
    tries: dict[int, int] = {}
    shortened = 0

    def count_for(offset: int, size: int) -> int:
        nonlocal shortened
        with lock:
            tries[offset] = tries.get(offset, 0) + 1
            count = size if tries[offset] > 4 else rng.randint(1, size)
            shortened += count < size
            return count

    def read(fd: int, view: memoryview, offset: int) -> int:
        count = min(REAL.pread(fd, view, offset), count_for(offset, len(view)))
        view[count:] = b"\xaa" * (len(view) - count)
        return count

    def write(fd: int, view: memoryview, offset: int) -> int:
        count = count_for(offset, len(view))
        if whole := round_down(count, unit):
            REAL.pwrite(fd, view[:whole], offset)
        return count

    disk.read, disk.write = read, write
    size = 30 * 4096 + rng.randint(1, 4095)
    data, back = noise(size, seed), aligned(size)
    assert file.pwrite(data, 4096).result() == size
    tries.clear()
    assert file.pread(back, 4096).result() == size
    assert torch.equal(back, data)
    assert shortened > 10
    disk.read = REAL.pread
    assert file.read(back, 4096) == size
    assert torch.equal(back, data), "the file itself is not what was written"


def test_stalls_are_forgiven_as_long_as_there_is_progress(tmp_path: Path, disk: Disk) -> None:
    tries: dict[int, int] = {}

    def read(fd: int, view: memoryview, offset: int) -> int:
        tries[offset] = tries.get(offset, 0) + 1
        REAL.pread(fd, view, offset)
        return 4096 if tries[offset] == 4 else 512

    with create_file(tmp_path / "f", 16 * 4096, calls=disk.calls) as file:
        if file.mode != "direct":
            pytest.skip(f"no direct I/O in the temporary directory: {file.mode_reason}")
        data, back = noise(16 * 4096), aligned(16 * 4096)
        file.write(data, 0)
        disk.read = read
        assert file.pread(back, 0).result() == 16 * 4096
        assert torch.equal(back, data)


@pytest.mark.parametrize("count", [0, 512])
def test_a_call_that_never_gets_on_is_an_error_and_no_hang(file: File, disk: Disk, count: int) -> None:
    if count and file.alignment == 1:
        return  # 512 bytes are progress there
    disk.write = disk.read = lambda _fd, _view, _offset: count
    with pytest.raises(StorageError, match=f"write bytes 0 to 4096 of .*wanted 4096 bytes, got {count}, and no call"):
        file.pwrite(noise(4096), 0).result()
    with pytest.raises(StorageError, match=f"read bytes 0 to 4096 of .*wanted 4096 bytes, got {count}, and no call"):
        file.pread(aligned(4096), 0).result()


@pytest.mark.parametrize("left", [0, 8192, 10_000])
def test_a_file_that_shrinks_under_us_is_truncated(tmp_path: Path, left: int) -> None:
    for wish in ("auto", False):
        path = tmp_path / str(wish)
        path.write_bytes(random.Random(0).randbytes(20_000))
        with open_file(path, direct=wish) as file:
            assert file.read(aligned(20_000), 0) == 20_000
            os.truncate(path, left)
            with pytest.raises(StorageError, match=f"got {left}. The file is truncated: it has {left} bytes"):
                file.read(aligned(16_384), 0)
            assert file.read(aligned(max(left, 1))[:left], 0) == left


def test_a_failing_close_still_gives_everything_back(tmp_path: Path) -> None:
    ledger, before = open_ledger(), descriptors()

    file = create_scratch(tmp_path, 4096, ledger=ledger, tag=Tag.OPTIMIZER)
    os.close(file.number)  # so that its own close fails
    with pytest.raises(StorageError, match="Cannot close scratch file"):
        file.close()
    file.close()
    assert ledger.used_bytes(Tier.DISK) == 0
    assert descriptors() == before


# --- opening ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "code", "words"),
    [
        (lambda p: open_file(p / "missing"), errno.ENOENT, "does not exist"),
        (lambda p: open_file(p / "plain" / "x"), errno.ENOTDIR, "not a directory"),
        (open_file, None, "not a regular file"),
        (lambda p: open_file(p / "pipe"), None, "not a regular file"),
        (lambda p: create_scratch(p / "missing", 10, ledger=open_ledger(), tag=Tag.DATA), errno.ENOENT, "Create it"),
        (
            lambda p: create_scratch(p / "plain", 10, ledger=open_ledger(), tag=Tag.DATA),
            errno.ENOTDIR,
            "Correct the path",
        ),
        (lambda _: create_scratch("/proc", 10, ledger=open_ledger(), tag=Tag.DATA), None, "scratch file in /proc"),
    ],
)
def test_real_paths_that_cannot_be_opened(
    tmp_path: Path, make: Callable[[Path], File], code: int | None, words: str
) -> None:
    (tmp_path / "plain").write_bytes(b"x")
    os.mkfifo(tmp_path / "pipe")
    before = descriptors()
    with pytest.raises(StorageError, match=words) as told:
        make(tmp_path)
    if code is not None:
        assert told.value.errno == code
    assert descriptors() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pipe", "plain"]


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EMFILE])
def test_a_directory_that_cannot_be_written(tmp_path: Path, code: int) -> None:
    ledger = open_ledger()
    with pytest.raises(
        StorageError, match=f"Cannot create a scratch file in {tmp_path}: .*{errno.errorcode[code]}"
    ) as told:
        create_scratch(tmp_path, 4096, ledger=ledger, tag=Tag.OPTIMIZER, calls=SystemCalls(open_unnamed=failing(code)))
    assert told.value.errno == code
    assert ledger.used_bytes(Tier.DISK) == 0


def test_a_full_disk_is_told_with_the_numbers_before_anything_is_written(tmp_path: Path) -> None:
    written: list[int] = []

    def pwrite(fd: int, view: memoryview, offset: int) -> int:
        written.append(offset)
        return REAL.pwrite(fd, view, offset)

    ledger, before = open_ledger(), descriptors()
    calls = SystemCalls(fallocate=failing(errno.ENOSPC), pwrite=pwrite)
    words = r"preallocate 3\.0 MiB for .*ENOSPC\] \([0-9.]+ .iB were free\)\. Free"
    with pytest.raises(StorageError, match=words) as told:
        create_scratch(tmp_path, 3 << 20, ledger=ledger, tag=Tag.OPTIMIZER, calls=calls)
    assert told.value.errno == errno.ENOSPC
    assert not written
    assert not list(tmp_path.iterdir())
    assert ledger.used_bytes(Tier.DISK) == 0
    assert descriptors() == before


def test_eio_in_the_trial_is_an_error_and_no_fallback(tmp_path: Path) -> None:
    before, ledger = descriptors(), open_ledger()
    calls = SystemCalls(pwrite=failing(errno.EIO), filesystem_type=lambda _: "ext4", set_direct=lambda _fd, _on: None)
    with pytest.raises(StorageError, match="try direct I/O on scratch file"):
        create_scratch(tmp_path, 8192, ledger=ledger, tag=Tag.OPTIMIZER, calls=calls)
    assert descriptors() == before
    assert ledger.used_bytes(Tier.DISK) == 0


def test_a_sink_that_raises_anything_still_resolves_the_future(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"x" * 100)

    def sink(_: object) -> None:
        raise SystemExit(3)

    with open_file(path, direct=False, sink=sink) as file:
        future = file.pread(bytearray(100), 0)
        with pytest.raises(SystemExit):
            future.result()


def test_arrays_in_another_order_or_of_objects_are_refused(tmp_path: Path) -> None:
    with create_file(tmp_path / "data", 8192, direct=False) as file:
        with pytest.raises(SettingError, match="C order"):
            file.write(np.asfortranarray(np.ones((3, 4))), 0)
        with pytest.raises(SettingError, match="Python objects"):
            file.read(np.array([object(), None]), 0)
        file.write(np.array(["2026-01-01"], dtype="datetime64[s]"), 0)
    for bad in (-1, 1.5):
        with pytest.raises(SettingError, match="size="):
            create_scratch(tmp_path, bad, ledger=open_ledger(), tag=Tag.DATA)  # type: ignore[arg-type]
