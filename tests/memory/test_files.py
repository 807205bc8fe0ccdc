"""Files: what is written comes back, in the mode that is said, until the file is closed."""

from __future__ import annotations

import errno
import fcntl
import gc
import mmap
import os
import random
import re
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stormtorch.core.budget import Budget
from stormtorch.core.errors import SettingError, StorageError
from stormtorch.core.events import Span, What
from stormtorch.core.tags import Tag, Tier
from stormtorch.memory.books import limits
from stormtorch.memory.books.ledger import Ledger
from stormtorch.memory.disk import files
from stormtorch.memory.disk.calls import SystemCalls
from stormtorch.memory.disk.files import ALIGNMENT, File, Transfer, open_file
from stormtorch.memory.disk.scratch import create_scratch

from .made import create_file, needs_threads

SHM = Path("/dev/shm")
SIZE = 18 * ALIGNMENT
BLOCK = 512 << 10  # the threads join smaller blocks
REAL = SystemCalls()


def aligned(size: int) -> torch.Tensor:
    """``size`` bytes of zeros at a page boundary."""
    return torch.frombuffer(mmap.mmap(-1, max(size, 1)), dtype=torch.uint8)[:size]


def noise(size: int, seed: int = 0) -> torch.Tensor:
    buffer = aligned(size)
    buffer.copy_(torch.frombuffer(bytearray(random.Random(seed).randbytes(max(size, 1))), dtype=torch.uint8)[:size])
    return buffer


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208  # Path.iterdir would itself hold a descriptor longer


def in_a_child(what: Callable[[], object]) -> str:
    """What ``what`` gives in a forked process: its value, or its error as words. "" if it hangs."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads is just what is tested
        pid = os.fork()
    if not pid:
        try:
            signal.setitimer(signal.ITIMER_REAL, 5)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            os.write(writer, str(what()).encode())
        except BaseException as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(pid, 0)
    return said


def needs_direct(file: File) -> None:
    if file.mode != "direct":
        reason = file.mode_reason
        file.close()
        pytest.skip(f"no direct I/O in the temporary directory: {reason}")


@pytest.fixture(params=[True, False], ids=["direct", "buffered"])
def direct(request: pytest.FixtureRequest, tmp_path: Path) -> bool:
    wish = bool(request.param)
    if wish:
        with create_file(tmp_path / "probe", ALIGNMENT) as probe:
            needs_direct(probe)
        (tmp_path / "probe").unlink()
    return wish


@pytest.fixture
def paths(tmp_path: Path) -> Callable[[], Path]:
    counter = iter(range(1_000_000))
    return lambda: tmp_path / f"file{next(counter)}"


class Gate:
    """Reads and writes that wait until the gate opens; counts those that came."""

    def __init__(self) -> None:
        self.opened, self.arrived, self.count = threading.Event(), threading.Semaphore(0), 0
        self.armed = False

    def _pass(self) -> None:
        if self.armed:
            self.count += 1
            self.arrived.release()
            assert self.opened.wait(300)

    def pread(self, fd: int, view: memoryview, offset: int) -> int:
        self._pass()
        return REAL.pread(fd, view, offset)

    def pwrite(self, fd: int, view: memoryview, offset: int) -> int:
        self._pass()
        return REAL.pwrite(fd, view, offset)

    @property
    def calls(self) -> SystemCalls:
        return SystemCalls(pread=self.pread, pwrite=self.pwrite)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.opened.set()


# --- what is written comes back ---------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(
    requests=st.lists(st.tuples(st.booleans(), st.integers(0, SIZE), st.integers(0, SIZE)), min_size=1, max_size=12),
    buffered=st.booleans(),
)
def test_any_requests_agree_with_a_bytearray(
    tmp_path_factory: pytest.TempPathFactory, requests: list[tuple[bool, int, int]], buffered: bool
) -> None:
    path = tmp_path_factory.mktemp("model") / "file"
    model = bytearray(SIZE)
    with create_file(path, SIZE, direct=False if buffered else "auto", block_bytes=2 * ALIGNMENT, threads=3) as file:
        for seed, (write, place, most) in enumerate(requests):
            offset = place // file.alignment * file.alignment
            length = min(most, SIZE - offset)
            if write:
                data = noise(length, seed)
                assert file.write(data, offset) == length
                model[offset : offset + length] = data.numpy().tobytes()
            else:
                data = noise(length, seed + 100)
                assert file.read(data, offset) == length
                assert data.numpy().tobytes() == model[offset : offset + length]
    assert path.read_bytes() == model


def test_requests_in_flight_together_do_not_mix(paths: Callable[[], Path], direct: bool) -> None:
    share, users = 40 * ALIGNMENT, 8
    with create_file(paths(), share * users, direct=direct, block_bytes=4 * ALIGNMENT) as file:

        def use(user: int) -> None:
            for turn in range(5):
                data = noise(share - user * 100, seed=user * 10 + turn)
                assert file.pwrite(data, user * share).result() == data.nbytes
                back = aligned(data.nbytes)
                file.pread(back, user * share).result()
                assert torch.equal(back, data)

        with ThreadPoolExecutor(users) as pool:
            list(pool.map(use, range(users)))


def test_an_existing_file_of_any_size_is_read_whole(paths: Callable[[], Path], direct: bool) -> None:
    for size in (0, 1, 4095, 4096, 4097, 3 * 8192 + 17):
        path = paths()
        content = random.Random(size).randbytes(size)
        path.write_bytes(content)
        with open_file(path, direct=direct, block_bytes=8192) as file:
            assert file.size_bytes == size
            back = aligned(size)
            assert file.read(back, 0) == size
            assert back.numpy().tobytes() == content
            if size > 4096:
                assert file.read(back[: size - 4096], 4096) == size - 4096
                assert back[: size - 4096].numpy().tobytes() == content[4096:]
        assert path.read_bytes() == content


def test_reading_past_the_end_is_told_as_truncation(paths: Callable[[], Path], direct: bool) -> None:
    path = paths()
    path.write_bytes(bytes(10_000))
    with open_file(path, direct=direct) as file, pytest.raises(StorageError, match="truncated: it has 10000") as told:
        file.read(aligned(12_000), 0)
    assert str(path) in str(told.value)


def test_tensors_of_every_dtype_and_plain_buffers(paths: Callable[[], Path]) -> None:
    with create_file(paths(), 1000, direct=False) as file:
        for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64, torch.complex64):
            data = (torch.rand(3, 5) * 2).to(dtype)
            assert file.write(data, 7) == data.nbytes
            back = torch.zeros_like(data)
            file.read(back, 7)
            assert torch.equal(back.view(torch.uint8), data.view(torch.uint8))
        assert file.write(torch.nn.Parameter(torch.tensor(3.0)), 0) == 4
        array = np.zeros((1, 1), dtype=np.float32)
        assert file.read(array, 0) == 4
        assert array[0, 0] == 3.0
        assert file.write(b"storm", 0) == 5
        back_bytes = bytearray(5)
        file.read(memoryview(back_bytes), 0)
        assert back_bytes == b"storm"
        for empty in (torch.empty(0), np.empty((0, 3)), bytearray()):
            assert file.read(empty, 3) == 0


def test_buffers_that_cannot_serve_are_refused(paths: Callable[[], Path]) -> None:
    with create_file(paths(), 1000, direct=False) as file:
        with pytest.raises(SettingError, match="contiguous"):
            file.pread(torch.zeros(4, 4).t(), 0)
        with pytest.raises(SettingError, match="contiguous"):
            file.pwrite(torch.zeros(4, dtype=torch.complex64).conj(), 0)
        with pytest.raises(SettingError, match="C order"):
            file.pread(np.zeros(10)[::2], 0)
        with pytest.raises(SettingError, match="on meta"):
            file.pread(torch.zeros(4, device="meta"), 0)
        with pytest.raises(SettingError, match="read-only"):
            file.pread(b"1234", 0)
        for offset in (-1, 997):
            with pytest.raises(SettingError, match=r"not inside .* 1000 bytes"):
                file.pwrite(bytearray(4), offset)


def test_a_file_opened_to_read_refuses_writes(paths: Callable[[], Path]) -> None:
    path = paths()
    path.write_bytes(b"mine")
    with open_file(path, direct=False) as file, pytest.raises(SettingError, match="opened for reading"):
        file.write(b"ours", 0)
    assert path.read_bytes() == b"mine"


# --- modes ------------------------------------------------------------------------------------------------------------


def test_direct_mode_sets_the_flag_and_names_its_alignment(tmp_path: Path) -> None:
    flags: list[int] = []

    def look(fd: int, view: memoryview, offset: int) -> int:
        flags.append(fcntl.fcntl(fd, fcntl.F_GETFL))
        return REAL.pread(fd, view, offset)

    for wish in (True, False):
        with create_file(
            tmp_path / str(wish), 8192, direct="auto" if wish else False, calls=SystemCalls(pread=look)
        ) as f:
            if wish:
                needs_direct(f)
            f.read(aligned(8192), 0)
            assert bool(flags[-1] & os.O_DIRECT) is wish
            assert (f.mode, f.alignment) == (("direct", 4096) if wish else ("buffered", 1))
    assert "direct=False" in f.mode_reason


def test_direct_mode_refuses_misaligned_requests_with_the_numbers(tmp_path: Path) -> None:
    with create_file(tmp_path / "f", 3 * 4096) as file:
        needs_direct(file)
        with pytest.raises(SettingError, match=r"offset 100 is 100 past one.*mmap"):
            file.pread(aligned(4096), 100)
        with pytest.raises(SettingError, match=r"offset 4096 is 0 past one, address 0x[0-9a-f]+ is 64 past one"):
            file.pwrite(aligned(8192)[64:], 4096)
        assert file.read(aligned(5000), 4096) == 5000  # a length may be anything


@pytest.mark.skipif(limits.filesystem_type(SHM) != "tmpfs", reason="needs a tmpfs at /dev/shm")
def test_tmpfs_falls_back_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    path = SHM / f"storm-test-{os.getpid()}"
    try:
        with create_file(path, 5000) as file:
            assert (file.mode, file.mode_reason) == ("buffered", "tmpfs lives in RAM")
            file.write(b"unaligned", 3)
        with open_file(path) as file:
            assert file.mode == "buffered"
        said = [record for record in caplog.records if "native kernels" not in record.getMessage()]
        assert [record.levelname for record in said] == ["WARNING"]
        assert "tmpfs lives in RAM" in caplog.text
        caplog.clear()
        with open_file(path, direct=False):
            assert not caplog.records
        before = descriptors()
        with pytest.raises(SettingError, match="direct=True is impossible"):
            open_file(path, direct=True)
        assert descriptors() == before
    finally:
        path.unlink()


@pytest.mark.parametrize("place", ["flag", "write", "read"])
def test_a_filesystem_that_refuses_the_trial_is_used_buffered(
    tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(fd: int, on: bool) -> None:
        if on and place == "flag":
            raise OSError(errno.EINVAL, "no")
        REAL.set_direct(fd, on)

    def pread(fd: int, view: memoryview, offset: int) -> int:
        if place == "read" and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no")
        return REAL.pread(fd, view, offset)

    def pwrite(fd: int, view: memoryview, offset: int) -> int:
        if place == "write" and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no")
        return REAL.pwrite(fd, view, offset)

    calls = SystemCalls(set_direct=refuse, pread=pread, pwrite=pwrite, filesystem_type=lambda _: "oddfs")
    with create_file(tmp_path / "f", 10_000, calls=calls) as file:
        assert (file.mode, file.mode_reason, file.alignment) == ("buffered", "oddfs refuses it here", 1)
        assert file.write(b"anywhere", 13) == 8
    assert "oddfs refuses it here" in caplog.text
    with pytest.raises(SettingError, match="oddfs refuses"):
        create_file(tmp_path / "g", 10_000, direct=True, calls=calls)


def test_settings_that_are_not_valid_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"x")
    for bad in ({"direct": "yes"}, {"threads": 0}, {"block_bytes": 1000}, {"block_bytes": 0}):
        with pytest.raises(SettingError, match="ccepted"):
            open_file(path, **bad)


# --- records ----------------------------------------------------------------------------------------------------------


def test_one_record_per_request_however_many_calls(paths: Callable[[], Path]) -> None:
    records: list[Span] = []
    path = paths()
    with create_file(path, 10 * 4096, direct=False, block_bytes=4096, sink=records.append) as file:
        begin = time.perf_counter()
        file.write(noise(10 * 4096), 0)
        assert len(records) == 1  # before the future resolved, not some time after
        file.read(bytearray(5000), 1)
    shapes = [(r.name, r.what is What.WRITE, r.bytes) for r in records if r.what in (What.READ, What.WRITE)]
    assert shapes == [(str(path), True, 40960), (str(path), False, 5000)]
    accesses = [r for r in records if r.what in (What.READ, What.WRITE)]
    assert all(r.seconds > 0 and begin <= r.start_s <= time.perf_counter() for r in accesses)


def test_a_sink_that_raises_is_heard_and_stops_nothing(paths: Callable[[], Path]) -> None:
    def sink(record: Span) -> None:
        raise KeyError(record)

    with create_file(paths(), 100, direct=False, sink=sink) as file:
        for _ in range(2):
            with pytest.raises(KeyError):
                file.pwrite(b"x", 0).result()


# --- closing, interrupting --------------------------------------------------------------------------------------------


@needs_threads
def test_close_finishes_what_was_accepted(paths: Callable[[], Path], gate: Gate) -> None:
    path, data = paths(), noise(20 * 4096)
    file = create_file(path, data.nbytes, direct=False, block_bytes=4096, threads=2, calls=gate.calls)
    gate.armed = True
    future = file.pwrite(data, 0)
    closer = threading.Thread(target=file.close)
    closer.start()
    gate.arrived.acquire(timeout=10)
    closer.join(0.05)
    assert closer.is_alive(), "close returned with a write in flight"
    with pytest.raises(StorageError, match="is closed"):
        file.pread(bytearray(1), 0)
    gate.opened.set()
    closer.join(300)
    assert future.result() == data.nbytes
    assert path.read_bytes() == data.numpy().tobytes()
    file.close()
    assert file.closed


@needs_threads
def test_close_with_cancel_skips_blocks_not_begun(paths: Callable[[], Path], gate: Gate) -> None:
    file = create_file(paths(), 50 * BLOCK, direct=False, block_bytes=BLOCK, threads=2, calls=gate.calls)
    gate.armed = True
    futures = [file.pwrite(bytes(25 * BLOCK), place) for place in (0, 25 * BLOCK)]
    for _ in range(2):
        assert gate.arrived.acquire(timeout=300)
    closer = threading.Thread(target=file.close, kwargs={"cancel": True})
    closer.start()
    while not file.closed:
        time.sleep(0.001)
    gate.opened.set()
    closer.join(300)
    for future in futures:
        with pytest.raises(StorageError, match="its file was closed") as told:
            future.result()
        assert told.value.errno == errno.ECANCELED
    assert gate.count == 2


@needs_threads
def test_leaving_a_with_block_by_an_exception_cancels(paths: Callable[[], Path], gate: Gate) -> None:
    futures: list[Transfer] = []

    def use(file: File) -> None:
        with file:
            gate.armed = True
            futures.extend(file.pwrite(bytearray(4096), 0) for _ in range(2))  # the second waits for the only thread
            assert gate.arrived.acquire(timeout=300)
            threading.Timer(0.05, gate.opened.set).start()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        use(create_file(paths(), 4096, direct=False, threads=1, calls=gate.calls))
    assert futures[0].result() == 4096
    with pytest.raises(StorageError, match="cancelled"):
        futures[1].result()


@needs_threads
def test_ctrl_c_gets_through_a_blocked_read(paths: Callable[[], Path], gate: Gate) -> None:
    with create_file(paths(), 8 * BLOCK, direct=False, block_bytes=BLOCK, threads=1, calls=gate.calls) as file:
        gate.armed = True

        def interrupt() -> None:
            if gate.arrived.acquire(timeout=10):
                os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt).start()
        begin = time.perf_counter()
        with pytest.raises(KeyboardInterrupt):
            file.read(bytearray(8 * BLOCK), 0)
        assert time.perf_counter() - begin < 15
        gate.opened.set()
        assert file.write(b"alive", 0) == 5
    assert gate.count == 2, "blocks of the interrupted read went on"


@pytest.mark.parametrize("make", ["open", "scratch"])
def test_ctrl_c_while_a_file_is_made_closes_its_descriptor_once(
    paths: Callable[[], Path], monkeypatch: pytest.MonkeyPatch, make: str
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    path, before = paths(), descriptors()
    if make == "open":
        path.write_bytes(b"mine")
    monkeypatch.setattr(files, "_choose_mode", interrupted)
    ledger = Ledger(Budget(tier=Tier.DISK, limit_bytes=4096, given="test"))
    makers: dict[str, Callable[[], object]] = {
        "open": lambda: open_file(path),
        "scratch": lambda: create_scratch(path.parent, 4096, ledger=ledger, tag=Tag.DATA),
    }
    with pytest.raises(KeyboardInterrupt):
        makers[make]()
    gc.collect()
    assert descriptors() == before
    assert path.exists() is (make == "open")


# --- fork -------------------------------------------------------------------------------------------------------------


def test_a_forked_child_is_refused_at_once(paths: Callable[[], Path]) -> None:
    with create_file(paths(), 4096, direct=False) as file:
        file.write(bytes(4096), 0)  # a thread exists here, and will not there
        words = "StorageError: Cannot use .*: it belongs to the process it was opened in; open it again after the fork."
        for use in (
            lambda: file.read(bytearray(4096), 0),
            lambda: file.pread(bytearray(4096), 0),
            lambda: file.write(bytes(0), 0),
        ):
            with file._lock:  # held by a thread that the child does not have
                assert re.fullmatch(words, in_a_child(use))
        assert file.read(bytearray(4096), 0) == 4096


@needs_threads
def test_a_forked_child_closes_its_own_descriptor_only(paths: Callable[[], Path], gate: Gate) -> None:
    with create_file(paths(), 4096, direct=False, calls=gate.calls) as file:
        gate.armed = True
        future = file.pwrite(bytes(4096), 0)
        assert gate.arrived.acquire(timeout=300)

        def close() -> str:
            before = descriptors()
            with file:
                file.close()
            return f"{file.closed}, {before - descriptors()} fewer"

        def forget() -> int:
            before = descriptors()
            file.raw.__del__()  # with the parent's request in it, it is never collected there
            return before - descriptors()

        with file._lock:
            assert in_a_child(close) == "True, 1 fewer"
        assert in_a_child(forget) == "1", "a warning is for who forgot, and that was not the child"
        gate.opened.set()
        assert future.result() == 4096
        assert not file.closed


@needs_threads
def test_a_future_of_the_parent_does_not_hang_the_child(paths: Callable[[], Path], gate: Gate) -> None:
    with create_file(paths(), 4096, direct=False, calls=gate.calls) as file:
        done = file.pwrite(bytes(4096), 0)
        assert done.result() == 4096
        gate.armed = True
        pending = file.pwrite(bytes(4096), 0)
        assert gate.arrived.acquire(timeout=300)
        assert in_a_child(done.result) == "4096"
        assert re.match("StorageError: .*process", in_a_child(pending.result))
        gate.opened.set()
        assert pending.result() == 4096


# --- lifetime ---------------------------------------------------------------------------------------------------------


@needs_threads
def test_a_buffer_lives_until_its_request_ends_and_no_longer(paths: Callable[[], Path], gate: Gate) -> None:
    path = paths()
    with create_file(path, 4096, direct=False, calls=gate.calls) as file:
        gate.armed = True
        array = np.full(4096, 7, dtype=np.uint8)
        gone = weakref.ref(array)
        future = file.pwrite(array, 0)
        del array
        assert gate.arrived.acquire(timeout=300)
        gc.collect()
        assert gone() is not None
        gate.opened.set()
        future.result()
        assert gone() is None
        assert path.read_bytes() == b"\x07" * 4096


def test_a_kept_failed_future_does_not_keep_the_buffer(paths: Callable[[], Path]) -> None:
    def pread(fd: int, view: memoryview, offset: int) -> int:
        if offset:
            raise OSError(errno.EIO, "bad")
        return REAL.pread(fd, view, offset)

    path, buffers = paths(), (bytearray(100), bytearray(100))
    path.write_bytes(b"short")
    with open_file(path, direct=False, calls=SystemCalls(pread=pread)) as file:
        futures = [file.pread(buffer, offset) for offset, buffer in enumerate(buffers)]  # end of file, EIO
        for future in futures:
            with pytest.raises(StorageError):
                future.result()
    for buffer in buffers:
        buffer.extend(b"x")  # raises BufferError while anything still exports the memory


def test_fifty_files_leave_no_descriptor_and_no_thread(paths: Callable[[], Path]) -> None:
    def use() -> None:
        with create_file(paths(), 3 * 8192, block_bytes=4096) as file:
            file.pwrite(noise(3 * 8192), 0)  # dropped unread
            file.pread(aligned(10_000), 0).result()

    use()
    before = descriptors(), len(list(Path("/proc/self/task").iterdir()))
    for _ in range(50):
        use()
    assert (descriptors(), len(list(Path("/proc/self/task").iterdir()))) == before


def test_a_forgotten_file_is_closed_with_a_warning(paths: Callable[[], Path]) -> None:
    before = descriptors()
    file = create_file(paths(), 4096, direct=False)
    file.pwrite(bytearray(4096), 0).result()
    assert descriptors() == before + 1
    with pytest.warns(ResourceWarning, match="unclosed file"):
        del file
    assert descriptors() == before
