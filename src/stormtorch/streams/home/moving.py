"""Moves parameters to home memory one by one, so that RAM never holds more than a small part of them twice.

Home memory is mapped but not touched yet. Each parameter is copied there, and its old memory is freed before the next.
Memory is touched some parameters ahead, because starting threads for each takes longer than touching: 9 GB/s for the 29
MB of an average one, 48 GB/s for 512 MiB (16 cores). Where RAM has no room for that, it is touched for each.
If that fails half-way, some parameters lie in the old memory and some in the new, and the model is whole. Memory over
which user code still has tensors cannot be freed: the user is told how much that is. Mapped files are page cache, which
the system takes back by itself."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable

import torch

from ...core.errors import OutOfBudget
from ...core.notices import say_once
from ...core.sizes import MiB, format_bytes
from ...memory.books.limits import host_available_bytes
from ...memory.host.process_memory import MappedFiles, trim_heap
from ...native.touch import first_touch
from ..bridge.torch_private import StorageReference, has_plain_storage
from ..units.unit import Unit

_TRIM_BYTES = 64 * MiB  # bytes moved between two returns of memory to the system
_TOUCH_BYTES = 4 * MiB  # least bytes for which starting threads pays
_AHEAD_PART, _AHEAD_BYTES = 24, 512 * MiB  # touched ahead: 1/24 of the weights, at most so much
_TRIES, _TRY_S = 10, 0.05  # how often, and how many seconds apart, to check for freed memory before giving up
# The user is told if more than 1/20 of the weights and more bytes than this are held.
_HELD_PART, _HELD_BYTES = 20, 64 * MiB


class Moving:
    """The parameters of all units, on their way home."""

    def __init__(self, units: list[Unit]) -> None:
        self._sources = _sources(place.parameter for unit in units for place in unit.places if not place.in_file)
        self._total = sum(unit.home_bytes for unit in units)
        self._since = 0  # bytes moved since memory was returned to the system
        self._is_tight = self._total > host_available_bytes()
        self._ahead = 0 if self._is_tight else min(self._total // _AHEAD_PART, _AHEAD_BYTES)
        self._touched = range(0)  # addresses of home memory that were touched last

    @property
    def held_bytes(self) -> int:
        """RAM that the parameters occupy, or occupied and that is not free yet."""
        return sum(size for reference, size in self._sources if not reference.gone)

    def move(self, unit: Unit, image: torch.Tensor) -> None:
        """Make every parameter of ``unit`` a view of its home, the image or a scratch file, unless the model's own file
        is its home."""
        for place in unit.places:
            if place.in_file:
                continue
            size = place.count * place.dtype.itemsize
            if place.stored is not None:
                view = place.view(place.stored.bytes, 0, place.dtype)
            else:
                view = place.in_image(image)
                if self._is_tight:
                    self._check_room(size)
                self._touch(image, place.at, size)
            with torch.no_grad():
                if not place.parameter.is_meta:
                    view.copy_(place.parameter.data)
                    if place.stored is not None:
                        place.stored.sync()
                place.parameter.data = view
            self._since += size
            if self._since >= _TRIM_BYTES:
                trim_heap()
                self._since = 0

    def _touch(self, image: torch.Tensor, at: int, size: int) -> None:
        """Touch ``size`` bytes of ``image``, and what follows them in its region."""
        first, region = image.data_ptr() + at, image.untyped_storage()
        if first in self._touched and first + size <= self._touched.stop:
            return
        last = min(first + max(size, self._ahead), region.data_ptr() + region.nbytes())
        if last - first >= _TOUCH_BYTES:
            first_touch(first, last - first)
            self._touched = range(first, last)

    def say_what_is_held(self) -> None:
        """Tell the user, once, how much memory could not be freed after all have moved."""
        least = max(_HELD_BYTES, self._total // _HELD_PART)
        if self.held_bytes > least:
            gc.collect()  # frees reference cycles, which user code does not hold
        trim_heap()
        if self.held_bytes > least:
            say_once(
                f"{format_bytes(self.held_bytes)} of RAM that held the model's weights could not be freed: other "
                "tensors use it, perhaps in a state_dict. Until these are dropped, RAM holds these weights twice.",
                key="weights held twice",
            )

    def _check_room(self, size: int) -> None:
        """Raise if RAM has no room for ``size`` bytes more: it suffices only if old memory is freed as weights move."""
        if host_available_bytes() > size:
            return
        gc.collect()
        for _ in range(_TRIES):
            trim_heap()
            if host_available_bytes() > size:
                return
            time.sleep(_TRY_S)
        if host_available_bytes() <= size:
            raise OutOfBudget(
                f"Cannot move {format_bytes(self._total)} of weights to page-locked RAM",
                f"{format_bytes(self.held_bytes)} of them are still in their old place, or held by other tensors; only "
                f"{format_bytes(host_available_bytes())} are free now",
                "The limit is the machine's RAM.",
                "Drop other references to the weights (a state_dict), or end other programs.",
            )


def ram_of(parameters: Iterable[torch.nn.Parameter]) -> int:
    """RAM that becomes free when these have moved elsewhere."""
    return sum(size for _, size in _sources(parameters))


def _sources(parameters: Iterable[torch.nn.Parameter]) -> list[tuple[StorageReference, int]]:
    """The storages in RAM of these parameters, and how many bytes of each they occupy."""
    found: dict[int, tuple[StorageReference, int]] = {}
    files = MappedFiles()
    for parameter in parameters:
        if parameter.device.type == "cpu" and has_plain_storage(parameter) and parameter.data_ptr() not in files:
            storage = parameter.untyped_storage()
            reference, size = found.get(storage._cdata) or (StorageReference(storage), 0)
            found[reference.key] = reference, min(size + parameter.nbytes, storage.nbytes())
    return list(found.values())
