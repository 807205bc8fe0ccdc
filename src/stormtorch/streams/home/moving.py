"""Moves parameters to home memory one after the other, so that RAM never holds more than one of them twice.

Home memory is mapped and not touched yet; each parameter is copied there, and the memory that it lay in is freed before
the next. Where that fails half-way, some parameters lie here and some there, and the model is whole. Memory over which
user code still has tensors cannot be freed: the user is told how much that is. Files that are mapped are page cache,
which the system takes back by itself."""

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

_TRIM_BYTES = 64 * MiB  # moved between two returns to the system
_TOUCH_BYTES = 4 * MiB  # from which on threads are worth their start
_TRIES, _TRY_S = 10, 0.05  # how often, and how long apart, freed memory is asked for before it is given up
_HELD_PART, _HELD_BYTES = 20, 64 * MiB  # what is said: more than a part of so many, and than so many bytes


class Moving:
    """The parameters of all units, on their way home."""

    def __init__(self, units: list[Unit]) -> None:
        self._sources = _sources(place.parameter for unit in units for place in unit.places)
        self._total = sum(unit.image_bytes for unit in units)
        self._since = 0  # bytes moved since memory was returned to the system
        self._is_tight = self._total > host_available_bytes()

    @property
    def held_bytes(self) -> int:
        """RAM that the parameters take, or took and is not free yet."""
        return sum(size for reference, size in self._sources if not reference.gone)

    def move(self, unit: Unit, image: torch.Tensor) -> None:
        """Make every parameter of ``unit`` a view of its home image."""
        for place in unit.places:
            view = place.in_image(image)
            size = place.count * place.dtype.itemsize
            if self._is_tight:
                self._check_room(size)
            if size >= _TOUCH_BYTES:
                first_touch(image.data_ptr() + place.at, size)
            with torch.no_grad():
                if not place.parameter.is_meta:
                    view.copy_(place.parameter.data)
                place.parameter.data = view
            self._since += size
            if self._since >= _TRIM_BYTES:
                trim_heap()
                self._since = 0

    def say_what_is_held(self) -> None:
        """All have moved: tell the user, once, what could not be freed."""
        least = max(_HELD_BYTES, self._total // _HELD_PART)
        if self.held_bytes > least:
            gc.collect()  # objects that refer to themselves are not user code's
        trim_heap()
        if self.held_bytes > least:
            say_once(
                f"{format_bytes(self.held_bytes)} of RAM that the model's weights lay in could not be freed: there are "
                "other tensors over it, in a state_dict perhaps. Until those are dropped, RAM has these weights twice.",
                key="weights held twice",
            )

    def _check_room(self, size: int) -> None:
        """RAM has room for the weights only as they are freed where they were."""
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
                f"{format_bytes(self.held_bytes)} of them are, or are held by other tensors, where they were; only "
                f"{format_bytes(host_available_bytes())} are free now",
                "The limit is the machine's RAM.",
                "Drop other references to the weights (a state_dict), or end other programs.",
            )


def ram_of(parameters: Iterable[torch.nn.Parameter]) -> int:
    """What of RAM becomes free when these have moved elsewhere."""
    return sum(size for _, size in _sources(parameters))


def _sources(parameters: Iterable[torch.nn.Parameter]) -> list[tuple[StorageReference, int]]:
    """The storages in RAM that these lie in, and how many bytes of each are theirs."""
    found: dict[int, tuple[StorageReference, int]] = {}
    files = MappedFiles()
    for parameter in parameters:
        if parameter.device.type == "cpu" and has_plain_storage(parameter) and parameter.data_ptr() not in files:
            storage = parameter.untyped_storage()
            reference, size = found.get(storage._cdata) or (StorageReference(storage), 0)
            found[reference.key] = reference, min(size + parameter.nbytes, storage.nbytes())
    return list(found.values())
