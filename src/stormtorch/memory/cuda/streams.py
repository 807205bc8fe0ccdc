"""CUDA streams that belong to one lane at a time and to no other code; see ``Driver.create_stream``.

No stream is ever destroyed. Torch's allocator remembers the stream of each allocation, and waits for that stream before
it gives such memory back to the driver: with expandable segments, whenever the cache is emptied. That may be after the
lane has ended, and a stream that is destroyed by then ends the process. The next lane reuses the stream instead.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict

import torch

from .driver import Driver

_lock = threading.RLock()  # a lane that is collected gives its stream back, whatever the thread is doing
_spare: defaultdict[int, list[torch.cuda.Stream]] = defaultdict(list)  # by device


class OwnStream:
    """A stream while a lane has it."""

    def __init__(self, cuda: Driver, index: int) -> None:
        self.stream = _take(index) or torch.cuda.ExternalStream(cuda.create_stream(index), device=index)
        self._end = weakref.finalize(self, _give_back, index, self.stream)
        self._end.atexit = False  # the driver releases it with the process

    @property
    def closed(self) -> bool:
        return not self._end.alive

    def close(self) -> None:
        self._end()


def _take(index: int) -> torch.cuda.Stream | None:
    """A spare stream that is empty: a lane that failed may have left a wait behind that never ends."""
    with _lock:
        found = next((stream for stream in _spare[index] if stream.query()), None)
        if found is not None:
            _spare[index].remove(found)
        return found


def _give_back(index: int, stream: torch.cuda.Stream) -> None:
    with _lock:
        _spare[index].append(stream)
