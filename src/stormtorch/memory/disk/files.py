"""Files: existing ones to read, and the base of scratch files.

How it works. A file is opened once and serves requests (requests.py) from a few threads of its own, which sit in
``preadv`` and ``pwritev`` without the GIL. Large blocks make Python threads good enough: a block of 8 MiB takes
milliseconds, and one hand-over of the GIL hardly counts; at 1 MiB it does.

Direct I/O is used where it is real. The page cache would hold every byte a second time, in the RAM that offloading is
short of, and would write it back at times of its own choosing. A successful ``open`` proves nothing, because tmpfs
accepts the flag and ignores it: so the filesystem's type is checked first, and an aligned transfer is tried after that.
The flag is set on the open descriptor, so a refusal needs no second open, which a file without a name could not have.

Roads not taken. *mmap*: page faults move 4 KiB at a time, errors arrive as SIGBUS, and dirty pages follow the kernel's
schedule instead of ours. *io_uring*: four blocking threads already reach the device's limit with a tenth of a core,
while it is forbidden in many containers and needs native code. *O_SYNC*: scratch need not survive a power cut.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, TypedDict, Unpack

from ...core.errors import SettingError, StorageError
from ...core.events import Sink
from ...core.notices import say_once
from ...core.sizes import MiB, format_bytes
from .buffers import Buffer, bytes_of
from .calls import Descriptor, SystemCalls, storage_error
from .requests import Ending, Request, RequestQueue, Transfer

ALIGNMENT = 4096  # of addresses, offsets and extents: a multiple of every sector size in use
Mode = Literal["direct", "buffered"]
_IN_RAM = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs", "rootfs"})
_UNSUPPORTED = frozenset({errno.EINVAL, errno.EOPNOTSUPP})


class FileOptions(TypedDict, total=False):
    """Options of every kind of file."""

    direct: bool | Literal["auto"]  # "auto": where it is real
    threads: int  # blocks in flight at most; 4
    block_bytes: int  # moved by one system call; 8 MiB
    sink: Sink | None  # gets one Span per request that succeeded, timed from its first block
    calls: SystemCalls  # for tests


class Transfers(ABC):
    """Reads and writes of a file, or of an extent of one."""

    __slots__ = ()

    def pread(self, buffer: Buffer, offset: int = 0) -> Future[int]:
        """Start to fill ``buffer`` from ``offset``; does not block. Leave the buffer alone until the future is done.

        The buffer, a contiguous CPU tensor or anything with a writable buffer, is kept alive until then. The future
        gives the number of bytes or raises StorageError. It may be dropped unread, and it cannot be cancelled.
        """
        return self._submit(bytes_of(buffer, writable=True), offset, write=False)

    def pwrite(self, buffer: Buffer, offset: int = 0) -> Future[int]:
        """Start to write ``buffer`` at ``offset``, inside the size; does not block. Otherwise like ``pread``."""
        return self._submit(bytes_of(buffer), offset, write=True)

    def read(self, buffer: Buffer, offset: int = 0) -> int:
        """``pread`` that blocks. Ctrl-C gets through; blocks that are being read then still arrive in the buffer."""
        return self._move(bytes_of(buffer, writable=True), offset, write=False)

    def write(self, buffer: Buffer, offset: int = 0) -> int:
        """``pwrite`` that blocks. Ctrl-C gets through; blocks that are being written are then finished."""
        return self._move(bytes_of(buffer), offset, write=True)

    def _move(self, view: memoryview, offset: int, *, write: bool) -> int:
        stop = threading.Event()  # made before the request: Ctrl-C finds no gap between the two
        try:
            return self._submit(view, offset, write=write, stop=stop).result()
        finally:
            stop.set()

    @abstractmethod
    def _submit(
        self, view: memoryview, offset: int, *, write: bool, stop: threading.Event | None = None
    ) -> Transfer: ...


class File(Transfers):
    """An open file of ``size_bytes``. ``mode`` and ``mode_reason`` say how it is accessed.

    Addresses and offsets of requests must be multiples of ``alignment``; lengths need not. Any thread may use it.
    Requests run at the same time and in no order: before reading what another request writes, wait for its future. A
    process made by a fork may only close it.
    """

    def __init__(
        self,
        descriptor: Descriptor,
        *,
        where: Path,
        size_bytes: int,
        writable: bool,
        **options: Unpack[FileOptions],
    ) -> None:
        """Takes ``descriptor`` over; if this raises, the caller closes it. ``where`` is on the filesystem to check.

        Users call ``open_file`` etc.
        """
        threads, block_bytes = options.get("threads", 4), options.get("block_bytes", 8 * MiB)
        if threads < 1 or block_bytes < ALIGNMENT or block_bytes % ALIGNMENT:
            raise SettingError(
                f"threads={threads}, block_bytes={block_bytes}: accepted are at least one thread, and blocks of a "
                f"positive multiple of {ALIGNMENT} bytes."
            )
        self.name, self.size_bytes, self.writable = descriptor.name, size_bytes, writable
        self.mode, self.mode_reason = _choose_mode(descriptor, self, where, options.get("direct", "auto"))
        self.alignment = ALIGNMENT if self.mode == "direct" else 1
        self._requests = RequestQueue(
            descriptor,
            alignment=self.alignment,
            threads=threads,
            block_bytes=block_bytes,
            sink=options.get("sink"),
        )

    def flush(self) -> None:
        """Block until finished writes would survive a power cut; wait for their futures first."""
        self._requests.flush()

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called; requests are refused from then on."""
        return self._requests.closed

    def close(self, *, cancel: bool = False) -> None:
        """Refuse new requests, finish the accepted ones, end the threads, close the descriptor. Idempotent.

        With ``cancel`` only the running blocks are finished, and the futures of requests that lack others raise
        StorageError (ECANCELED); leaving a ``with`` block by an exception does that. Blocks; if interrupted, call it
        again. Do not call it from a future's callback, which runs on one of the threads that it waits for.
        """
        self._requests.close(cancel=cancel)

    def _submit(
        self,
        view: memoryview,
        offset: int,
        *,
        write: bool,
        stop: threading.Event | None = None,
        padded: bool = False,
        ending: Ending | None = None,
    ) -> Transfer:
        end = offset + len(view)
        if write and not self.writable:
            raise SettingError(f"Cannot write to {self.name}: it was opened for reading. Use a scratch file.")
        # The kernel knows where a foreign file ends; the size of ours was fixed at its creation.
        if offset < 0 or (self.writable and end > self.size_bytes):
            raise SettingError(
                f"Bytes {offset} to {end} are not inside {self.name}, which has {self.size_bytes} bytes."
            )
        return self._requests.submit(
            Request(self._requests, view, offset, write=write, stop=stop, padded=padded, ending=ending)
        )

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
        descriptor = Descriptor(calls.open(str(path), flags, 0), str(path), calls)
    except OSError as error:
        raise storage_error(f"open {path} to read", error) from error
    with closed_on_error(descriptor):
        status = os.fstat(descriptor.number)
        if not stat.S_ISREG(status.st_mode):
            raise StorageError(f"Cannot open {path} to read: it is not a regular file. Name a file.")
        return File(descriptor, where=path, size_bytes=status.st_size, writable=False, **options)


@contextlib.contextmanager
def closed_on_error(descriptor: Descriptor) -> Iterator[None]:
    """Close ``descriptor`` if the block raises, whether or not a ``File`` has taken it over."""
    try:
        yield
    except BaseException:
        descriptor.close()
        raise


def _choose_mode(descriptor: Descriptor, file: File, where: Path, direct: bool | Literal["auto"]) -> tuple[Mode, str]:
    """Choose the mode, and set O_DIRECT on ``descriptor`` accordingly; returns it with its reason."""
    if not isinstance(direct, bool) and direct != "auto":
        raise SettingError(f"direct={direct!r} is not valid. Accepted: 'auto', True, False.")
    if direct is False:
        return "buffered", "direct=False"
    kind = descriptor.calls.filesystem_type(where)
    obstacle = f"{kind} lives in RAM" if kind in _IN_RAM else _try_direct(descriptor, file, kind)
    if obstacle is None:
        return "direct", f"{kind} passed an aligned trial"
    if direct is True:
        raise SettingError(f"direct=True is impossible for {file.name}: {obstacle}. Use 'auto', or another directory.")
    say_once(
        f"No direct I/O for {file.name}: {obstacle}. Buffered I/O is used; its bytes take RAM that no budget counts.",
        key=f"no direct I/O: {obstacle}",
    )
    return "buffered", obstacle


def _try_direct(descriptor: Descriptor, file: File, kind: str) -> str | None:
    """Set O_DIRECT and move one unit; returns the obstacle, or None. A writable file is new: zeros replace zeros."""
    fd, calls, block = descriptor.number, descriptor.calls, memoryview(mmap.mmap(-1, ALIGNMENT))
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
