"""Memory that a file can be read into or written from."""

from __future__ import annotations

import mmap
from typing import Any, TypeAlias

import numpy as np
import torch

from ...core.errors import SettingError

Buffer: TypeAlias = "torch.Tensor | np.ndarray[Any, Any] | bytes | bytearray | memoryview | mmap.mmap"


def bytes_of(buffer: Buffer, *, writable: bool = False) -> memoryview:
    """The bytes of ``buffer``, without a copy. The view keeps its memory alive."""
    if isinstance(buffer, torch.Tensor):
        if buffer.device.type != "cpu":
            raise SettingError(
                f"A file needs a buffer in host memory, not on {buffer.device}. Copy it to the CPU first."
            )
        if buffer.layout is not torch.strided or not buffer.is_contiguous() or buffer.is_conj() or buffer.is_neg():
            raise SettingError("A file needs a contiguous buffer, not a strided or lazy view. Use .contiguous().")
        return buffer.detach().reshape(-1).view(torch.uint8).numpy().data
    if isinstance(buffer, np.ndarray):
        if buffer.dtype.hasobject:
            raise SettingError("A file needs numbers; this array holds Python objects. Convert it first.")
        view = buffer.data if not buffer.flags.c_contiguous else buffer.reshape(-1).view(np.uint8).data
    else:
        view = memoryview(buffer)
    if not view.c_contiguous:
        raise SettingError("A file needs a contiguous buffer in C order, this one is not. Copy it first.")
    if writable and view.readonly:
        raise SettingError("A read needs a writable buffer, this one is read-only. Use a tensor or a bytearray.")
    return view.cast("B") if view.nbytes else memoryview(bytearray())  # cast refuses shapes with a zero in them
