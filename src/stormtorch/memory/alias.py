"""A second storage over bytes that somebody else owns, which tells when the last tensor of it is gone.

Autograd, checkpointing and user code keep views of a weight for as long as they like. With a storage of its own for
each stay of a unit on the device, "may these bytes be overwritten?" becomes a fact that reference counting knows,
instead of a guess from hooks: as long as any view of that stay lives, they may not."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable

import torch


class _CudaBytes:
    """What ``torch.as_tensor`` needs to know to make a tensor over device memory; the tensor's storage keeps it."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
            "stream": None,  # ordering is the caller's: no synchronisation here
        }


def alias(target: torch.Tensor, when_gone: Callable[[], None]) -> torch.Tensor:
    """The bytes of the contiguous, non-empty byte tensor ``target`` under a storage of their own.

    ``when_gone`` is called when the last tensor over that storage is dropped, on whichever thread dropped it. The
    caller keeps ``target``'s memory until then."""
    address, size = target.data_ptr(), target.nbytes
    with torch.inference_mode(False):  # or lanes could not write it
        if target.device.type == "cpu":
            pages = (ctypes.c_ubyte * size).from_address(address)
            weakref.finalize(pages, when_gone).atexit = False
            return torch.frombuffer(pages, dtype=torch.uint8)
        owner = _CudaBytes(address, size)
        weakref.finalize(owner, when_gone).atexit = False
        return torch.as_tensor(owner, device=target.device)
