"""Patches the user's optimizer object, and undoes that: ``step``, ``zero_grad``, and hooks of state dicts.

``step`` and ``zero_grad`` are set on the instance, as bound methods: a scheduler that was built before has done the
same, and one that is built later will wrap the methods that it finds. They call the functions that stream.py gives;
after `end` they call the previous methods. torch's own wrapper stands around a step: it calls hooks and makes the range
in a profile."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..bridge.torch_private import INSIDE_OF_WRAPPERS

PUT_ON = ("step", "zero_grad", "_step_supports_amp_scaling")  # attributes that the patch sets on the instance
_HOOKS_AROUND = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__


def without_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """The function inside torch's wrapper, which calls hooks. A user's step made with ``functools.wraps`` has
    ``hooked`` and ``__wrapped__`` too, but its own code must run."""
    return step.__wrapped__ if has_hooks_around(step) else step  # type: ignore[attr-defined]


def has_hooks_around(step: Callable[..., Any]) -> bool:
    return getattr(step, "__code__", None) is _HOOKS_AROUND


def users_own(optimizer: torch.optim.Optimizer, name: str) -> Callable[..., Any] | None:
    """The method that user code has set on the instance, with later wrappers around it; None if it is the class's."""
    found = vars(optimizer).get(name)
    inner = found
    while inner is not None:
        inner = getattr(inner, "__func__", inner)
        ours = getattr(inner, "_takeover", None)  # functools.wraps copies it to foreign functions too
        if isinstance(ours, Takeover) and inner in ours.methods:
            inner = ours.previous.get(name)
            continue
        inside = INSIDE_OF_WRAPPERS.get(getattr(inner, "__globals__", {}).get("__name__", ""))
        if inside is None:
            return None if inner is getattr(type(optimizer), name) else found
        inner = getattr(inner, inside, None)
    return None


class Takeover:
    """The user's optimizer object, whose calls are redirected from `begin` to `end`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        step: Callable[[Callable[[], Any] | None], Any],
        zero_grad: Callable[..., None],
        hooks: Mapping[str, Callable[..., Any]],
    ) -> None:
        """``hooks``: by what torch's ``register_..._hook`` calls them; they get what torch gives, but the optimizer."""
        self._optimizer, self._zero_grad, self._to_hook = optimizer, zero_grad, hooks

        def hooked(_optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            return step(closure)

        calls_hooks = users_own(optimizer, "step") is None and has_hooks_around(type(optimizer).step)
        self._hooked_step = torch.optim.Optimizer.profile_hook_step(hooked) if calls_hooks else hooked
        self.previous = {name: vars(optimizer)[name] for name in PUT_ON if name in vars(optimizer)}
        self._hooks: list[Any] = []
        self.methods: list[Callable[..., Any]] = []
        self.ended = False

    def begin(self) -> None:
        """Install the patch. If this fails half-way, `end` removes what is there."""
        optimizer = self._optimizer
        target: Any = optimizer
        target.step = types.MethodType(self._method("step", self._step_with_hooks), optimizer)
        target.zero_grad = types.MethodType(self._method("zero_grad", self._zero_grad), optimizer)
        target._step_supports_amp_scaling = False  # a GradScaler then unscales the gradients itself
        for name, hook in self._to_hook.items():
            register = getattr(optimizer, f"register_{name}_hook")
            self._hooks.append(register(functools.partial(self._call, hook)))

    def end(self) -> None:
        """Restore the object, except for wrappers that other code has put on it since. Works once."""
        self.ended = True
        for hook in self._hooks:
            hook.remove()
        for name in PUT_ON:
            value = vars(self._optimizer).get(name)
            if name != "_step_supports_amp_scaling" and getattr(value, "__func__", None) not in self.methods:
                continue  # a foreign wrapper remains, and calls the previous method
            if name in self.previous:
                setattr(self._optimizer, name, self.previous[name])
            elif name in vars(self._optimizer):
                delattr(self._optimizer, name)

    def _method(self, name: str, ours: Callable[..., Any]) -> Callable[..., Any]:
        def method(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            if self.ended:
                before = self.previous.get(name) or types.MethodType(getattr(type(optimizer), name), optimizer)
                return before(*args, **kwargs)
            return ours(*args, **kwargs)

        method = torch.compiler.disable(method)  # it queues and waits; there is nothing to compile
        method.__name__ = name
        if hasattr(vars(self._optimizer).get(name), "_wrapped_by_lr_sched"):
            method._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # or the scheduler warns of a foreign step
        method.__doc__ = getattr(type(self._optimizer), name).__doc__
        method._takeover = self  # type: ignore[attr-defined]
        self.methods.append(method)
        return method

    def _step_with_hooks(self, *args: Any, **kwargs: Any) -> Any:
        optimizer: Any = self._optimizer
        optimizer._opt_called = True  # a scheduler that was built before checks this
        return self._hooked_step(optimizer, *args, **kwargs)

    def _call(self, hook: Callable[..., Any], _optimizer: torch.optim.Optimizer, *given: Any) -> Any:
        return None if self.ended else hook(*given)
