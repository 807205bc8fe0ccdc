"""Torch's caching allocator of a GPU: how much it may still take, and how to keep it from taking more than needed.

Torch takes memory from the driver in segments and keeps freed memory. A segment with a hole in it can be neither given
back nor joined with another, so a process holds more of the device than it has allocated: 16.4 GiB for 13.7, seen on an
H200. With a budget of the whole device, torch then runs out of memory although the budget was kept to the byte.
Expandable segments have one range of addresses, and holes in it go back to the driver. Torch's own message recommends
them. They are a setting of the whole process, so it is set only while a session is open, and only if the user has made
no allocator settings.

The settings are the one private interface of torch here; tests/memory/test_torch_allocator.py watches it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import torch

from ...core.sizes import round_up
from .driver import device_index, driver

_LOST, _MOST_LOST = 32, 8  # 1/32 of a budget at the least, where nothing is known, and 1/8 at the most
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING")
_EXPANDABLE, _PLAIN = "expandable_segments:True", "expandable_segments:False"
_GRAIN = 512


class _Segments:
    """The setting of the process, on while at least one session asks for it. Torch uses memory of either kind of
    segment only while that is the setting, so cached memory is released at each change."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked = 0  # by how many sessions that have not ended
        self._is_plain_again = False  # set back by us, so not a setting of the user's

    def ask(self) -> bool:
        """Turn the setting on; False if the user has settings of their own."""
        with self._lock:
            if self._asked == 0:
                if any(name in os.environ for name in _VARIABLES) or self._settings_of_users():
                    return False
                _set(_EXPANDABLE)
                try:
                    torch.cuda.empty_cache()
                except BaseException:  # an error of earlier work, which is raised where that work is waited for
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
        """The user's settings, as far as torch reports them; ours do not count."""
        ask = getattr(torch._C, "_accelerator_getAllocatorSettings", lambda: "")  # torch 2.11 has no such function
        given = str(ask())
        is_ours = given == _EXPANDABLE if self._asked else given == _PLAIN and self._is_plain_again
        return "" if is_ours else given


_segments = _Segments()


def expand_segments(device: torch.device) -> Callable[[], None]:
    """Let segments on ``device`` expand from now on, if it supports that and the user has no settings of their own.
    Returns a function that ends it, once; tensors made meanwhile are not affected."""
    is_native = device.type == "cuda" and torch.cuda.get_allocator_backend() == "native"
    found = driver() if is_native else None
    if found is None or not found.can_map(device_index(device)) or not _segments.ask():
        return lambda: None
    ends = [_segments.end]
    return lambda: ends.pop()() if ends else None


def _set(settings: str) -> None:
    torch._C._accelerator_setAllocatorSettings(settings)


def allowed_bytes(device: torch.device) -> int:
    """Bytes of a GPU that this process may take: all, or the fraction that the user has set."""
    total = torch.cuda.mem_get_info(device)[1]
    return min(total, round_up(int(total * torch.cuda.get_per_process_memory_fraction(device)), _GRAIN))


def untaken_bytes(device: torch.device) -> int:
    """Bytes of a GPU that torch could still take, without those it has cached."""
    left = allowed_bytes(device) - torch.cuda.memory_reserved(device)
    return max(0, min(torch.cuda.mem_get_info(device)[0], left))


def return_cached(device: torch.device) -> None:
    """Return memory that torch has cached on a GPU to the driver; waits for the work that uses it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def lost_bytes(device: torch.device, limit_bytes: int, *, most_allocated: int, least_bytes: int = 0) -> int:
    """Bytes of ``limit_bytes`` that cannot be allocated, because torch has to take more than that, and there is no
    more.

    As much as it has taken beyond its allocations so far, or ``least_bytes``. Seen with expandable segments: 0.2 of 8
    GiB with tensors of up to 128 MiB, 0.7 with tensors of 768 MiB."""
    beyond = untaken_bytes(device) + torch.cuda.memory_reserved(device) - limit_bytes
    seen = torch.cuda.max_memory_reserved(device) - most_allocated
    return max(0, min(max(seen, least_bytes, limit_bytes // _LOST), limit_bytes // _MOST_LOST) - beyond)


def streams_with_memory(device: torch.device) -> set[int]:
    """The streams that have allocated memory on a GPU; empty if unknown. Takes milliseconds."""
    if torch.cuda.get_allocator_backend() != "native":
        return set()
    index = device_index(device)
    return {int(segment["stream"]) for segment in torch.cuda.memory_snapshot() if segment["device"] == index}
