"""Torch's caching allocator of a GPU: what it may still take, and that it takes no more than is needed.

Torch takes memory from the driver in segments and keeps what is freed. A segment with a hole in it can be neither given
back nor joined with another, so a process holds more of the device than it has allocated: 16.4 GiB for 13.7, seen on an
H200. A budget that is all there is ends in an error of torch's then, though it was kept to the byte. Segments that
expand have one range of addresses, and holes in it go back to the driver. Torch's own message recommends them; they are
a setting of the whole process, which is why it is asked for while a session is open, and only where nobody has made
settings of their own.

The settings are the one private interface of torch here; tests/memory/test_torch_allocator.py watches it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import torch

from ...core.sizes import round_up
from .driver import device_index, driver

_LOST, _MOST_LOST = 32, 8  # of a budget a part of so many at the least, where nothing is known, and at the most
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING")
_EXPANDABLE, _PLAIN = "expandable_segments:True", "expandable_segments:False"
_GRAIN = 512


class _Segments:
    """The setting of the process, for as long as anybody asks for it. Torch uses memory of either kind of segment only
    while that is the setting, so what is cached goes back at each change."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked = 0  # by how many who have not ended
        self._is_plain_again = False  # by us, and so nobody's own setting

    def ask(self) -> bool:
        """False where the user has settings of their own."""
        with self._lock:
            if self._asked == 0:
                if any(name in os.environ for name in _VARIABLES) or self._settings_of_users():
                    return False
                _set(_EXPANDABLE)
                try:
                    torch.cuda.empty_cache()
                except BaseException:  # an error of earlier work, which is told to whoever waits for it
                    self._be_plain()
                    raise
                self._is_plain_again = False
            self._asked += 1
            return True

    def end(self) -> None:
        with self._lock:
            is_over = self._asked == 1 and not self._settings_of_users()
            self._asked -= 1
            if is_over:
                self._be_plain()
                torch.cuda.empty_cache()

    def _be_plain(self) -> None:
        _set(_PLAIN)
        self._is_plain_again = True

    def _settings_of_users(self) -> str:
        """What torch was told, where it tells, and not by us."""
        ask = getattr(torch._C, "_accelerator_getAllocatorSettings", lambda: "")  # torch 2.11 has no such question
        given = str(ask())
        is_ours = given == _EXPANDABLE if self._asked else given == _PLAIN and self._is_plain_again
        return "" if is_ours else given


_segments = _Segments()


def expand_segments(device: torch.device) -> Callable[[], None]:
    """Let segments on ``device`` expand from now on, if it can do that and the user has no settings of their own.
    Returns what ends it, once; tensors that were made meanwhile stay as they are."""
    if not _can_expand(device) or not _segments.ask():
        return lambda: None
    ends = [_segments.end]
    return lambda: ends.pop()() if ends else None


def _can_expand(device: torch.device) -> bool:
    if device.type != "cuda" or torch.cuda.get_allocator_backend() != "native":
        return False
    found = driver()
    return found is not None and found.can_map(device_index(device))


def _set(settings: str) -> None:
    torch._C._accelerator_setAllocatorSettings(settings)


def allowed_bytes(device: torch.device) -> int:
    """What this process may take of a GPU: all, or the fraction that the user has set."""
    total = torch.cuda.mem_get_info(device)[1]
    return min(total, round_up(int(total * torch.cuda.get_per_process_memory_fraction(device)), _GRAIN))


def untaken_bytes(device: torch.device) -> int:
    """What torch could still take of a GPU. What it has cached is not in it."""
    left = allowed_bytes(device) - torch.cuda.memory_reserved(device)
    return max(0, min(torch.cuda.mem_get_info(device)[0], left))


def return_cached(device: torch.device) -> None:
    """Give what torch has cached of a GPU back to the driver; waits for the work that uses it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def lost_bytes(device: torch.device, limit_bytes: int, *, most_allocated: int, least_bytes: int = 0) -> int:
    """What of ``limit_bytes`` cannot be allocated, because torch has to take more than that, and there is no more.

    As much as it has taken more than was allocated so far, or as ``least_bytes`` says. Seen with segments that expand:
    0.2 of 8 GiB with tensors of up to 128 MiB, 0.7 with such of 768."""
    beyond = untaken_bytes(device) + torch.cuda.memory_reserved(device) - limit_bytes
    seen = torch.cuda.max_memory_reserved(device) - most_allocated
    return max(0, min(max(seen, least_bytes, limit_bytes // _LOST), limit_bytes // _MOST_LOST) - beyond)


def streams_with_memory(device: torch.device) -> set[int]:
    """The streams that have allocated memory on a GPU; none where the allocator does not tell. Takes milliseconds."""
    if torch.cuda.get_allocator_backend() != "native":
        return set()
    index = device_index(device)
    return {int(segment["stream"]) for segment in torch.cuda.memory_snapshot() if segment["device"] == index}
