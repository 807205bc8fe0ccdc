"""The conditions of a forward, for running it a second time in backward.

A second run comes later, on another thread, and must compute the same as the first one. So everything besides its
arguments that a forward may depend on is noted before it and set again for the second run: random numbers of torch and
Python, autocast, the default dtype and device, backend switches, and the attributes and modes of the block's modules.
STORM does not recompute a block that draws numpy's random numbers, except where a settled block (settled.py) begins to
draw them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...bridge.torch_private import backend_flags, default_device, without_torch_function
from .attributes import Attributes
from .blocks import Anatomy
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

    __slots__ = (
        "_anatomy",
        "_attributes",
        "_autocast",
        "_backends",
        "_default",
        "_device",
        "_numpy",
        "_random",
        "_replay",
        "_trained",
    )

    def __init__(self, anatomy: Anatomy, trained: tuple[bool, ...], device: torch.device) -> None:
        """``trained``: for each parameter of the block, whether it requires a gradient."""
        self._anatomy, self._trained, self._device = anatomy, trained, device
        self._attributes = Attributes(anatomy.looks, anatomy.tables)
        self._random = RandomNumbers(device)
        self._numpy, self._default = numpy_state(), default_device()
        self._replay: bytes | None = None
        self._backends = [ask() for ask, _ in _BACKENDS]
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in {device.type, "cpu"}
        ]

    def can_be_set_again(self, *, look_inside: bool) -> bool:
        """Whether a second run would have the same conditions, now that the block has run once. ``look_inside``: see
        contents.py."""
        return self._attributes.contents.unchanged(look_inside=look_inside) and not self.has_drawn()

    def has_drawn(self) -> bool:
        """Whether numbers of numpy's were drawn since."""
        return self._numpy != numpy_state()

    def replay_numpy(self) -> None:
        """Let the second run draw from numpy's first state. It must end in the present state, or draw nothing."""
        self._replay = numpy_state()

    def tensors_changed(self) -> bool:
        """Whether a buffer, or a tensor in an attribute, was changed in place."""
        return self._attributes.contents.tensors_changed()

    def is_hooked(self) -> bool:
        """Whether user code would notice a second run now, or change it."""
        return self._anatomy.is_hooked()

    def written_to(self) -> bool:
        """Whether a tensor of the block was changed in place, and ``again`` does not undo that."""
        return self._attributes.contents.written_to()

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
            stack.callback(self._attributes.restore())
            # STORM stops this run early, so the block may not reach the code that would restore these.
            trained, backends = self._anatomy.trained(), [ask() for ask, _ in _BACKENDS]
            stack.callback(self._set_trained, trained)
            if trained != self._trained:
                self._set_trained(self._trained)
            stack.callback(_set_backends, backends)
            if backends != self._backends:
                _set_backends(self._backends)
            now = RandomNumbers(self._device)
            if not self._random.same(now):
                stack.callback(now.restore)
                self._random.restore()
            elif self._anatomy.may_draw():
                stack.callback(self._restore_random, now)
            if self._replay is not None:
                stack.enter_context(numpy_replayed(self._numpy, self._replay))
            yield

    def _restore_random(self, before: RandomNumbers) -> None:
        """Undo that the second run has drawn random numbers."""
        if not before.same(RandomNumbers(self._device)):
            self._anatomy.draws = True
            before.restore()

    def _set_trained(self, trained: tuple[bool, ...]) -> None:
        """Set which parameters are trained."""
        if self._anatomy.trained() == trained:
            return
        with without_torch_function():
            for parameter, is_trained in zip(self._anatomy.parameters(), trained, strict=True):
                if parameter is not None and parameter.requires_grad != is_trained:
                    parameter.requires_grad_(is_trained)


def _set_backends(values: list[Any]) -> None:
    if [ask() for ask, _ in _BACKENDS] == values:
        return
    for (ask, put), value in zip(_BACKENDS, values, strict=True):
        if ask() != value:
            put(value)
