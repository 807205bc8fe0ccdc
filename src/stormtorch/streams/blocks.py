"""What can be known of a block and of what it is given, to judge whether it may be run a second time."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from .torch_private import has_global_hooks, without_torch_function


def shape_of(block: nn.Module) -> Any:
    """Blocks of one shape do the same work, in the same manner."""
    with without_torch_function():
        return type(block), tuple((name, tuple(p.shape), p.dtype) for name, p in block.named_parameters())


def identities_of(block: nn.Module) -> list[int]:
    return [id(parameter) for parameter in block.parameters()]


def manner_of(block: nn.Module) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """What may change from one call to the next: which modules are training, which parameters are trained."""
    with without_torch_function():
        trained = tuple(parameter.requires_grad for parameter in block.parameters())
    return tuple(module.training for module in block.modules()), trained


@contextlib.contextmanager
def in_manner(block: nn.Module, manner: tuple[tuple[bool, ...], tuple[bool, ...]]) -> Iterator[None]:
    """The block as it was then: else it would save other tensors than it did."""
    changed: list[tuple[Any, str, bool]] = []
    try:
        with without_torch_function():
            for owners, name, values in (
                (block.modules(), "training", manner[0]),
                (block.parameters(), "requires_grad", manner[1]),
            ):
                for owner, value in zip(owners, values, strict=True):
                    if getattr(owner, name) != value:
                        changed.append((owner, name, not value))
                        setattr(owner, name, value)
        yield
    finally:
        with without_torch_function():
            for owner, name, value in changed:
                setattr(owner, name, value)


def state_of(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a block that may be run twice leaves as it is: buffers, arguments, random numbers that are not torch's."""
    seen = [*block.buffers(), *tensors_in(args, kwargs)]
    versions = [(id(tensor), tensor._version) for tensor in seen if not tensor.is_inference()]
    return versions, random.getstate(), repr(np.random.get_state(legacy=True))


def attributes_of(block: nn.Module) -> Iterator[torch.Tensor]:
    """Tensors that its modules keep as attributes, or in a list or dict that is one; parameters and buffers are among
    them."""
    for module in block.modules():
        for value in vars(module).values():
            inside = (
                value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
            )
            yield from (item for item in inside if isinstance(item, torch.Tensor))


def is_listened_to(block: nn.Module) -> bool:
    """Whether user code would notice a second run; TorchScript does, which checkpointing's exceptions do not pass."""
    return has_global_hooks() or any(
        module._forward_hooks or module._forward_pre_hooks or isinstance(module, torch.jit.ScriptModule)
        for module in block.modules()
    )


def is_compiled(block: nn.Module) -> bool:
    return any(module._compiled_call_impl is not None or hasattr(module, "_orig_mod") for module in block.modules())


def is_plain(value: Any) -> bool:
    """Whether there are only values in it, no object that a second run would change again: a cache of keys, a list."""
    plain = (torch.Tensor, int, float, bool, str, bytes, complex, torch.dtype, torch.device, type(None))
    return all(isinstance(leaf, plain) for leaf in leaves_of(value))


def leaves_of(value: Any) -> list[Any]:
    """What is in tuples. Not in other objects, which are handed on as they are: the block may change them."""
    if type(value) is tuple:
        return [leaf for item in value for leaf in leaves_of(item)]
    return [value]


def tensors_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    return [leaf for leaf in leaves_of((*args, *kwargs.values())) if isinstance(leaf, torch.Tensor)]


def filled(form: Any, leaves: Iterator[Any]) -> Any:
    """``form`` with other leaves."""
    if type(form) is tuple:
        return tuple(filled(item, leaves) for item in form)
    return next(leaves)
