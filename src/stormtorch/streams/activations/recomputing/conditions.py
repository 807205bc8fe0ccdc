"""The conditions of a forward, for running it a second time in backward.

A second run comes later, on another thread, and must compute the same as the first one. So everything besides its
arguments that a forward may depend on is noted before it and set again for the second run. STORM does not recompute a
block that draws numpy's random numbers, except where a settled block (recompute.py) begins to draw them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ...bridge.torch_private import backend_flags, default_device, without_torch_function
from .blocks import Anatomy, are_trained
from .contents import Contents
from .random_numbers import RandomNumbers, numpy_replayed, numpy_state

_ATTENTION = ("flash", "mem_efficient", "math", "cudnn")
_BACKENDS: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (torch.get_default_dtype, torch.set_default_dtype),
    *backend_flags(),
    *(
        (getattr(torch.backends.cuda, f"{name}_sdp_enabled"), getattr(torch.backends.cuda, f"enable_{name}_sdp"))
        for name in _ATTENTION
    ),
]  # getters and setters


class Conditions:
    """The conditions at construction, before the block runs."""

    def __init__(
        self, anatomy: Anatomy, entries: Sequence[Any], trained: tuple[bool, ...], device: torch.device
    ) -> None:
        """``entries``: what ``anatomy.look`` has found. ``trained``: which parameters of the block are."""
        self.contents, self._trained, self._device = Contents(anatomy.layout, entries), trained, device
        self.is_hooked = anatomy.is_hooked
        self._random, self._numpy = RandomNumbers(device), numpy_state()
        self._replay: bytes | None = None
        self._default, self._backends = default_device(), [ask() for ask, _ in _BACKENDS]
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in {device.type, "cpu"}
        ]

    def has_drawn(self) -> bool:
        """Whether numbers of numpy's were drawn since. If so, a second run draws them again: it must end in the same
        state, or draw nothing."""
        self._replay = state if (state := numpy_state()) != self._numpy else None
        return self._replay is not None

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Set these conditions for a second run. Afterwards restore the present ones. A run finds most of them as they
        were: each is set, and restored, only where it differs."""
        with torch.enable_grad(), contextlib.ExitStack() as stack:
            if self._default != default_device():
                stack.enter_context(self._default or torch.device("cpu"))
            for kind, enabled, dtype in self._autocast:
                if not enabled and not torch.is_autocast_enabled(kind):
                    continue
                cached = torch.is_autocast_cache_enabled()
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cached))
            # STORM stops this run early, so the block may not reach the code that would restore what it sets.
            stack.callback(self.contents.restore())
            weights = self.contents.weights
            stack.callback(_set_trained, weights, are_trained(weights))
            _set_trained(weights, self._trained)
            stack.callback(_set_backends, [ask() for ask, _ in _BACKENDS])
            _set_backends(self._backends)
            now = RandomNumbers(self._device)
            stack.callback(now.restore)
            if not self._random.same(now):
                self._random.restore()
            if self._replay is not None:
                stack.enter_context(numpy_replayed(self._numpy, self._replay))
            yield


def _set_trained(weights: Sequence[Any], values: tuple[bool, ...]) -> None:
    """Set which parameters require a gradient."""
    with without_torch_function():
        for weight, value in zip(weights, values, strict=True):
            if weight.requires_grad != value:
                weight.requires_grad_(value)


def _set_backends(values: list[Any]) -> None:
    for (ask, put), value in zip(_BACKENDS, values, strict=True):
        if ask() != value:
            put(value)
