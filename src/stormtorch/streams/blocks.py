"""What can be known of a block and of what it is given, to judge whether it may be run a second time."""

from __future__ import annotations

import contextlib
import random
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from .torch_private import backend_flags, has_global_hooks, without_torch_function


def shape_of(block: nn.Module) -> Any:
    """Blocks of one shape do the same work, in the same manner."""
    with without_torch_function():
        tensors = (*block.named_parameters(), *block.named_buffers())
        modules = tuple((name, type(module)) for name, module in block.named_modules())
        return modules, tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors)


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


_ATTENTION = ("flash", "mem_efficient", "math", "cudnn")
_BACKENDS: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (torch.get_default_dtype, torch.set_default_dtype),
    *backend_flags(),
    *(
        (getattr(torch.backends.cuda, f"{name}_sdp_enabled"), getattr(torch.backends.cuda, f"enable_{name}_sdp"))
        for name in _ATTENTION
    ),
]  # how to ask, and how to set


class Surroundings:
    """What user code may set for the time of a forward, and kernels or new tensors depend on; and Python's random
    numbers. As they are when this is made. (numpy's take as long to note as three operations; see `state_of`.)"""

    def __init__(self) -> None:
        self._device, self._random = torch.get_default_device(), random.getstate()
        self._backends = [ask() for ask, _ in _BACKENDS]

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """For a second run, which comes when that time is over, and in a thread of its own."""
        now = Surroundings()
        with contextlib.ExitStack() as stack:
            if self._device != now._device:
                stack.enter_context(self._device)
            stack.callback(now._set_after, self)
            self._set_after(now)
            yield

    def _set_after(self, other: Surroundings) -> None:
        for (_, put), value, is_there in zip(_BACKENDS, self._backends, other._backends, strict=True):
            if value != is_there:
                put(value)
        random.setstate(self._random)


@contextlib.contextmanager
def leaving_nothing(block: nn.Module) -> Iterator[None]:
    """Tensors that a second run leaves as attributes, an auxiliary loss say, give way to those of the first: else the
    second one's graph, which nobody runs, would stay with them."""
    before = [(module, _own_tensors(module)) for module in block.modules()]
    try:
        yield
    finally:
        for module, tensors in before:
            vars(module).update(tensors)


def _own_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor) and name not in module._parameters  # twins come and go by themselves
    }


class Untouched:
    """Tensors that should be as they are when this is made."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        seen = [tensor for tensor in tensors if not tensor.is_inference()]
        self._seen = [(weakref.ref(tensor), tensor._version) for tensor in seen]

    def __bool__(self) -> bool:
        return not any((tensor := seen()) is not None and tensor._version != version for seen, version in self._seen)


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
