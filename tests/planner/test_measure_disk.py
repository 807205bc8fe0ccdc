"""What a disk brings is measured right, within its bounds, and nothing is left behind, also where the disk fails."""

from __future__ import annotations

import errno
import os
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stormtorch.core.errors import StorageError
from stormtorch.core.sizes import GiB, MiB
from stormtorch.memory.books import limits
from stormtorch.memory.disk.calls import SystemCalls
from stormtorch.memory.disk.filesystems import Place
from stormtorch.planner.measure import disk as measure
from stormtorch.planner.measure.disk import BLOCK, DiskMeasurement, measure_disk, measure_together

from ..memory.made import needs_threads

REAL = SystemCalls()
SIZE = 8 * BLOCK  # the least that is measured


class Disk:
    """Moves nothing and keeps a clock of its own: reads and writes take the time of a disk that does one thing at a
    time. ``apart``: each file has a disk of its own, with its ``shares`` of the rates. The files are real."""

    def __init__(self, read: float, write: float, *, apart: bool = False, shares: tuple[float, ...] = (1.0,)) -> None:
        self._rates, self._apart, self._shares = {False: read, True: write}, apart, shares
        self._busy_s: dict[int, float] = {}  # of each disk, which never rests while there are requests
        self._lock = threading.Lock()
        self.written: set[tuple[int, int]] = set()  # (file, MiB)
        self.unwritten_reads = self.writes_bytes = 0
        self.first_s = 0.0  # that the first write takes longer
        self.calls = SystemCalls(
            pread=self._read,
            pwrite=self._write,
            filesystem_type=lambda _: "ext4",
            set_direct=lambda _fd, _on: None,
            fallocate=lambda fd, offset, size: os.ftruncate(fd, offset + size),
        )

    def perf_counter(self) -> float:
        with self._lock:
            return max(self._busy_s.values(), default=0.0)

    def _take(self, fd: int, count: int, *, write: bool) -> int:
        if count > 4096:  # else it is the trial of direct I/O
            key = fd if self._apart else 0
            self._busy_s.setdefault(key, 0.0)
            share = self._shares[list(self._busy_s).index(key) % len(self._shares)]
            self._busy_s[key] += count / self._rates[write] / share + self.first_s
            self.first_s = 0.0
        return count

    def _read(self, fd: int, view: memoryview, offset: int) -> int:
        first, last = offset // MiB, -(-(offset + len(view)) // MiB)
        with self._lock:
            wanted = {(fd, at) for at in range(first, last)}
            self.unwritten_reads += len(view) > 4096 and not wanted <= self.written
            return self._take(fd, len(view), write=False)

    def _write(self, fd: int, view: memoryview, offset: int) -> int:
        with self._lock:
            count = self._take(fd, len(view), write=True)
            self.written |= {(fd, at) for at in range(offset // MiB, (offset + count) // MiB)}
            self.writes_bytes += count
            return count


def failing(code: int) -> Callable[..., Any]:
    def call(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    return call


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208  # Path.iterdir would itself hold a descriptor longer


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Any:
    threads, files = threading.active_count(), descriptors()
    yield
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert descriptors() == files
    assert threading.active_count() == threads


def measured(directory: Path, **settings: Any) -> DiskMeasurement:
    return measure_disk(directory, **{"limit_bytes": SIZE, "limit_s": 1.0, **settings})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[Disk], Disk]:
    """Lets the measurement read the clock of a disk."""

    def use(disk: Disk) -> Disk:
        monkeypatch.setattr(measure, "time", disk)
        return disk

    return use


def test_the_rates_are_those_of_the_disk(tmp_path: Path, clock: Callable[[Disk], Disk]) -> None:
    """Reads at 800 MB/s and writes at 400: equal parts of both at once make 533 in all."""
    disk = clock(Disk(read=8e8, write=4e8))
    rates = measured(tmp_path, calls=disk.calls, limit_s=4.0).rates
    assert rates is not None
    assert rates.request_bytes == BLOCK
    assert rates.file_bytes == SIZE
    assert rates.write_bytes_per_s == pytest.approx(4e8)
    assert rates.read_bytes_per_s == pytest.approx(8e8)
    assert rates.mixed_bytes_per_s == pytest.approx(2 / (1 / 8e8 + 1 / 4e8))
    assert disk.unwritten_reads == 0, "the kernel answers such reads without the disk"


def test_a_slow_disk_ends_in_time_with_the_right_rate(tmp_path: Path, clock: Callable[[Disk], Disk]) -> None:
    """2 GiB at 20 MB/s would take 107 s in each direction."""
    disk = clock(Disk(read=2e7, write=2e7))
    rates = measured(tmp_path, calls=disk.calls, limit_bytes=2 * GiB, limit_s=10.0).rates
    assert disk.perf_counter() < 12.0
    assert rates is not None
    assert rates.seconds == pytest.approx(disk.perf_counter())
    assert rates.request_bytes == MiB, "blocks of 8 MiB in flight would take seconds after the end"
    for rate in (rates.write_bytes_per_s, rates.read_bytes_per_s, rates.mixed_bytes_per_s):
        assert rate == pytest.approx(2e7)
    assert disk.unwritten_reads == 0


@pytest.mark.parametrize("rate", [4.5e6, 3e7, 5e8])
def test_about_ten_seconds(tmp_path: Path, clock: Callable[[Disk], Disk], rate: float) -> None:
    disk = clock(Disk(read=rate, write=rate))
    assert measured(tmp_path, calls=disk.calls, limit_bytes=2 * GiB, limit_s=10.0).rates is not None
    assert disk.perf_counter() < 18.0


def test_a_disk_that_is_too_slow_is_not_measured(tmp_path: Path, clock: Callable[[Disk], Disk]) -> None:
    disk = clock(Disk(read=1e6, write=1e6))
    found = measured(tmp_path, calls=disk.calls, limit_s=10.0)
    assert disk.perf_counter() < 3.0
    assert found.rates is None
    assert "1.0 s to write 1.0 MiB" in found.obstacle


def test_the_first_write_may_wake_the_disk_up(tmp_path: Path, clock: Callable[[Disk], Disk]) -> None:
    disk = clock(Disk(read=8e8, write=8e8))
    disk.first_s = 5.0
    assert measured(tmp_path, calls=disk.calls, limit_s=10.0).rates is not None
    assert disk.first_s == 0.0


@needs_threads
def test_reads_and_writes_run_at_once_where_both_are_measured(tmp_path: Path) -> None:
    running, both = {"r": 0, "w": 0}, list[bool]()
    lock = threading.Lock()

    def move(kind: str, view: memoryview) -> int:
        with lock:
            running[kind] += 1
            both.append(min(running.values()) > 0)
        time.sleep(0.002)
        with lock:
            running[kind] -= 1
        return len(view)

    disk = Disk(read=1e12, write=1e12)
    calls = replace(disk.calls, pread=lambda _f, v, _o: move("r", v), pwrite=lambda _f, v, _o: move("w", v))
    phases = list[str]()
    measured(tmp_path, calls=calls, progress=lambda phase, _: phases.append(phase))
    assert any(both)
    assert list(dict.fromkeys(phases)) == ["trial", "writing", "reading", "reading and writing"]


def test_bytes_that_do_not_compress(tmp_path: Path) -> None:
    blocks, disk = list[bytes](), Disk(read=1e12, write=1e12)

    def write(fd: int, view: memoryview, offset: int) -> int:
        blocks.append(bytes(view[:65536]))
        return disk.calls.pwrite(fd, view, offset)

    measured(tmp_path, calls=replace(disk.calls, pwrite=write))
    whole = [block for block in blocks if len(block) == 65536]
    assert all(len(zlib.compress(block)) > 65000 for block in whole)
    assert len(set(whole)) >= 8, "some disks store equal blocks once"


def test_a_real_directory(tmp_path: Path) -> None:
    found = measured(tmp_path)
    if found.place is Place.RAM:
        pytest.skip("the temporary directory lies in RAM")
    assert found.rates is not None
    assert found.free_bytes <= found.total_bytes
    assert found.filesystem == limits.filesystem_type(tmp_path)
    assert min(found.rates.write_bytes_per_s, found.rates.read_bytes_per_s, found.rates.mixed_bytes_per_s) > 0
    assert found.rates.file_bytes <= SIZE


def test_at_most_a_tenth_of_the_free_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "disk_bytes", lambda _: (GiB, 4 * GiB))
    sizes, disk = list[int](), Disk(read=1e12, write=1e12)

    def fallocate(fd: int, offset: int, size: int) -> None:
        sizes.append(size)
        disk.calls.fallocate(fd, offset, size)

    calls = replace(disk.calls, fallocate=fallocate)
    assert measured(tmp_path, calls=calls, limit_bytes=2 * GiB).rates is not None
    assert sizes == [96 * MiB]  # whole blocks
    assert disk.writes_bytes <= 1.5 * 96 * MiB + 2 * MiB + 4096


def test_too_little_free_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "disk_bytes", lambda _: (600 * MiB, GiB))
    found = measured(tmp_path, calls=SystemCalls(open_unnamed=failing(errno.EIO)))  # must not be called
    assert found.rates is None
    assert "only 600.0 MiB are free" in found.obstacle
    assert "at least 64.0 MiB" in found.obstacle


@pytest.mark.parametrize("kind", ["tmpfs", "ramfs"])
def test_what_lies_in_ram_is_not_touched(tmp_path: Path, kind: str) -> None:
    calls = SystemCalls(filesystem_type=lambda _: kind, open_unnamed=failing(errno.EIO))
    found = measured(tmp_path, calls=calls)
    assert (found.place, found.rates) == (Place.RAM, None)
    assert found.obstacle.startswith(f"{kind} lies in RAM")


def test_shared_memory_is_no_disk() -> None:
    if limits.filesystem_type(Path("/dev/shm")) != "tmpfs":
        pytest.skip("there is no tmpfs at /dev/shm")
    assert measured(Path("/dev/shm")).place is Place.RAM


@pytest.mark.parametrize(
    ("calls", "code", "words"),
    [
        (SystemCalls(open_unnamed=failing(errno.EROFS)), errno.EROFS, "the filesystem is read-only"),
        (SystemCalls(open_unnamed=failing(errno.EACCES)), errno.EACCES, "permission is denied"),
        (SystemCalls(fallocate=failing(errno.ENOSPC)), errno.ENOSPC, r"no space is left .* were free\)"),
        (SystemCalls(fallocate=failing(errno.EDQUOT)), errno.EDQUOT, "quota"),
    ],
)
def test_a_directory_that_takes_no_file(tmp_path: Path, calls: SystemCalls, code: int, words: str) -> None:
    calls = replace(calls, filesystem_type=lambda _: "ext4")
    with pytest.raises(StorageError, match=words) as told:
        measured(tmp_path, calls=calls)
    assert told.value.errno == code
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("after", [0, 4, 12])
@pytest.mark.parametrize("verb", ["read", "write"])
def test_eio(tmp_path: Path, verb: str, after: int) -> None:
    """In the trial, in the first phase, in the last."""
    disk, done = Disk(read=1e12, write=1e12), list[int]()

    def move(real: Callable[[int, memoryview, int], int]) -> Callable[[int, memoryview, int], int]:
        def call(fd: int, view: memoryview, offset: int) -> int:
            if len(view) > 4096:
                done.append(offset)
            if len(done) > after:
                raise OSError(errno.EIO, "medium error")
            return real(fd, view, offset)

        return call

    calls = disk.calls
    calls = replace(calls, pread=move(calls.pread)) if verb == "read" else replace(calls, pwrite=move(calls.pwrite))
    if verb == "read" and after == 12:
        after = 10  # two writes were the trial's
    with pytest.raises(StorageError, match=f"Cannot {verb} bytes .* I/O error") as told:
        measured(tmp_path, calls=calls)
    assert told.value.errno == errno.EIO


def test_a_directory_that_has_vanished(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="Is it still there"):
        measured(tmp_path / "gone")


@needs_threads
def test_a_directory_that_vanishes_meanwhile(tmp_path: Path) -> None:
    """The file has no name, so it does not need its directory."""
    directory = tmp_path / "going"
    directory.mkdir()
    disk = Disk(read=1e12, write=1e12)

    def progress(phase: str, _: int) -> None:
        if phase == "reading" and directory.exists():
            directory.rmdir()

    assert measured(directory, calls=disk.calls, progress=progress).rates is not None
    assert not directory.exists()


@pytest.mark.parametrize("phase", ["trial", "writing", "reading", "reading and writing"])
def test_an_interrupt_ends_it(tmp_path: Path, phase: str) -> None:
    def progress(now: str, _: int) -> None:
        if now == phase:
            raise KeyboardInterrupt

    start_s = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        measured(tmp_path, calls=Disk(read=1e9, write=1e9).calls, progress=progress, limit_s=60.0)
    assert time.perf_counter() - start_s < 10.0


def test_without_direct_io_the_page_cache_is_kept_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if limits.filesystem_type(tmp_path) == "tmpfs":
        pytest.skip("the temporary directory lies in RAM")
    happened = list[str]()

    def noted(name: str, real: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            happened.append(name)
            real(*arguments)

        return call

    def set_direct(_fd: int, on: bool) -> None:
        if on:
            raise OSError(errno.EINVAL, "no")

    monkeypatch.setattr(os, "fdatasync", noted("sync", os.fdatasync))
    monkeypatch.setattr(os, "posix_fadvise", noted("drop", os.posix_fadvise))
    phases = {"reading": "read", "writing": "write", "reading and writing": "both", "trial": "trial"}
    found = measured(
        tmp_path,
        calls=SystemCalls(set_direct=set_direct),
        progress=lambda phase, _: happened.append(phases[phase]),
        limit_s=10.0,
    )
    assert not found.direct
    assert happened[:4] == ["trial", "sync", "trial", "sync"]
    without = [name for name in happened[4:] if name != "sync"]
    order = [name for name, before in zip(without, ["", *without], strict=False) if name != before]
    assert order == ["write", "drop", "read", "drop", "both"]
    before = happened[: happened.index("drop")]
    assert "sync" in before[-2:], "pages that the disk does not have yet cannot be dropped"
    assert happened[-1] == "sync"


def test_reads_that_no_device_has_seen_are_told(tmp_path: Path) -> None:
    """As where a cache answers: the simulated disk reads nothing."""
    rates = measured(tmp_path, calls=Disk(read=1e12, write=1e12).calls).rates
    assert rates is not None
    if rates.from_disk is None:
        pytest.skip("this kernel does not count")
    assert rates.from_disk == 0.0


# --- several directories at once --------------------------------------------------------------------------------------


def several(tmp_path: Path) -> list[Path]:
    directories = [tmp_path / name for name in "ab"]
    for directory in directories:
        directory.mkdir()
    return directories


@needs_threads
@pytest.mark.parametrize(
    ("settings", "rate"),
    [
        ({"apart": False}, 4e8),
        ({"apart": True}, 8e8),
        ({"apart": True, "shares": (1.0, 0.25)}, 2e8),  # in equal parts, the slower of two disks decides
    ],
    ids=["one disk", "two", "two unequal ones"],
)
def test_several_directories(
    tmp_path: Path, clock: Callable[[Disk], Disk], settings: dict[str, Any], rate: float
) -> None:
    disk = clock(Disk(read=4e8, write=4e8, **settings))
    found = measure_together(several(tmp_path), calls=disk.calls, limit_bytes=2 * SIZE, limit_s=4.0)
    assert found == pytest.approx(rate, rel=0.01)
    assert disk.unwritten_reads == 0
