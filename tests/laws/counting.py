"""A device that counts, where there is none: the bytes of all storages that operations on the CPU have made and that
still live. What a kernel takes and gives back inside of itself is not seen, nor is home memory: no operation made it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class Counting(TorchDispatchMode):
    """Enter it before anything that is to be counted, and leave it last. A `DeviceMeter`."""

    only_observes = True

    def __init__(self, *, lost_part: Callable[[], float] = lambda: 0.0) -> None:
        """``lost_part``: of a budget, what holes would take of it, as far as is known when asked."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._lost_part = lost_part
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._peak = 0
        self._at_most = 0  # what lives, and what has gone since we looked last

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for storage in [_storage(tensor) for tensor in _tensors([result])]:
            if storage._cdata in self._alive:
                continue
            if all(storage._cdata != _storage(tensor)._cdata for tensor in _tensors([args, kwargs])):
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self._at_most += storage.nbytes()
        if self._at_most > self._peak:  # asking every storage takes longer than most operations
            self._peak = max(self._peak, self.allocated())
        return result

    def allocated(self) -> int:
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        self._at_most = sum(size for _, size in self._alive.values())
        return self._at_most

    def peak(self) -> int:
        return self._peak

    def forget_peak(self) -> None:
        self._peak = self.allocated()

    def free(self) -> int:
        return sys.maxsize

    def lost(self, limit_bytes: int, least_bytes: int = 0) -> int:
        assert least_bytes < limit_bytes
        return round(limit_bytes * self._lost_part())


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Those in lists and dictionaries too. Operations have nothing else, and torch's own way is slow."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
        elif isinstance(value, dict):
            yield from _tensors(value.values())


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()
