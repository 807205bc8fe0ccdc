"""Files that are read and written in blocks: existing ones to read, and the base of scratch files.

How it works. A request is cut into blocks of 8 MiB. The threads of csrc/rows.c move several of them at a time, without
the GIL; Python only queues the request and waits for it. Where the C library is missing, the calling thread moves them.

Direct I/O is used where it is real. The page cache would hold every byte a second time, in the RAM that offloading is
short of, and would write it back at times of its own choosing. A successful ``open`` proves nothing, because tmpfs
accepts the flag and ignores it: so the filesystem's type is checked first, and an aligned transfer is tried after that.
The flag is set on the open descriptor, so a refusal needs no second open, which a file without a name could not have.
Direct I/O takes no unaligned length either: the bytes of a request beyond the last whole unit go through a page of
their own. A write first fills that page from the file, except at the end of an extent. No lock is needed for that:
starts are aligned, so two requests that share a unit overlap anyway.

Roads not taken. *mmap*: page faults move 4 KiB at a time, errors arrive as SIGBUS, and dirty pages follow the kernel's
schedule instead of ours. *io_uring*: four blocking threads already reach the device's limit with a tenth of a core,
while it is forbidden in many containers. *O_SYNC*, *fdatasync*: scratch need not survive a power cut.
"""

from __future__ import annotations

import contextlib
import errno
import io
import mmap
import os
import stat
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, TypedDict, Unpack

import numpy as np

from ...core.errors import SettingError, StorageError
from ...core.events import Sink, Span, What
from ...core.notices import say_once
from ...core.sizes import MiB, format_bytes, round_down
from ...native.rows.jobs import DONE, DROPPED, PENDING, PIECE, RowsJob, RowsPool
from ...native.rows.open import open_rows
from .buffers import Buffer, bytes_of
from .calls import ELSEWHERE, SystemCalls, storage_error
from .filesystems import Place, place_of

ALIGNMENT = 4096  # of addresses, offsets and extents: a multiple of every sector size in use
Mode = Literal["direct", "buffered"]
_UNSUPPORTED = frozenset({errno.EINVAL, errno.EOPNOTSUPP})


class FileOptions(TypedDict, total=False):
    """Options of every kind of file."""

    direct: bool | Literal["auto"]  # "auto": where it is real
    threads: int  # blocks in flight at most; 4
    block_bytes: int  # moved by one system call; 8 MiB
    sink: Sink | None  # gets one Span per request that succeeded, timed from its first block, when its result is read
    calls: SystemCalls  # for tests


class Transfer:
    """A request, from `Transfers.pread` or `pwrite`. It runs to its end, whether or not its result is read."""

    def __init__(self, file: File, view: memoryview, offset: int, *, write: bool, padded: bool) -> None:
        """``padded``: the bytes between the end of this write and the next alignment boundary may be overwritten."""
        self.size = len(view)
        self._file: File | None = file  # until the result is there
        unit, whole = file.alignment, round_down(len(view), file.alignment)
        address = _address(view) if self.size else 0
        if offset % unit or address % unit:
            raise SettingError(
                f"Direct I/O on {file.name} needs offset and address at multiples of {unit}: offset {offset} is "
                f"{offset % unit} past one, address {address:#x} is {address % unit} past one. Take a page-aligned "
                "buffer, such as torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8), or open the file with "
                "direct=False."
            )
        pieces = []
        for at in range(0, whole, file.block_bytes):
            size = min(file.block_bytes, whole - at)
            pieces.append((file.number, offset + at, size, size, address + at, 0))
        tail = view[whole:]
        bounce = memoryview(mmap.mmap(-1, unit)) if tail else memoryview(b"")
        if tail:
            if write and not padded:
                file.read(bounce, offset + whole)
            if write:
                bounce[: len(tail)] = tail
            pieces.append((file.number, offset + whole, unit, unit if write else len(tail), _address(bounce), 0))
        self._tail = None if write else (tail, bounce)  # where direct I/O has read the last bytes to
        self._error: StorageError | None = None
        lines = np.array(pieces, dtype=np.int64).reshape(-1, len(PIECE))
        self.job = RowsJob(lines, (view, bounce, file.raw), write=write, unit=unit)

    def result(self) -> int:
        """Block until no thread uses the buffer; return its number of bytes, or raise StorageError.

        Ctrl-C gets through, however slow the disk. For one thread at a time.
        """
        if self._file is not None:
            self._finish(self._file)
        try:
            if self._error is not None:
                raise self._error.with_traceback(None)
            return self.size
        finally:
            del self  # the error's frames would keep the buffer, and the request the error

    def result_or_drop(self) -> int:
        """`result`; if that is interrupted, blocks that no thread has begun are not moved."""
        try:
            return self.result()
        finally:
            if self._file is not None:
                self._file.pool.drop(self.job)
            del self  # see `result`

    def _finish(self, file: File) -> None:
        job = self.job
        if file.inherited and job.outcome.state == PENDING:
            raise StorageError(
                "Cannot wait for this request: it runs in the process that made it. Open the file again after the "
                "fork, and repeat it."
            )
        state = file.pool.wait(job)
        if state != DONE:
            self._error = self._failure(file, state)
        elif self._tail is not None:
            tail, bounce = self._tail
            tail[:] = bounce[: len(tail)]
        self._tail = self._file = None
        job.let_go()
        if state == DONE and file.sink is not None:
            what = What.WRITE if job.write else What.READ
            begin_s, end_s = job.outcome.begin_ns / 1e9, job.outcome.end_ns / 1e9  # the clock of perf_counter
            file.sink(Span(what, begin_s, end_s, file.name, bytes=self.size))

    def _failure(self, file: File, state: int) -> StorageError:
        verb = "write" if self.job.write else "read"
        if state == DROPPED:
            error = StorageError(
                f"Cannot {verb} {self.size} bytes of {file.name}: cancelled, because its file was closed. Repeat it if "
                "still wanted."
            )
            error.errno = errno.ECANCELED
            return error
        failure = self.job.failure()
        _, offset, _, wanted, *_ = self.job.pieces[failure.piece].tolist()
        what = f"{verb} bytes {offset} to {offset + wanted} of {file.name}"
        if failure.error != errno.ENODATA:
            return storage_error(what, OSError(failure.error, os.strerror(failure.error)))
        what += f": wanted {wanted} bytes, got {failure.got}"
        end = offset + failure.got
        if not (self.job.write or file.closed) and end >= (size := os.fstat(file.number).st_size):
            return StorageError(
                f"Cannot {what}. The file is truncated: it has {size} bytes now. Restore it, or read less of it."
            )
        return StorageError(
            f"Cannot {what}, and no call moves more. Look at dmesg and the health of the disk, {ELSEWHERE}"
        )


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


class Transfers(ABC):
    """Reads and writes of a file, or of an extent of one."""

    __slots__ = ()

    def pread(self, buffer: Buffer, offset: int = 0) -> Transfer:
        """Start to fill ``buffer`` from ``offset``; does not block. Leave the buffer alone until the result is there.

        The buffer, a contiguous CPU tensor or anything with a writable buffer, is kept alive until then.
        """
        return self._start(bytes_of(buffer, writable=True), offset, write=False)

    def pwrite(self, buffer: Buffer, offset: int = 0) -> Transfer:
        """Start to write ``buffer`` at ``offset``, inside the size. Otherwise like ``pread``. Does not block, unless
        direct I/O has to read the last block first, because other bytes in it must stay."""
        return self._start(bytes_of(buffer), offset, write=True)

    def read(self, buffer: Buffer, offset: int = 0) -> int:
        """``pread`` that blocks. Ctrl-C gets through; blocks that are being read then still arrive in the buffer."""
        return self.pread(buffer, offset).result_or_drop()

    def write(self, buffer: Buffer, offset: int = 0) -> int:
        """``pwrite`` that blocks. Ctrl-C gets through; blocks that are being written are then finished."""
        return self.pwrite(buffer, offset).result_or_drop()

    @abstractmethod
    def _start(self, view: memoryview, offset: int, *, write: bool) -> Transfer: ...


class File(Transfers):
    """An open file of ``size_bytes``. ``mode`` and ``mode_reason`` say how it is accessed.

    Addresses and offsets of requests must be multiples of ``alignment``; lengths need not. Any thread may use it.
    Requests run at the same time and in no order: before reading what another request writes, wait for its result. A
    process made by a fork may only close it.
    """

    def __init__(
        self,
        raw: io.FileIO,
        name: str,
        *,
        where: Path,
        size_bytes: int,
        writable: bool,
        **options: Unpack[FileOptions],
    ) -> None:
        """Takes ``raw`` over; if this raises, the caller closes it. ``where`` is on the filesystem to check.

        Users call ``open_file`` etc.
        """
        self.threads, self.block_bytes = options.get("threads", 4), options.get("block_bytes", 8 * MiB)
        if self.threads < 1 or self.block_bytes < ALIGNMENT or self.block_bytes % ALIGNMENT:
            raise SettingError(
                f"threads={self.threads}, block_bytes={self.block_bytes}: accepted are at least one thread, and blocks "
                f"of a positive multiple of {ALIGNMENT} bytes."
            )
        self.raw, self.number, self.name = raw, raw.fileno(), name  # raw: closes the number once, or when dropped
        self.sink, self.calls = options.get("sink"), options.get("calls", SystemCalls())
        self.size_bytes, self.writable = size_bytes, writable
        self.mode, self.mode_reason = _choose_mode(self, where, options.get("direct", "auto"))
        self.alignment = ALIGNMENT if self.mode == "direct" else 1
        self.closed, self._process = False, os.getpid()
        self._lock = threading.Lock()  # of what follows and of `closed`
        self._opened: RowsPool | None = None  # by the first request

    def close(self, *, cancel: bool = False) -> None:
        """Refuse new requests, finish the accepted ones, end the threads, close the descriptor. Idempotent.

        With ``cancel`` only the running blocks are finished, and the results of requests that lack others raise
        StorageError (ECANCELED); leaving a ``with`` block by an exception does that. Blocks; if interrupted, call it
        again.
        """
        try:
            if not self.inherited:
                with self._lock:
                    if cancel and self._opened is not None:
                        self._opened.drop()
                    self.closed = True
                if self._opened is not None:
                    self._opened.finish()
                    self._opened.close()
            self.closed = True
            self.raw.close()
        except OSError as error:
            raise storage_error(f"close {self.name}", error) from error

    @property
    def pool(self) -> RowsPool:
        """The threads, which the first request has started."""
        assert self._opened is not None
        return self._opened

    def begin(self, view: memoryview, offset: int, *, write: bool, padded: bool = False) -> Transfer:
        """Make a request, whose range the caller has checked, and hand it to the threads."""
        self.refuse_after_fork()
        transfer = Transfer(self, view, offset, write=write, padded=padded)
        with self._lock:
            if self.closed:
                raise StorageError(f"Cannot use {self.name}: it is closed. Open it again.")
            if self._opened is None:
                self._opened = open_rows(self.threads, read=self.calls.pread, write=self.calls.pwrite)
            try:
                self._opened.start(transfer.job)
            except BaseException:
                self._opened.drop(transfer.job)  # the caller will not get the request
                raise
        return transfer

    @property
    def inherited(self) -> bool:
        """Whether this process got it by a fork, which copies no threads, and locks in any state."""
        return os.getpid() != self._process

    def refuse_after_fork(self) -> None:
        """Raise in a process that has no threads to serve this file. Takes no lock."""
        if self.inherited:
            raise StorageError(
                f"Cannot use {self.name}: it belongs to the process it was opened in; open it again after the fork."
            )

    def _start(self, view: memoryview, offset: int, *, write: bool) -> Transfer:
        end = offset + len(view)
        if write and not self.writable:
            raise SettingError(f"Cannot write to {self.name}: it was opened for reading. Use a scratch file.")
        # The kernel knows where a foreign file ends; the size of ours was fixed at its creation.
        if offset < 0 or (self.writable and end > self.size_bytes):
            raise SettingError(
                f"Bytes {offset} to {end} are not inside {self.name}, which has {self.size_bytes} bytes."
            )
        return self.begin(view, offset, write=write)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(cancel=kind is not None)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}, {format_bytes(self.size_bytes)}, {self.mode}: {self.mode_reason}>"


def open_file(path: Path | str, **options: Unpack[FileOptions]) -> File:
    """Open an existing regular file of any size for reading. Changes nothing."""
    path, calls = Path(path), options.get("calls", SystemCalls())
    flags = os.O_RDONLY | os.O_NONBLOCK  # NONBLOCK: a named pipe would wait for its writer
    try:
        number = calls.open(str(path), flags, 0)
    except OSError as error:
        raise storage_error(f"open {path} to read", error) from error
    status = os.fstat(number)
    if not stat.S_ISREG(status.st_mode):
        os.close(number)
        raise StorageError(f"Cannot open {path} to read: it is not a regular file. Name a file.")
    with owned(number) as raw:
        return File(raw, str(path), where=path, size_bytes=status.st_size, writable=False, **options)


@contextlib.contextmanager
def owned(number: int) -> Iterator[io.FileIO]:
    """An object that owns a descriptor; closed if the block raises, whether or not a ``File`` has taken it over."""
    raw = io.FileIO(number)
    try:
        yield raw
    except BaseException:
        raw.close()
        raise


def _choose_mode(file: File, where: Path, direct: bool | Literal["auto"]) -> tuple[Mode, str]:
    """Choose the mode, and set O_DIRECT accordingly; returns it with its reason."""
    if not isinstance(direct, bool) and direct != "auto":
        raise SettingError(f"direct={direct!r} is not valid. Accepted: 'auto', True, False.")
    if direct is False:
        return "buffered", "direct=False"
    kind = file.calls.filesystem_type(where)
    obstacle = f"{kind} lives in RAM" if place_of(kind) is Place.RAM else _try_direct(file, kind)
    if obstacle is None:
        return "direct", f"{kind} passed an aligned trial"
    if direct is True:
        raise SettingError(f"direct=True is impossible for {file.name}: {obstacle}. Use 'auto', or another directory.")
    say_once(
        f"No direct I/O for {file.name}: {obstacle}. Buffered I/O is used; its bytes take RAM that no budget counts.",
        key=f"no direct I/O: {obstacle}",
    )
    return "buffered", obstacle


def _try_direct(file: File, kind: str) -> str | None:
    """Set O_DIRECT and move one unit; returns the obstacle, or None. A writable file is new: zeros replace zeros."""
    fd, calls, block = file.number, file.calls, memoryview(mmap.mmap(-1, ALIGNMENT))
    try:
        calls.set_direct(fd, True)
        if file.writable and file.size_bytes >= ALIGNMENT:
            calls.pwrite(fd, block, 0)
        calls.pread(fd, block, 0)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise storage_error(f"try direct I/O on {file.name}", error) from error
        calls.set_direct(fd, False)
        return f"{kind} refuses it here"
    return None
