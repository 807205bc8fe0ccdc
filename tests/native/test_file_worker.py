"""Jobs with files: the bits of an update in memory, the order of flags, and disks that fail."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import time
from pathlib import Path

import pytest
import torch

from stormtorch.native import moves
from stormtorch.native.adamw import adamw_
from stormtorch.native.library import library
from stormtorch.native.update import AdamStep, AdamTensors, FileTensors
from stormtorch.native.worker.files import (
    CFilePool,
    FileJob,
    FileWorker,
    PythonFileThread,
    Range,
    open_file_worker,
)
from stormtorch.native.worker.jobs import FlagValue

COUNT = 5000
_MASTERS = {torch.float32: None, torch.bfloat16: torch.int16, torch.float16: torch.float32}
STEP = AdamStep(lr=1e-2, step=3)


class Word:
    """A flag word of the test's own."""

    def __init__(self) -> None:
        self.memory = ctypes.c_uint32(0)

    def at(self, value: int) -> FlagValue:
        return FlagValue(ctypes.addressof(self.memory), value, owner=self.memory)

    def wait(self, value: int) -> None:
        deadline = time.monotonic() + 20
        while self.memory.value < value:
            assert time.monotonic() < deadline, f"the word is {self.memory.value}"
            time.sleep(0.001)


@pytest.fixture(params=["c", "python"])
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "c" and library() is None:
        pytest.skip("the C library was not built")
    return str(request.param)


def opened(
    kind: str,
    threads: int = 2,
    size: int = 1 << 17,
    read: moves.Move = moves.read_at,
    write: moves.Move = moves.write_at,
) -> FileWorker:
    memory = torch.zeros(threads * size, dtype=torch.uint8)
    if kind == "python":
        return FileWorker(PythonFileThread(memory=memory[:size], read=read, write=write))
    native = library()
    assert native is not None
    return FileWorker(CFilePool(native, threads=threads, memory=memory, read=read, write=write))


class States:
    """A weight whose states lie in a file, perhaps with itself (``whole``), and the same in memory."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.float32, at: int = 0, *, whole: bool = False) -> None:
        draw = torch.Generator().manual_seed(at + 1)
        master_dtype = _MASTERS[dtype]
        self.weight = torch.randn(COUNT, generator=draw).to(dtype)
        self.grad = torch.randn(COUNT, generator=draw).to(dtype)
        moments = [torch.randn(COUNT, generator=draw).abs() for _ in range(2)]
        master = None
        if master_dtype is not None:
            master = self.weight.float() if dtype == torch.float16 else torch.zeros(COUNT, dtype=torch.int16)
        self.whole = whole
        parts = [t.view(torch.uint8) for t in (*moments, master, self.weight if whole else None) if t is not None]
        self.size, self.at, self.path = sum(p.nbytes for p in parts), at, path
        self.file = os.open(path, os.O_RDWR | os.O_CREAT)
        os.pwrite(self.file, torch.cat(parts).numpy().tobytes(), at)
        self.expected = AdamTensors(
            weight=self.weight.clone(), grad=self.grad, exp_avg=moments[0], exp_avg_sq=moments[1], master=master
        )
        self.tensors = FileTensors(
            weight=self.size - self.weight.nbytes if whole else self.weight,
            dtype=dtype,
            count=COUNT,
            grad=self.grad,
            exp_avg=0,
            exp_avg_sq=4 * COUNT,
            master=None if master is None else 8 * COUNT,
        )
        self.part = Range(self.file, at, self.size)

    def job(self, words: list[Word], value: int = 1, **more: FlagValue) -> FileJob:
        """``words``: done, written, abort."""
        done, written, abort = words
        flags = {"ready": None, "also": None, **more}
        return FileJob(
            ranges=[self.part],
            updates=[(self.tensors, STEP.scalars)],
            priority=0,
            done=done.at(value),
            written=written.at(value),
            abort=abort.at(1),
            **flags,  # type: ignore[arg-type]
        )

    def check(self) -> None:
        """The weight and the file hold what the update in memory gives, bit for bit."""
        assert self.whole or torch.equal(self.weight, self.expected.weight)
        stored = os.pread(self.file, self.size, self.at)
        parts = [self.expected.exp_avg, self.expected.exp_avg_sq, self.expected.master]
        parts += [self.expected.weight] if self.whole else []
        assert stored == b"".join(t.view(torch.uint8).numpy().tobytes() for t in parts if t is not None)


@pytest.fixture
def words() -> list[Word]:
    return [Word(), Word(), Word()]


@pytest.mark.parametrize("whole", [False, True], ids=["states", "with weights"])
@pytest.mark.parametrize("dtype", list(_MASTERS))
def test_the_same_bits_as_in_memory(
    kind: str, dtype: torch.dtype, whole: bool, tmp_path: Path, words: list[Word]
) -> None:
    states = States(tmp_path / "states", dtype, at=64, whole=whole)
    ready = Word()
    with opened(kind) as worker:
        worker.run(states.job(words, ready=ready.at(1)))
        time.sleep(0.02)
        assert words[0].memory.value == 0, "the job began before its gradients were there"
        ready.at(1).write()
        words[1].wait(1)
        adamw_(states.expected, STEP)
        states.check()
        stats = worker.stats()
        assert (stats.read_bytes, stats.written_bytes, stats.elements) == (states.size, states.size, COUNT)
        assert stats.file_s > 0
        assert worker.failure() is None


def test_two_updates_of_one_part_wait_for_each_other(kind: str, tmp_path: Path, words: list[Word]) -> None:
    states = States(tmp_path / "states")

    def slowly(fd: int, view: memoryview, offset: int) -> int:
        time.sleep(0.05)
        return moves.write_at(fd, view, offset)

    with opened(kind, write=slowly) as worker:
        for value in range(1, 6):
            worker.run(states.job(words, value, also=words[1].at(value - 1)))
        words[1].wait(5)
    for _ in range(5):
        adamw_(states.expected, STEP)
    states.check()


def test_several_updates_in_one_part(kind: str, tmp_path: Path, words: list[Word]) -> None:
    states = States(tmp_path / "states")
    half = COUNT // 2
    pieces = [slice(0, half), slice(half, COUNT)]
    other = AdamStep(lr=1e-3, step=9, weight_decay=0.5)
    updates = [
        (
            FileTensors(
                weight=states.weight[piece],
                dtype=torch.float32,
                count=piece.stop - piece.start,
                grad=states.grad[piece],
                exp_avg=4 * piece.start,
                exp_avg_sq=4 * (COUNT + piece.start),
                master=None,
            ),
            step.scalars,
        )
        for piece, step in zip(pieces, (STEP, other), strict=True)
    ]
    job = states.job(words)
    job.updates = updates
    with opened(kind) as worker:
        worker.run(job)
        words[1].wait(1)
    whole = states.expected
    for piece, step in zip(pieces, (STEP, other), strict=True):
        adamw_(
            AdamTensors(
                weight=whole.weight[piece],
                grad=whole.grad[piece],
                exp_avg=whole.exp_avg[piece],
                exp_avg_sq=whole.exp_avg_sq[piece],
            ),
            step,
        )
    states.check()


def test_the_load_need_not_wait_for_the_write(kind: str, tmp_path: Path, words: list[Word]) -> None:
    """``done`` comes before the states are in the file."""
    states, go = States(tmp_path / "states"), threading.Event()

    def held(fd: int, view: memoryview, offset: int) -> int:
        assert go.wait(20)
        return moves.write_at(fd, view, offset)

    with opened(kind, write=held) as worker:
        worker.run(states.job(words))
        words[0].wait(1)
        assert words[1].memory.value == 0
        go.set()
        words[1].wait(1)


def test_short_counts_and_interrupts(kind: str, tmp_path: Path, words: list[Word]) -> None:
    states, calls = States(tmp_path / "states"), [0]

    def some(fd: int, view: memoryview, offset: int) -> int:
        calls[0] += 1
        return moves.read_at(fd, view[:777], offset)

    with opened(kind, read=some) as worker:
        worker.run(states.job(words))
        words[1].wait(1)
    adamw_(states.expected, STEP)
    states.check()
    assert calls[0] > states.size // 777


@pytest.mark.parametrize("where", ["read", "write"])
def test_a_disk_that_fails(kind: str, where: str, tmp_path: Path, words: list[Word]) -> None:
    """The abort word is written, all flags are reached, later jobs are dropped, and the failure says what it was."""
    states = States(tmp_path / "states")
    before = states.weight.clone()

    def fail(fd: int, view: memoryview, offset: int) -> int:  # noqa: ARG001
        raise OSError(errno.EIO, "no")

    moves_of = {"read": moves.read_at, "write": moves.write_at, where: fail}
    with opened(kind, read=moves_of["read"], write=moves_of["write"]) as worker:
        worker.run(states.job(words))
        words[1].wait(1)
        words[0].wait(1)
        assert words[2].memory.value == 1
        failure = worker.failure()
        assert failure is not None
        assert (failure.error, failure.offset, failure.bytes, failure.write) == (
            errno.EIO,
            0,
            states.size,
            where == "write",
        )
        assert torch.equal(states.weight, before) == (where == "read")
        worker.run(states.job(words, 2))
        words[1].wait(2)
        assert worker.stats().abandoned == 1


def test_a_file_that_ends_early(kind: str, tmp_path: Path, words: list[Word]) -> None:
    states = States(tmp_path / "states")
    os.ftruncate(states.file, 100)
    with opened(kind) as worker:
        worker.run(states.job(words))
        words[1].wait(1)
        failure = worker.failure()
        assert failure is not None
        assert (failure.error, failure.got) == (errno.ENODATA, 100)


def test_a_read_alone(kind: str, tmp_path: Path, words: list[Word]) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 64)
    target = torch.zeros(4096, dtype=torch.uint8)
    number = os.open(path, os.O_RDONLY)
    with opened(kind) as worker:
        pieces = [Range(number, 256, 1024), Range(number, 1280, 3072, at=1024)]
        flags = {"ready": None, "also": None, "done": words[0].at(1), "abort": words[2].at(1)}
        worker.run(FileJob(ranges=pieces, target=target, priority=0, **flags))  # type: ignore[arg-type]
        words[0].wait(1)
    os.close(number)
    assert target.numpy().tobytes() == bytes(range(256)) * 16


def test_the_most_urgent_first(kind: str, tmp_path: Path) -> None:
    order: list[int] = []
    words = [[Word(), Word(), Word()] for _ in range(6)]
    all_states = [States(tmp_path / f"{n}") for n in range(6)]
    go = threading.Event()

    def noted(fd: int, view: memoryview, offset: int) -> int:
        assert go.wait(20)
        order.append(next(n for n, states in enumerate(all_states) if states.file == fd))
        return moves.read_at(fd, view, offset)

    with opened(kind, threads=1, read=noted) as worker:
        for n in (5, 4, 3, 2, 1, 0):
            job = all_states[n].job(words[n])
            job.priority = n
            worker.run(job)
        go.set()
        for n in range(6):
            words[n][1].wait(1)
    assert order[1:] == sorted(order[1:])


def test_memory_that_threads_cannot_divide() -> None:
    with pytest.raises(Exception, match="cannot be divided"):
        open_file_worker(3, torch.zeros(100, dtype=torch.uint8))
