"""A second storage over bytes that somebody else owns, which tells when the last tensor of it is gone.

Autograd, checkpointing and user code keep views of a weight for as long as they like. With a storage of its own for
each stay of a unit on the device, "may these bytes be overwritten?" becomes a fact that reference counting knows,
instead of a guess from hooks: as long as any view of that stay lives, they may not."""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from typing import Any

import torch


class _CudaBytes:
    """What ``torch.as_tensor`` needs to know to make a tensor over device memory; the tensor's storage keeps it."""

    def __init__(self, target: torch.Tensor) -> None:
        self.target = target  # keeps the memory
        self.__cuda_array_interface__ = {
            "shape": (target.nbytes,),
            "typestr": "|u1",
            "data": (target.data_ptr(), False),
            "version": 3,
            "strides": None,
            "stream": None,  # ordering is the caller's: no synchronisation here
        }


def alias(target: torch.Tensor, gone: deque[Any]) -> tuple[torch.Tensor, weakref.ref[Any]]:
    """The bytes of the contiguous, non-empty byte tensor ``target`` under a storage of their own, and a reference.

    When the last tensor over that storage is dropped, on whichever thread, the reference is appended to ``gone``, by C
    code that Ctrl-C cannot cut in two. The caller keeps the reference; the storage keeps ``target``'s memory.
    """
    with torch.inference_mode(False):  # or lanes could not write it
        if target.device.type == "cpu":
            pages = (ctypes.c_ubyte * target.nbytes).from_address(target.data_ptr())
            pages.target = target  # type: ignore[attr-defined]
            return torch.frombuffer(pages, dtype=torch.uint8), weakref.ref(pages, gone.append)
        owner = _CudaBytes(target)
        return torch.as_tensor(owner, device=target.device), weakref.ref(owner, gone.append)
