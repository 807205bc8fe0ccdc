"""The states of random generators, before a block runs and after it.

Torch's and Python's are restored for a second run. numpy's is only compared: a block that draws from it may not run
again.

A block is short, so reading the states must take microseconds. Python's ``random.getstate`` makes 625 objects, and
numpy's takes longer still. Their generators are the same Mersenne twister, 624 words and a position, so the memory that
holds these is copied instead. numpy tells where it is; that of Python's is checked once against ``getstate``, which is
used where it is elsewhere."""

from __future__ import annotations

import contextlib
import ctypes
import random
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ....core.errors import StaleGraph

_WORDS = 624
_TWISTER_BYTES = 4 * (_WORDS + 1)
_VERSION, _PYTHON = random.getstate()[0], random.getstate.__self__  # type: ignore[attr-defined]  # the global one
_PYTHON_ADDRESS = id(_PYTHON) + object.__basicsize__


class RandomNumbers:
    """States of torch's and Python's generators, from which a second run draws the same numbers."""

    __slots__ = ("_device", "_python", "_torch")

    def __init__(self, device: torch.device) -> None:
        states = [torch.get_rng_state()]
        if device.type == "cuda":
            states.append(torch.cuda.get_rng_state(device))
        self._torch = [state.numpy().tobytes() for state in states]  # faster to compare than tensors
        self._device, self._python = device, _python_state()

    def same(self, other: RandomNumbers) -> bool:
        return self._torch == other._torch and self._python == other._python

    def restore(self) -> None:
        """Set these states, unless they are there."""
        if self.same(RandomNumbers(self._device)):
            return
        host, *others = (torch.frombuffer(bytearray(state), dtype=torch.uint8) for state in self._torch)
        torch.set_rng_state(host)
        for state in others:
            torch.cuda.set_rng_state(state, self._device)
        random.setstate(_as_given(self._python))


def _from_memory() -> tuple[bytes, float | None]:
    return ctypes.string_at(_PYTHON_ADDRESS, _TWISTER_BYTES), _PYTHON.gauss_next


def _as_given(state: Any) -> Any:
    """As ``random.setstate`` takes it."""
    if not isinstance(state[0], bytes):
        return state
    position, *words = struct.unpack(f"=i{_WORDS}I", state[0])
    return _VERSION, (*words, position), state[1]


# The position comes first there, and after the words in what ``getstate`` gives.
_python_state = _from_memory if _as_given(_from_memory()) == random.getstate() else random.getstate


_numpy_seen: list[Any] = [None, 0]  # the generator that was read last, and the address of its state


def numpy_state() -> bytes:
    """The state of numpy's global generator, to compare."""
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if type(generator) is not np.random.MT19937:
        return repr(generator.state).encode()
    if _numpy_seen[0] is not generator:
        _numpy_seen[:] = generator, generator.ctypes.state_address
    return ctypes.string_at(_numpy_seen[1], _TWISTER_BYTES)


@contextlib.contextmanager
def numpy_replayed(before: bytes, after: bytes) -> Iterator[None]:
    """Draw again from the state ``before``, then restore the present one. Raises unless nothing was drawn, or what led
    to the state ``after``. It is not known whether numpy held back a normal number then: it holds none now."""
    state: Any = np.random.get_state(legacy=False)
    refusal = StaleGraph(
        'Cannot recompute a block that draws random numbers from numpy, for the first time. Set activations="offload".'
    )
    if len(before) != _TWISTER_BYTES or state["bit_generator"] != "MT19937":
        raise refusal
    words, position = np.frombuffer(before, np.uint32, _WORDS), int(np.frombuffer(before, np.int32)[-1])
    np.random.set_state({**state, "state": {"key": words, "pos": position}, "has_gauss": 0, "gauss": 0.0})
    try:
        yield
        if numpy_state() not in (before, after):
            raise refusal
    finally:
        np.random.set_state(state)
