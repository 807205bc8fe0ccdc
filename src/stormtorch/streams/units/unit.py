"""A unit: the parameters that move together, usually one block of the model.

The tensors of a unit, by the names that all code here uses:

    home image   all parameters of the unit in their compute dtype, flat, in pinned RAM. The registered ``nn.Parameter``
                 of each is a view of it: the optimizer, ``state_dict`` and checkpoints see ordinary tensors. Frozen
                 parameters at the end may remain in the model's own files instead, and the others of a trained unit
                 may lie in a scratch file: ``home_bytes`` are in RAM then.
    home grads   gradients, flat, in RAM; *own* in the parameters' dtypes, or *wide* in fp32 once micro-batches have
                 been added up.
    states       what the optimizer keeps: for AdamW two fp32 moments, and the *masters*: the bits that the image lacks
                 to be the fp32 weight.
    stay         a device copy of the image, from its load until nothing refers to it any more.
    twin         the device view that stands in for a parameter while a module computes; part of the unit's stay.

A unit's parameters lie in the image with those that are trained first, and those that a file has last, in the order of
the file. Every tensor starts at a multiple of 64 bytes,
so that kernels see the alignment that they would see in tensors of their own."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any
from weakref import WeakValueDictionary

import torch

from ...core.sizes import round_up
from ...memory.disk.mapped import Span
from ...memory.disk.stored import StoredTensor

ALIGNMENT = 64


@dataclass(eq=False, slots=True)
class Place:
    """One parameter: where it lies in each of its unit's buffers. Offsets in bytes, ``state_at`` in elements."""

    parameter: torch.nn.Parameter
    name: str
    unit: Unit
    index: int  # within the unit
    trained: bool
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    count: int
    at: int = 0
    grad_at: int = 0
    wide_at: int = 0
    state_at: int = 0
    master_at: int = 0
    written: bool = True  # False: it came from the meta device and has no values yet
    span: Span | None = None  # where a file has it, if it may remain there
    in_file: bool = False  # it has no home in RAM: its memory is a mapping of the file, which nothing may write
    stored: StoredTensor | None = None  # where a scratch file has it; its memory is a mapping of that
    # User code's views of its weight and gradient (home/parameter.py), by ``id``.
    views: MutableMapping[int, Any] = field(default_factory=WeakValueDictionary)

    def view(self, flat: torch.Tensor, at: int, dtype: torch.dtype) -> torch.Tensor:
        """This parameter's part of the byte tensor ``flat``, in the parameter's shape and strides."""
        piece = flat[at : at + self.count * dtype.itemsize].view(dtype)
        return piece.as_strided(self.shape, self.stride)

    def in_typed(self, typed: torch.Tensor, at: int) -> torch.Tensor:
        """Like ``view``, of a flat tensor that has the dtype already."""
        return typed.as_strided(self.shape, self.stride, typed.storage_offset() + at // typed.itemsize)

    @property
    def is_contiguous(self) -> bool:
        """Whether the order of its bytes is that of a file of tensors."""
        return self.parameter.is_contiguous() and self.parameter.stride() == self.stride

    def in_image(self, flat: torch.Tensor) -> torch.Tensor:
        return self.view(flat, self.at, self.dtype)

    def gradient(self, bucket: torch.Tensor, *, wide: bool) -> torch.Tensor:
        """Its gradient in ``bucket``, the bytes of its unit's gradients; ``wide``: in the dtype that adds them up."""
        return self.view(bucket, self.wide_at, self.wide_dtype) if wide else self.view(bucket, self.grad_at, self.dtype)

    @property
    def wide_dtype(self) -> torch.dtype:
        """The dtype in which gradients of several micro-batches are added up."""
        return torch.float32 if self.dtype.itemsize < 4 else self.dtype

    @property
    def is_split(self) -> bool:
        """Whether fp32 masters are kept beside a smaller image."""
        return self.dtype in (torch.bfloat16, torch.float16)

    @property
    def master_bytes(self) -> int:
        return {torch.bfloat16: 2, torch.float16: 4}.get(self.dtype, 0) * self.count


class Unit:
    """Parameters that move together: their sizes and offsets."""

    def __init__(
        self,
        index: int,
        name: str,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        spans: Mapping[int, Span] = MappingProxyType({}),
    ) -> None:
        """``spans``: where files have parameters that may remain there, by id."""
        self.index, self.name = index, name
        # Vectors come last: trainers give them settings of their own, and neighbours with the same ones are one update.
        ordered = sorted(parameters, key=lambda item: (_order_in_file(spans.get(id(item[1]))), *_order(item[1])))
        self.places: list[Place] = []
        for number, (parameter_name, parameter) in enumerate(ordered):
            shape, dtype, count = parameter.shape, parameter.dtype, parameter.numel()
            stride = (parameter if is_dense(parameter) else parameter.detach().to("meta").contiguous()).stride()
            trained = parameter.requires_grad
            self.places.append(Place(parameter, parameter_name, self, number, trained, shape, stride, dtype, count))
            self.places[-1].span = spans.get(id(parameter))
        self.trained = [place for place in self.places if place.trained]
        self.image_bytes = _lay_out(self.places, "at", lambda place: place.count * place.dtype.itemsize)
        # Where parameters that may remain in files begin.
        self.file_at = next((place.at for place in self.places if place.span is not None), self.image_bytes)
        self.home_bytes = self.image_bytes  # the part of the image that has its home in RAM
        self._starts = [place.at for place in self.places]
        self.grad_bytes = _lay_out(self.trained, "grad_at", lambda place: place.count * place.dtype.itemsize)
        self.wide_bytes = _lay_out(self.trained, "wide_at", lambda place: place.count * place.wide_dtype.itemsize)
        self.state_count = _lay_out(self.trained, "state_at", lambda place: place.count * 4) // 4
        for place in self.trained:
            place.state_at //= 4
        self.master_bytes = _lay_out(self.trained, "master_at", lambda place: place.master_bytes)
        self.row_bytes: dict[int, int] = {}  # of fused experts (routed.py): the bytes of each, by index of the place
        self.has_wide_form = any(place.dtype.itemsize < 4 for place in self.trained)

    def views(self, image: torch.Tensor) -> dict[int, torch.Tensor]:
        """All parameters in ``image``, the unit's bytes, by index."""
        typed = {dtype: image.view(dtype) for dtype in {place.dtype for place in self.places}}
        return {place.index: place.in_typed(typed[place.dtype], place.at) for place in self.places}

    def gradients(self, indices: Iterable[int], bucket: torch.Tensor, *, wide: bool) -> dict[int, torch.Tensor]:
        """The gradients of these parameters in ``bucket``, by index; ``wide``: in the dtype that adds them up."""
        typed: dict[torch.dtype, torch.Tensor] = {}
        found = {}
        for index in indices:
            place = self.places[index]
            at, dtype = (place.wide_at, place.wide_dtype) if wide else (place.grad_at, place.dtype)
            if dtype not in typed:
                typed[dtype] = bucket.view(dtype)
            found[index] = place.in_typed(typed[dtype], at)
        return found

    def stay_in_files(self) -> None:
        """Give no home in RAM to the parameters that files have."""
        self.home_bytes = self.file_at
        for place in self.places:
            place.in_file = place.span is not None

    def lie_in_scratch(self) -> None:
        """Give no home in RAM to any parameter: a scratch file has those that the model's own files do not have."""
        self.home_bytes = 0

    def place_at(self, offset: int) -> Place:
        """The parameter that the byte ``offset`` of the image belongs to."""
        return self.places[bisect.bisect_right(self._starts, offset) - 1]

    def __repr__(self) -> str:
        return f"Unit({self.index}, {self.name!r}, {len(self.places)} parameters, {self.image_bytes} bytes)"


def _order_in_file(span: Span | None) -> tuple[str, int]:
    return ("", 0) if span is None else (span.path, span.offset)


def _order(parameter: torch.nn.Parameter) -> tuple[bool, int, bool]:
    return not parameter.requires_grad, parameter.element_size(), parameter.dim() < 2


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one run of memory without gaps or overlaps, in whatever order."""
    expected = 1
    for stride, length in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= length
    return True


def _lay_out(places: Sequence[Place], field: str, size_of: Callable[[Place], int]) -> int:
    """Set ``field`` of each place to its offset; returns the bytes of all."""
    end = 0
    for place in places:
        start = round_up(end, ALIGNMENT)
        setattr(place, field, start)
        end = start + size_of(place)
    return round_up(end, ALIGNMENT)
