"""Transforms of a batch on its device, so that small dtypes cross the bus: an image's bytes instead of floats."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...core.errors import SettingError

Transform = Callable[[Any], Any] | Mapping[str, Callable[[torch.Tensor], torch.Tensor]]


@dataclass(frozen=True)
class Cast:
    """Casts to another dtype: ``Cast(torch.int64)`` for tokens that are sent as uint16."""

    dtype: torch.dtype

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.dtype)


@dataclass(frozen=True)
class Normalise:
    """``(x - mean) / std`` in ``dtype``. Both are one number, or one for each entry of a batch's dimension ``dim``."""

    mean: float | Sequence[float]
    std: float | Sequence[float]
    dtype: torch.dtype = torch.float32
    dim: int = 1

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            value = getattr(self, name)
            object.__setattr__(self, name, float(value) if isinstance(value, int | float) else tuple(value))
        if not self.dtype.is_floating_point:
            raise SettingError(f"Normalise cannot give {self.dtype}. Accepted: a floating dtype.")
        spread = (self.std,) if isinstance(self.std, float) else self.std
        if any(value == 0 for value in spread):
            raise SettingError(f"Normalise divides by std={self.std!r}. Accepted: numbers other than 0.")

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        scaled = tensor.to(self.dtype, copy=tensor.dtype == self.dtype)
        return scaled.sub_(self._shaped(self.mean, scaled)).div_(self._shaped(self.std, scaled))

    def _shaped(self, value: float | Sequence[float], like: torch.Tensor) -> torch.Tensor | float:
        if isinstance(value, float):
            return value
        shape = [1] * like.dim()
        shape[self.dim] = len(value)
        if like.shape[self.dim] != len(value):
            raise SettingError(
                f"Normalise has {len(value)} values for dimension {self.dim}, which has {like.shape[self.dim]} in "
                f"batches of shape {tuple(like.shape)}. Give one number, or one for each entry."
            )
        # Made on the device: a copy from pageable memory would make the host wait.
        parts = [torch.full((1,), number, dtype=like.dtype, device=like.device) for number in value]
        return torch.cat(parts).view(shape)


def check_transform(transform: Transform | None, names: Sequence[str]) -> None:
    """Raise SettingError for a transform that cannot fit the fields; no ``names``: only the first batch has them."""
    if transform is None:
        return
    if isinstance(transform, Mapping):
        unknown = [name for name in transform if names and name not in names]
        if unknown:
            raise SettingError(
                f"transform= names {unknown[0]!r}, which is not a field. The fields are: {', '.join(names)}."
            )
    elif not callable(transform):
        raise SettingError(
            f"transform={transform!r} cannot be called. Accepted: a function of a batch, or a dict of them by field."
        )
    elif isinstance(transform, Cast | Normalise) and len(names) > 1:
        raise SettingError(
            f"transform={transform!r} is for one field, and there are {len(names)}: {', '.join(names)}. "
            f"Give a dict, such as {{{names[0]!r}: {transform!r}}}."
        )


def apply(transform: Transform | None, batch: Any, where: str) -> Any:
    """The batch as the user gets it. ``where``: the source of the batch, for errors."""
    if transform is None:
        return batch
    if not isinstance(transform, Mapping):
        return transform(batch)
    if not isinstance(batch, Mapping):
        raise SettingError(
            f"transform= is a dict, but the batches of {where} are {type(batch).__name__}s without names. "
            "Give a function of the batch, or return dicts as items."
        )
    unknown = [name for name in transform if name not in batch]
    if unknown:
        raise SettingError(
            f"transform= names {unknown[0]!r}, which is not a field of {where}. Its fields: {', '.join(batch)}."
        )
    return {name: transform[name](value) if name in transform else value for name, value in batch.items()}
