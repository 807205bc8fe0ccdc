"""A second storage over bytes of another owner, which reports when its last tensor is gone.

Autograd, checkpointing and user code keep views of a weight for as long as they like. With a storage of its own for
each device copy of a unit, reference counting answers "may these bytes be overwritten?", which hooks could only guess:
as long as any view of that copy lives, they may not."""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from typing import Any

import torch


class _CudaBytes:
    """Lets ``torch.as_tensor`` make a tensor over device memory; the tensor's storage keeps it."""

    def __init__(self, target: torch.Tensor) -> None:
        self.target = target  # keeps the memory
        self.__cuda_array_interface__ = {
            "shape": (target.nbytes,),
            "typestr": "|u1",
            "data": (target.data_ptr(), False),
            "version": 3,
            "strides": None,
            "stream": None,  # the caller orders the work: no synchronisation here
        }


def alias(target: torch.Tensor, gone: deque[Any]) -> tuple[torch.Tensor, weakref.ref[Any]]:
    """The bytes of the contiguous, non-empty byte tensor ``target`` under a storage of their own, and a reference.

    When the last tensor over that storage is dropped, on any thread, the reference is appended to ``gone``, by C code
    that Ctrl-C cannot interrupt. The caller keeps the reference; the storage keeps ``target``'s memory."""
    with torch.inference_mode(False):  # else lanes could not write it
        if target.device.type == "cpu":
            pages = (ctypes.c_ubyte * target.nbytes).from_address(target.data_ptr())
            pages.target = target  # type: ignore[attr-defined]
            return torch.frombuffer(pages, dtype=torch.uint8), weakref.ref(pages, gone.append)
        owner = _CudaBytes(target)
        return torch.as_tensor(owner, device=target.device), weakref.ref(owner, gone.append)
