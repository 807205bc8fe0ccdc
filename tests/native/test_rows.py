"""Reading and copying pieces: right bytes, errors with the piece, and nothing left behind, native and in Python."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from stormtorch.core.errors import LaneError
from stormtorch.native.rows.c_rows import NativeRows, map_file, unmap_file
from stormtorch.native.rows.jobs import DONE, DROPPED, FAILED, PENDING, RowsJob, RowsPool
from stormtorch.native.rows.open import open_rows

OpenRows = Callable[..., RowsPool]
Bytes = NDArray[np.uint8]

with_threads = pytest.mark.parametrize("open_any", ["native", "staged"], indirect=True)


@pytest.fixture(params=["native", "staged", "fallback"])
def open_any(request: pytest.FixtureRequest) -> Iterator[OpenRows]:
    request.getfixturevalue("no_library" if request.param == "fallback" else "native")
    opened: list[RowsPool] = []
    stage_bytes = 4096 if request.param == "staged" else 0

    def open_one(threads: int = 2) -> RowsPool:
        opened.append(open_rows(threads, stage_bytes=stage_bytes))
        return opened[-1]

    yield open_one
    for pool in opened:
        pool.close()


@pytest.fixture
def content() -> Bytes:
    return np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8)


@pytest.fixture
def fd(tmp_path: Path, content: Bytes) -> Iterator[int]:
    path = tmp_path / "data"
    content.tofile(path)
    number = os.open(path, os.O_RDONLY)
    yield number
    os.close(number)


def threads_now() -> set[str]:
    return {path.name for path in Path("/proc/self/task").iterdir()}


def sum_of_maps() -> int:
    """Bytes of addresses that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def lines(*pieces: tuple[int, int, int, int, int], map: int = 0) -> NDArray[np.int64]:
    return np.array([(*piece, map) for piece in pieces], dtype=np.int64).reshape(-1, 6)


@settings(max_examples=25)
@given(
    places=st.lists(st.tuples(st.integers(0, (1 << 20) - 70000), st.integers(0, 70000)), max_size=40),
    contiguous=st.booleans(),
    copies=st.booleans(),
)
def test_every_byte_comes_to_its_place(
    open_any: OpenRows, content: Bytes, fd: int, places: list[tuple[int, int]], contiguous: bool, copies: bool
) -> None:
    if contiguous:  # pieces that continue each other are read together
        starts = np.cumsum([0] + [size for _, size in places])
        places = [(int(at) % 900000, size) for at, (_, size) in zip(starts, places, strict=False)]
    sizes = [size for _, size in places]
    target: Bytes = np.zeros(sum(sizes) + 1, dtype=np.uint8)
    offsets = np.cumsum([0, *sizes])
    pieces = [
        (-1, content.ctypes.data + at, size, size, target.ctypes.data + int(offset))
        if copies
        else (fd, at, size, size, target.ctypes.data + int(offset))
        for (at, size), offset in zip(places, offsets, strict=False)
    ]
    pool = open_any()
    job = pool.submit(lines(*pieces), (target, content))
    assert pool.wait(job) == DONE
    wanted = np.concatenate([content[at : at + size] for at, size in places] or [content[:0]])
    assert np.array_equal(target[:-1], wanted)
    pool.close()


def test_what_is_written_is_in_the_file(open_any: OpenRows, content: Bytes, tmp_path: Path) -> None:
    path = tmp_path / "written"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    pool = open_any()
    sizes = [1, 4095, 4096, 100_000, 700_000]
    begins = [sum(sizes[:number]) for number in range(len(sizes))]
    pieces = [(fd, at, size, size, content.ctypes.data + at) for at, size in zip(begins, sizes, strict=True)]
    job = RowsJob(lines(*reversed(pieces)), content, write=True)
    pool.start(job)
    assert pool.wait(job) == DONE
    assert 0 < job.outcome.begin_ns <= job.outcome.end_ns
    assert path.read_bytes() == content[: sum(sizes)].tobytes()
    os.close(fd)


@pytest.mark.parametrize("way", ["native", "fallback"])
@pytest.mark.parametrize("write", [False, True])
def test_short_counts_and_stalls(
    request: pytest.FixtureRequest, content: Bytes, fd: int, tmp_path: Path, write: bool, way: str
) -> None:
    request.getfixturevalue("no_library" if way == "fallback" else "native")
    out = os.open(tmp_path / "out", os.O_RDWR | os.O_CREAT)
    stuck = False

    def move(number: int, view: memoryview, offset: int) -> int:
        if stuck:
            return 100
        if write:
            return os.pwrite(number, view[:5000], offset)
        return os.preadv(number, [view[:5000]], offset)

    target: Bytes = content.copy() if write else np.zeros(1 << 20, dtype=np.uint8)
    pieces = lines((out if write else fd, 0, 1 << 20, 1 << 20, target.ctypes.data))
    with open_rows(2, read=move, write=move) as pool:
        for expected in (DONE, FAILED):
            job = RowsJob(pieces, target, write=write, unit=4096)
            pool.start(job)
            assert pool.wait(job) == expected
            stuck = True
        assert (job.failure().error, job.failure().got) == (errno.ENODATA, 100)
    assert np.array_equal(target, content)
    assert not write or (tmp_path / "out").read_bytes() == content.tobytes()
    os.close(out)


@with_threads
def test_one_job_is_dropped_and_the_others_are_done(open_any: OpenRows, content: Bytes, fd: int) -> None:
    pool = open_any(1)
    targets: list[Bytes] = [np.zeros(1 << 20, dtype=np.uint8) for _ in range(20)]
    jobs = []
    for target in targets:
        places = ((fd, i * 1024, 1024, 1024, target.ctypes.data + i * 1024) for i in range(1023, -1, -1))
        jobs.append(pool.submit(lines(*places), target))
    pool.drop(jobs[-1])
    pool.finish()
    states = [pool.state(job) for job in jobs]
    assert states[:-1] == [DONE] * 19
    assert states[-1] in (DONE, DROPPED)
    assert all(np.array_equal(target, content) for target in targets[:-1])


@pytest.mark.usefixtures("native")
def test_direct_reads_through_stages(tmp_path: Path, content: Bytes) -> None:
    path = tmp_path / "direct"
    content[:-100].tofile(path)  # ends inside a sector
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        pytest.skip("no direct I/O here")
    with open_rows(4, stage_bytes=8192) as pool:
        target: Bytes = np.zeros(len(content) + 1, dtype=np.uint8)
        begin = target.ctypes.data + 1  # a stage is aligned, so that the place need not be
        pieces = [(fd, at, 65536, min(65536, len(content) - 100 - at), begin + at) for at in range(0, 1 << 20, 65536)]
        assert pool.wait(pool.submit(lines(*pieces), target)) == DONE
        assert np.array_equal(target[1:-100], content[:-100])
        last = len(content) - 65536
        job = pool.submit(lines((fd, last, 65536, 65536, begin)), target)
        assert pool.wait(job) == FAILED
        assert job.failure().got == 65436
    os.close(fd)


@pytest.mark.usefixtures("native")
def test_stages_go_with_the_threads() -> None:
    mapped = sum_of_maps()
    pool = open_rows(4, stage_bytes=16 << 20)
    assert sum_of_maps() - mapped >= 64 << 20
    pool.close()
    assert sum_of_maps() - mapped < 64 << 20


def test_the_end_of_the_file_is_told_with_the_piece(open_any: OpenRows, content: Bytes, fd: int) -> None:
    pool = open_any()
    target: Bytes = np.zeros(4000, dtype=np.uint8)
    end = len(content)
    for first in (end - 2500, 0):  # read together with the pieces before it, or by itself
        starts = [first, first + 1000, end - 500]
        pieces = lines(*((fd, at, 1000, 1000, target.ctypes.data + 1000 * i) for i, at in enumerate(starts)))
        job = pool.submit(pieces, target)
        assert pool.wait(job) == FAILED
        failure = job.failure()
        assert (failure.piece, failure.error, failure.got) == (2, errno.ENODATA, 500)


def test_less_will_do_where_it_was_said(open_any: OpenRows, content: Bytes, fd: int) -> None:
    pool = open_any()
    target: Bytes = np.zeros(4096, dtype=np.uint8)
    job = pool.submit(lines((fd, len(content) - 100, 4096, 100, target.ctypes.data)), target)
    assert pool.wait(job) == DONE
    assert np.array_equal(target[:100], content[-100:])
    job = pool.submit(lines((fd, len(content) - 100, 4096, 101, target.ctypes.data)), target)
    assert pool.wait(job) == FAILED


def test_an_error_of_the_kernel_comes_with_its_number(open_any: OpenRows, tmp_path: Path) -> None:
    pool = open_any()
    target: Bytes = np.zeros(10, dtype=np.uint8)
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        job = pool.submit(lines((folder, 0, 10, 10, target.ctypes.data)), target)
        assert pool.wait(job) == FAILED
        assert job.failure().error == errno.EISDIR
    finally:
        os.close(folder)
    assert pool.wait(pool.submit(lines(), None)) == DONE, "the pool goes on after a failure"


def test_a_hint_changes_nothing(open_any: OpenRows, fd: int) -> None:
    pool = open_any()
    assert pool.wait(pool.submit(lines((fd, 0, 1 << 20, 1 << 20, 0)), None)) == DONE


@pytest.mark.usefixtures("native")
def test_a_map_gives_the_same_bytes_and_errors_instead_of_a_crash(tmp_path: Path, content: Bytes) -> None:
    path = tmp_path / "mapped"
    content.tofile(path)
    fd = os.open(path, os.O_RDONLY)
    address = map_file(fd, len(content))
    assert address
    target: Bytes = np.zeros(1 << 20, dtype=np.uint8)
    starts = list(range(0, 1 << 20, 1 << 14))
    pieces = lines(*((fd, at, 1 << 14, 1 << 14, target.ctypes.data + at) for at in reversed(starts)), map=address)
    with open_rows(2) as pool:
        for helping in (False, True):
            target[:] = 0
            assert pool.wait(pool.submit(pieces, target), help=helping) == DONE
            assert np.array_equal(target, content)
        os.truncate(path, 900_000)
        for helping in (False, True):  # the fault is the pool's threads', or this one's
            for _ in range(20):
                job = pool.submit(pieces, target)
                assert pool.wait(job, help=helping) == FAILED
                failure = job.failure()
                assert failure.error == errno.ENODATA
                assert pieces[failure.piece, 1] + failure.got >= 900_000 - 4096 or failure.got == 0
        # Behind the end, the last page of a map holds zeros; nothing faults there.
        job = pool.submit(lines((fd, 899_000, 1001, 1001, target.ctypes.data), map=address), target)
        assert pool.wait(job) == FAILED
        assert job.failure().got == 1000
        path.write_bytes(content.tobytes())
        assert pool.wait(pool.submit(pieces, target)) == DONE, "the pool goes on"
        assert np.array_equal(target, content)
    unmap_file(address, len(content))
    os.close(fd)


BUS_ERROR = """
import ctypes, faulthandler, mmap, os, sys
import numpy as np
from stormtorch.native.rows.c_rows import map_file
if {enabled}:
    faulthandler.enable()
fd = os.open({path!r}, os.O_RDWR)
assert map_file(fd, 4096)
other = mmap.mmap(fd, 4096)
os.ftruncate(fd, 0)
other[0]
"""


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("enabled", [False, True])
def test_a_bus_error_of_somebody_else_is_theirs(tmp_path: Path, enabled: bool) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(4096))
    code = BUS_ERROR.format(enabled=enabled, path=str(path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == -signal.SIGBUS
    assert ("Bus error" in done.stderr) == enabled


SHRUNK = """
import faulthandler, os, signal, sys
import numpy as np
from stormtorch.native.rows.c_rows import map_file
from stormtorch.native.rows.jobs import FAILED
from stormtorch.native.rows.open import open_rows
fd = os.open({path!r}, os.O_RDWR)
address = map_file(fd, 65536)
target = np.zeros(65536, dtype=np.uint8)
with open_rows(1) as pool:
    {before}
    os.ftruncate(fd, 0)
    pieces = np.array([[fd, 0, 65536, 65536, target.ctypes.data, address]], dtype=np.int64)
    for helping in (True, False):
        assert pool.wait(pool.submit(pieces, target), help=helping) == FAILED
print("told")
"""


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(
    "before",
    [
        "faulthandler.enable()",
        "signal.signal(signal.SIGBUS, lambda *_: None)",
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGBUS])",
    ],
)
def test_a_handler_of_somebody_else_after_ours_breaks_nothing(tmp_path: Path, before: str) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(65536))
    code = SHRUNK.format(before=before, path=str(path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500, check=False)
    assert (done.returncode, done.stdout) == (0, "told\n"), done.stderr


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("ignored", [False, True])
def test_a_bus_error_that_was_sent_does_what_it_did(tmp_path: Path, ignored: bool) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(4096))
    code = f"""
import os, signal, time
from stormtorch.native.rows.c_rows import map_file
if {ignored}:
    signal.signal(signal.SIGBUS, signal.SIG_IGN)
assert map_file(os.open({str(path)!r}, os.O_RDONLY), 4096)
for _ in range(2):
    os.kill(os.getpid(), signal.SIGBUS)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == (0 if ignored else -signal.SIGBUS), done.stderr


def test_a_job_that_never_came_to_the_pool_is_not_waited_for(open_any: OpenRows) -> None:
    pool = open_any()
    job = RowsJob(lines(), None)  # Ctrl-C came between making it and handing it over
    if isinstance(pool, NativeRows):
        pool._native.held.append(job)
    pool.cancel()
    assert pool.wait(job) == DROPPED


def test_many_jobs_from_several_owners_end_in_order_of_arrival(open_any: OpenRows, content: Bytes, fd: int) -> None:
    pool = open_any(3)
    targets: list[Bytes] = [np.zeros(50_000, dtype=np.uint8) for _ in range(60)]
    jobs = []
    for number, target in enumerate(targets):
        pieces = [(fd, number * 7 + i * 500, 500, 500, target.ctypes.data + i * 500) for i in range(100)]
        jobs.append(pool.submit(lines(*pieces), target))
    assert pool.wait(jobs[-1]) == DONE
    for number, (job, target) in enumerate(zip(jobs, targets, strict=True)):
        assert pool.wait(job) == DONE
        assert np.array_equal(target, content[number * 7 : number * 7 + 50_000])


@with_threads
def test_cancelled_jobs_are_over_and_let_go(open_any: OpenRows, content: Bytes, fd: int) -> None:
    pool = open_any(1)
    target: Bytes = np.zeros(1 << 20, dtype=np.uint8)
    pieces = lines(*((fd, i * 1024, 1024, 1024, target.ctypes.data + i * 1024) for i in range(1023, -1, -1)))
    jobs = [pool.submit(pieces, target) for _ in range(50)]
    pool.cancel()
    states = [pool.wait(job) for job in jobs]
    assert set(states) <= {DONE, DROPPED}
    assert DROPPED in states
    target[:] = 0
    time.sleep(0.01)
    assert not target.any(), "nothing writes after the jobs are over"
    assert pool.wait(pool.submit(pieces, target)) == DONE, "the pool goes on"
    assert np.array_equal(target, content)


def test_close_ends_threads_and_jobs(open_any: OpenRows, fd: int) -> None:
    before = threads_now()
    pool = open_any(4)
    target: Bytes = np.zeros(1 << 20, dtype=np.uint8)
    pieces = lines(*((fd, i * 1024, 1024, 1024, target.ctypes.data + i * 1024) for i in range(1023, -1, -1)))
    jobs = [pool.submit(pieces, target) for _ in range(30)]
    pool.close()
    pool.close()
    assert all(pool.wait(job) != PENDING for job in jobs)
    with pytest.raises(LaneError, match="closed"):
        pool.submit(pieces, target)
    until = time.monotonic() + 300
    while threads_now() - before and time.monotonic() < until:
        time.sleep(0.001)
    assert not threads_now() - before


@with_threads
def test_a_dropped_pool_ends_its_threads(open_any: OpenRows, fd: int) -> None:
    target: Bytes = np.zeros(1 << 20, dtype=np.uint8)
    pool = open_rows(2)
    job = pool.submit(lines((fd, 0, 1 << 20, 1 << 20, target.ctypes.data)), target)
    pool.wait(job)
    before = threads_now()
    del pool
    until = time.monotonic() + 300
    while len(before) - len(threads_now()) < 2 and time.monotonic() < until:
        time.sleep(0.001)
    assert len(before) - len(threads_now()) == 2
    assert open_any is not None


def test_what_a_job_needs_is_let_go_when_it_is_over(open_any: OpenRows, fd: int) -> None:
    class Memory:
        gone = False

        def __init__(self) -> None:
            self.bytes: Bytes = np.zeros(10, dtype=np.uint8)

        def __del__(self) -> None:
            Memory.gone = True

    pool = open_any()
    memory = Memory()
    job = pool.submit(lines((fd, 0, 10, 10, memory.bytes.ctypes.data)), memory)
    pool.wait(job)
    del memory
    other: Bytes = np.zeros(10, dtype=np.uint8)
    pool.wait(pool.submit(lines((fd, 0, 10, 10, other.ctypes.data)), other))
    assert Memory.gone


def test_a_forked_child_is_refused(open_any: OpenRows, fd: int) -> None:
    pool = open_any()
    target: Bytes = np.zeros(10, dtype=np.uint8)
    pieces = lines((fd, 0, 10, 10, target.ctypes.data))
    pool.wait(pool.submit(pieces, target))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of threads here; that is the test
        child = os.fork()
    if child == 0:
        outcome = 1
        try:
            pool.submit(pieces, target)
        except LaneError as error:
            pool.close()
            outcome = 0 if "fork" in str(error) else 2
        finally:
            os._exit(outcome)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pool.wait(pool.submit(pieces, target)) == DONE


@with_threads
def test_close_waits_for_a_thread_that_helps(open_any: OpenRows) -> None:
    """It is a thread of the caller's; after close, memory and pieces of all jobs may go."""
    small, large = 16 << 20, 256 << 20
    source: Bytes = np.ones(large, dtype=np.uint8)
    target: Bytes = np.zeros(small + large, dtype=np.uint8)
    other: Bytes = np.zeros(8, dtype=np.uint8)
    at, here = source.ctypes.data, target.ctypes.data
    pool = open_any(1)
    first = pool.submit(lines((-1, at, small, small, here), (-1, at, large, large, here + small)), target)
    second = pool.submit(lines((-1, at, 8, 8, other.ctypes.data)), other)
    helper = threading.Thread(target=pool.wait, args=(second,), kwargs={"help": True})
    helper.start()  # it takes the large piece while the pool's thread has the small one
    time.sleep(0.002)
    pool.close()
    state, is_whole = pool.state(first), bool(target[-1] == 1)
    helper.join()
    assert state in (DONE, DROPPED)
    assert is_whole == (target[-1] == 1), "it was still being written"


@with_threads
def test_a_wait_can_be_interrupted(open_any: OpenRows, fd: int) -> None:
    pool = open_any(1)
    target: Bytes = np.zeros(1 << 20, dtype=np.uint8)
    pieces = lines(*((fd, i * 64, 64, 64, target.ctypes.data + i * 64) for i in range(16383, -1, -1)))
    jobs = [pool.submit(pieces, target) for _ in range(400)]  # a second or more of work
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    begin = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            pool.wait(jobs[-1])
            time.sleep(20)  # should the work have been done in time all the same
    finally:
        timer.join()
    assert time.monotonic() - begin < 15
    pool.close()


@pytest.mark.usefixtures("no_library")
def test_without_the_library_submit_can_be_interrupted(
    monkeypatch: pytest.MonkeyPatch, content: Bytes, fd: int
) -> None:
    target: Bytes = np.zeros(1 << 20, dtype=np.uint8)
    pieces = lines(*((fd, i * 1024, 1024, 1024, target.ctypes.data + i * 1024) for i in range(1024)))
    pool, real, calls = open_rows(1), os.preadv, 0

    def interrupted(*arguments: Any) -> int:
        nonlocal calls
        calls += 1
        if calls == 500:
            os.kill(os.getpid(), signal.SIGINT)
        return real(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pool.submit(pieces, target)
    assert calls == 500
    assert pool.wait(pool.submit(pieces, target)) == DONE, "the pool goes on"
    assert np.array_equal(target, content)


EXIT = """
import os, sys
import numpy as np
from stormtorch.native import library
if {hidden}:
    library._load = lambda: "hidden by a test"
from stormtorch.native.rows.open import open_rows
pool = open_rows(2)
fd = os.open(sys.executable, os.O_RDONLY)
target = np.zeros(4096, dtype=np.uint8)
pieces = np.array([[fd, 0, 4096, 4096, target.ctypes.data, 0]] * 1000, dtype=np.int64)
for _ in range(100):
    pool.submit(pieces, target)
print("leaving")
"""


@pytest.mark.parametrize("hidden", [False, True], ids=["native", "fallback"])
def test_the_interpreter_exits_with_jobs_waiting(hidden: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXIT.format(hidden=hidden)], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "leaving\n"
