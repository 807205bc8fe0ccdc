"""Torch dtypes by the names that files and users write."""

from __future__ import annotations

import contextlib

import numpy as np
import torch

from ...core.errors import SettingError

BY_NAME: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"),
    )
}
INTEGERS = frozenset(name for name in BY_NAME if "int" in name)
_NAMES = {dtype: name for name, dtype in BY_NAME.items()}


def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype in ``BY_NAME``."""
    return _NAMES[dtype]


def parse_dtype(value: object, *, setting: str = "dtype") -> torch.dtype:
    """The torch dtype of a torch or numpy dtype or a name such as "uint16". Accepts little endian only."""
    if isinstance(value, torch.dtype) and value in _NAMES:
        return value
    if isinstance(value, str) and value.removeprefix("torch.") in BY_NAME:
        return BY_NAME[value.removeprefix("torch.")]
    if isinstance(value, np.dtype | type) or (isinstance(value, str) and value[:1] in {"<", "|", "="}):
        with contextlib.suppress(TypeError):  # a name that numpy does not know either
            found = from_numpy(np.dtype(value))
            if found is not None:
                return found
    raise SettingError(f"{setting}={value!r} is not a dtype of rows. Accepted: {', '.join(BY_NAME)}.")


def from_numpy(dtype: np.dtype[np.generic]) -> torch.dtype | None:
    """The equal torch dtype; None if torch has none, or for big endian."""
    return BY_NAME.get(dtype.name) if dtype.kind in "biufc" and dtype.isnative else None
