"""What the disk gives: plain direct reads of blocks of files, by a few threads, nothing done with the bytes."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from stormtorch.core.sizes import MiB


class PlainReads:
    """Reads blocks of files in random order, each of them once before any comes again.

    A block is as large as those of the loader, and as many are on their way. They go to a few huge pages, which stay in
    the CPU's caches: with small pages the kernel cuts a read in pieces, and the disk seems slower than it is. Opening
    raises OSError where the filesystem knows no direct I/O.
    """

    def __init__(self, files: Sequence[Path], *, threads: int, block: int = 2 * MiB) -> None:
        self._stack, self._lock, self._block = ExitStack(), threading.Lock(), block
        with ExitStack() as stack:
            self._buffers = _buffers(stack, threads, block)
            self._places: list[tuple[int, int]] = []
            for file in files:
                descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
                stack.callback(os.close, descriptor)
                self._places += [(descriptor, at) for at in range(0, os.fstat(descriptor).st_size, block)]
            self._stack = stack.pop_all()
        self._order = self._for_ever()

    def read(self, amount: int) -> float:
        """Read so many bytes, to the next whole block: the seconds of as many. Blocks so long."""
        return self._run(amount=amount, seconds=float("inf"))[1]

    def rate(self, seconds: float) -> float:
        """Bytes per second, of so many seconds and at least a block for each thread. Blocks so long."""
        taken, spent_s = self._run(amount=1 << 62, seconds=seconds)
        return taken / spent_s

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _run(self, *, amount: int, seconds: float) -> tuple[int, float]:
        taken, asked, failures = [0] * len(self._buffers), 0, list[OSError]()
        start_s = time.perf_counter()

        def work(thread: int) -> None:
            nonlocal asked
            try:
                while not taken[thread] or time.perf_counter() - start_s < seconds:
                    with self._lock:
                        if asked >= amount:
                            return
                        asked += self._block
                        descriptor, at = next(self._order)
                    taken[thread] += os.preadv(descriptor, [self._buffers[thread]], at)
            except OSError as error:
                failures.append(error)

        workers = [threading.Thread(target=work, args=(number,)) for number in range(len(taken))]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if failures:
            raise failures[0]
        spent_s = time.perf_counter() - start_s
        return sum(taken), spent_s * min(1.0, amount / sum(taken))

    def _for_ever(self) -> Iterator[tuple[int, int]]:
        chance = random.Random(9)
        while True:
            yield from chance.sample(self._places, len(self._places))


def _buffers(stack: ExitStack, count: int, size: int) -> list[memoryview]:
    """So many, aligned to their size, which go with the stack."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory has no huge pages
    memory = stack.enter_context(mmap.mmap(-1, (count + 1) * size, flags=flags))
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    begin = -ctypes.addressof(ctypes.c_ubyte.from_buffer(memory)) % size
    view = stack.enter_context(memoryview(memory))
    return [stack.enter_context(view[begin + at * size : begin + (at + 1) * size]) for at in range(count)]


def read_rate(files: Sequence[Path], *, threads: int, seconds: float) -> float:
    """Bytes per second of plain reads for so long. Blocks so long."""
    with PlainReads(files, threads=threads) as reads:
        return reads.rate(seconds)
