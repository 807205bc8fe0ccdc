"""How fast a directory takes and gives bytes, by the files and the block size of the disk tier.

How it works. A scratch file without a name is filled, read back, and then read and written at once: an optimizer step
does the latter, and a disk divides its rate between the two. Blocks of 8 MiB are in flight on the threads of the file.
The content is random, because some disks and filesystems compress. Every block that is read was written before, because
the kernel answers for others without asking the disk.

Direct I/O keeps the page cache out. Where it does not work, writes are synced and the cache is dropped before reading,
and `Rates.from_disk` says which share of the reads the kernel counted as reads of a device. No measurement on this
machine sees a cache behind it: of the host of a virtual machine, of a server, of the drive itself.

A slow disk gets small requests, so that the last ones end in time. Bytes: at most ``limit_bytes`` and a tenth of the
free space lie on the disk at a time, and at most one and a half times that are written.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ...core.budget import Budget
from ...core.sizes import GiB, MiB, format_bytes, round_down
from ...core.tags import Tag, Tier
from ...memory.books import limits
from ...memory.books.ledger import Ledger
from ...memory.disk.calls import SystemCalls, storage_errors
from ...memory.disk.files import File, Transfer
from ...memory.disk.filesystems import Place, place_of
from ...memory.disk.scratch import create_scratch
from ...native.cores import read_text

BLOCK = 8 * MiB
_SMALL = 1 * MiB  # a request to a slow disk
_LEAST = 8 * BLOCK  # of a file: fewer blocks would say little
_DEPTH = 8  # requests to a file at most: as many again as its threads work on
_FILL, _READ, _MIX = 0.35, 0.25, 0.4  # of the time
_TRIAL = 1 / 40  # of the time, at most, for one small request

Progress = Callable[[str, int], None]  # what is being done, and how many bytes of it are done


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Bytes per second of each direction alone, and of both at once in equal parts, reads and writes added up."""

    write_bytes_per_s: float
    read_bytes_per_s: float
    mixed_bytes_per_s: float
    request_bytes: int
    file_bytes: int  # as much as was written and read back
    seconds: float  # that all of it took
    from_disk: float | None  # share of the reads that the kernel counted as reads of a device; None: it does not tell


@dataclass(frozen=True, kw_only=True)
class DiskMeasurement:
    """A directory. Without ``rates``, ``obstacle`` says why it was not measured."""

    directory: Path
    free_bytes: int
    total_bytes: int
    device: int  # the same for directories of one filesystem
    filesystem: str
    place: Place
    direct: bool = False
    reason: str = ""  # for direct or buffered I/O
    threads: int = 0  # blocks that move at the same time
    rates: Rates | None = None
    obstacle: str = ""


def measure_disk(
    directory: Path,
    *,
    calls: SystemCalls | None = None,
    limit_bytes: int = 2 * GiB,
    limit_s: float = 10.0,
    progress: Progress | None = None,
) -> DiskMeasurement:
    """Measure a directory in about ``limit_s``. Blocks. Nothing remains there, also after an error or a kill.

    Raises StorageError if the disk cannot be written or read.
    """
    calls = calls or SystemCalls()
    free, total = limits.disk_bytes(directory)
    kind = calls.filesystem_type(directory)
    found = DiskMeasurement(
        directory=directory,
        free_bytes=free,
        total_bytes=total,
        device=directory.stat().st_dev,
        filesystem=kind,
        place=place_of(kind),
    )
    if found.place is Place.RAM:
        return replace(found, obstacle=f"{kind} lies in RAM, so offloading to it frees no RAM")
    size = _file_bytes(free, limit_bytes)
    if size == 0:
        needed = f"a measurement takes a tenth of the free space, and at least {format_bytes(_LEAST)}"
        return replace(found, obstacle=f"only {format_bytes(free)} are free, and {needed}")
    with _open_files([directory], [size], calls) as files:
        work, [file] = _Work(files, limit_s, progress), files
        found = replace(found, direct=file.mode == "direct", reason=file.mode_reason, threads=file.threads)
        trial_s = work.trial_s()
        if trial_s > limit_s * _TRIAL:
            return replace(found, obstacle=f"it took {trial_s:.1f} s to write {format_bytes(_SMALL)}: it is too slow")
        return replace(found, rates=work.rates())


def measure_together(
    directories: Sequence[Path],
    *,
    calls: SystemCalls | None = None,
    limit_bytes: int = 2 * GiB,
    limit_s: float = 10.0,
    progress: Progress | None = None,
) -> float:
    """The mixed rate, in bytes per second, of equal parts in each directory at once: two of one disk share its rate.

    For directories that `measure_disk` has measured. ``limit_bytes``: of all files together."""
    calls = calls or SystemCalls()
    sizes = [_file_bytes(limits.disk_bytes(where)[0], limit_bytes // len(directories)) for where in directories]
    size = max(min(sizes), _LEAST)  # one more on the same filesystem may leave less than a tenth
    with _open_files(directories, [size] * len(directories), calls) as files:
        work = _Work(files, limit_s, progress)
        work.trial_s()
        return work.rates().mixed_bytes_per_s


def _file_bytes(free: int, limit: int) -> int:
    """The size of a file; 0 if the free space does not allow one."""
    size = round_down(min(free // 10, limit), BLOCK)
    return size if size >= _LEAST else 0


@contextlib.contextmanager
def _open_files(directories: Sequence[Path], sizes: Sequence[int], calls: SystemCalls) -> Iterator[list[File]]:
    ledger = Ledger(Budget(tier=Tier.DISK, limit_bytes=sum(sizes), given="a tenth of the free space"))
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                create_scratch(where, size, ledger=ledger, tag=Tag.STAGING, calls=calls, block_bytes=BLOCK)
            )
            for where, size in zip(directories, sizes, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class _Request:
    file: File
    offset: int
    write: bool


class _Work:
    """Fills files, reads them back, and does both at once."""

    def __init__(self, files: list[File], limit_s: float, progress: Progress | None) -> None:
        self._files, self._limit_s, self._progress = files, limit_s, progress or (lambda _phase, _bytes: None)
        self._depth = _DEPTH * len(files)
        self._request_bytes = BLOCK
        self._filled = 0  # requests' worth of each file that was written
        self._buffers = deque(memoryview(mmap.mmap(-1, BLOCK)) for _ in range(self._depth))
        noise = np.random.default_rng().bytes(BLOCK)
        for index, buffer in enumerate(self._buffers, 1):  # no page of one buffer equals a page of another
            buffer[index:], buffer[:index] = noise[:-index], noise[-index:]
        self._start_s = time.perf_counter()

    def trial_s(self) -> float:
        """How long a small write took, at best: the first one may wake the disk up. Chooses the size of requests."""
        self._request_bytes = _SMALL
        best_s = min(self._run("trial", [_Request(file, 0, True) for file in self._files], 1.0)[1] for _ in range(2))
        at_the_end = self._depth * BLOCK  # is still to be moved when time is up
        if best_s / len(self._files) / _SMALL * at_the_end < self._limit_s / 4:
            self._request_bytes = BLOCK
        return best_s / len(self._files)

    def rates(self) -> Rates:
        count = self._files[0].size_bytes // self._request_bytes
        written, write_s = self._run("writing", self._requests(count, reads=0, writes=1), _FILL)
        self._filled = written // self._request_bytes // len(self._files)
        before = _device_reads()
        self._drop_cache()
        read, read_s = self._run("reading", self._requests(self._filled, reads=1, writes=0), _READ)
        self._drop_cache()
        both = self._requests(max(self._filled // 2, 4), reads=1, writes=1)
        mixed, mixed_s = self._run("reading and writing", both, _MIX)
        after = _device_reads()
        return Rates(
            write_bytes_per_s=written / write_s,
            read_bytes_per_s=read / read_s,
            mixed_bytes_per_s=mixed / mixed_s,
            request_bytes=self._request_bytes,
            file_bytes=self._filled * self._request_bytes,
            seconds=time.perf_counter() - self._start_s,
            from_disk=None if before is None or after is None else min((after - before) / (read + mixed / 2), 1.0),
        )

    def _requests(self, count: int, *, reads: int, writes: int) -> Iterator[_Request]:
        """``count`` blocks of each file in turn, read and written half the written part apart from each other."""
        apart = self._filled // 2
        for index in range(count):
            for file in self._files:
                for write in [False] * reads + [True] * writes:
                    block = (index + apart * write) % self._filled if reads else index
                    yield _Request(file, block * self._request_bytes, write)

    def _run(self, phase: str, requests: Iterator[_Request] | list[_Request], share: float) -> tuple[int, float]:
        """Do requests for a share of the time; returns their bytes and seconds. Small ones begin with one in flight."""
        flight: deque[tuple[Transfer, memoryview]] = deque()
        done = unsynced = 0
        start_s = time.perf_counter()
        end_s = start_s + share * self._limit_s
        depth = self._depth if self._request_bytes == BLOCK else len(self._files)

        def oldest() -> None:
            nonlocal done, unsynced
            transfer, buffer = flight.popleft()
            done += transfer.result()
            self._buffers.append(buffer)
            unsynced += transfer.job.write
            if unsynced == self._depth:
                unsynced = 0
                self._sync()
            self._progress(phase, done)

        for request in requests:
            if len(flight) >= depth:
                oldest()
                depth = min(depth + 1, self._depth)
            if time.perf_counter() >= end_s and done:
                break
            buffer = self._buffers.popleft()
            view = buffer[: self._request_bytes]
            start = request.file.pwrite if request.write else request.file.pread
            flight.append((start(view, request.offset), buffer))
        while flight:
            oldest()
        if unsynced:
            self._sync()
        return done, max(time.perf_counter() - start_s, 1e-9)

    def _drop_cache(self) -> None:
        for file in self._files:
            if file.mode == "buffered":
                os.posix_fadvise(file.number, 0, 0, os.POSIX_FADV_DONTNEED)

    def _sync(self) -> None:
        """Wait until the disk has what the page cache holds."""
        for file in self._files:
            if file.mode == "buffered":
                with storage_errors(f"sync {file.name}"):
                    os.fdatasync(file.number)


def _device_reads() -> int | None:
    """Bytes that this process has had read from devices and servers; None where the kernel does not say."""
    for line in read_text(Path("/proc/self/io")).splitlines():
        name, _, value = line.partition(": ")
        if name == "read_bytes":
            return int(value)
    return None
