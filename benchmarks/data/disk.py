"""What the disk gives: plain large direct reads of the same files, by a few threads, nothing done with the bytes."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from stormtorch.core.sizes import MiB

_BLOCK = 4 * MiB


def read_rate(files: Sequence[Path], *, threads: int, seconds: float) -> float:
    """Bytes per second, reading the files from their beginnings, and again, until the time is over. Blocks so long.

    Raises OSError where the filesystem knows no direct I/O.
    """
    descriptors = [os.open(file, os.O_RDONLY | os.O_DIRECT) for file in files]
    try:
        places = [
            (descriptor, offset)
            for descriptor in descriptors
            for offset in range(0, os.fstat(descriptor).st_size - _BLOCK + 1, _BLOCK)
        ] or [(descriptors[0], 0)]
        ticket, taken, failures = count(), [0] * threads, list[OSError]()
        end_s = time.perf_counter() + seconds

        def read(thread: int) -> None:
            buffer = mmap.mmap(-1, _BLOCK)  # page aligned, as direct I/O wants it
            try:
                while time.perf_counter() < end_s:
                    descriptor, offset = places[next(ticket) % len(places)]
                    taken[thread] += os.preadv(descriptor, [buffer], offset)
            except OSError as error:
                failures.append(error)
            finally:
                buffer.close()

        workers = [threading.Thread(target=read, args=(number,)) for number in range(threads)]
        start_s = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if failures:
            raise failures[0]
        return sum(taken) / (time.perf_counter() - start_s)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
