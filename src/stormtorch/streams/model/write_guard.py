"""Notices writes to weights on the device that leave no trace, as ``self.weight.data.clamp_(-1, 1)`` in a forward does.

A write to a weight in place raises its version, and is refused (calls.py). ``.data`` has a version of its own: such a
write changes the copy on the device, and is lost with it. So the bytes of an entry are added up before and after its
forward. In the first passes this is done for every entry, and the call that has written raises. Later one entry of a
pass is looked at, in turn: a module that begins to write in every step is noticed as many passes later as there are
entries, at the most.

On a GPU the host does not wait for that: what was found is copied beside compute, and looked at when the next pass
begins. On compute's own stream the copy would wait for the copy engine, and compute with it."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch

from ...core.errors import StormError
from ...memory.cuda.answers import Answers
from ...memory.lanes.cuda import wait_for
from ..bridge.torch_private import has_modes, in_functorch
from ..units.partition import Entry
from ..weights.residency import Residence, Stay
from ..weights.stream import ParameterStream

_ALL = 2  # passes in which every entry is looked at


class Sum(NamedTuple):
    """The bytes of one unit's copy on the device, added up."""

    residence: Residence
    stay: Stay
    version: int
    value: torch.Tensor


class _Compared(NamedTuple):
    """Of an entry of a class ``name``: whether its sums differ, there and, once ``done``, here."""

    name: str
    differs: torch.Tensor
    answer: torch.Tensor
    done: torch.cuda.Event | None


class WriteGuard:
    """``before`` and ``after`` enclose the forward of an entry; ``begin_pass`` and ``end_pass`` raise."""

    def __init__(self, entries: list[Entry], parameters: ParameterStream, device: torch.device) -> None:
        self._parameters, self._device = parameters, device
        self._number = {id(entry): number for number, entry in enumerate(entries)}
        self._passes = 0
        self._compared: deque[_Compared] = deque()
        self._beside = (
            Answers(device, 2 * sum(len(entry.units) for entry in entries)) if device.type == "cuda" else None
        )

    def begin_pass(self) -> None:
        """User code calls the model, or a part of it."""
        self._passes += 1
        self._raise_if_changed(wait=False)

    def end_pass(self) -> None:
        """That call is about to return."""
        if self._passes <= _ALL:
            self._raise_if_changed(wait=True)

    def before(self, entry: Entry) -> list[Sum] | None:
        """Sums of the entry's weights; None if it is not its turn, or where user code would see our operations."""
        if self._passes > _ALL and self._number.get(id(entry)) != self._passes % len(self._number):
            return None
        is_capturing = self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if is_capturing or has_modes() or in_functorch():
            return None
        residences = [self._parameters.residences[unit.index] for unit in entry.units]
        # Of a copy with some rows, others may come meanwhile; the code that computes with it is not the user's.
        return [_sum(r) for r in residences if r.stay is not None and r.stay.rows is None]

    def after(self, entry: Entry, sums: list[Sum]) -> None:
        """Compare the sums with those of now."""
        for residence, stay, version, value in sums:
            if residence.stay is not stay or residence.version != version:
                continue  # user code has written the weight in a way that is seen: the forward has a new copy
            differs = _sum(residence).value != value
            answer, done = (differs, None) if self._beside is None else self._beside.copy(differs)
            self._compared.append(_Compared(type(entry.module).__name__, differs, answer, done))

    def _raise_if_changed(self, *, wait: bool) -> None:
        while self._compared:
            first = self._compared[0]
            if first.done is not None:
                if wait:
                    wait_for(first.done)
                elif not first.done.query():
                    return
            self._compared.popleft()
            if bool(first.answer):
                self._compared.clear()
                raise StormError(
                    f"The forward of a {first.name} has changed its parameters on the device, through .data or a "
                    "tensor made from it, and the change is lost. Give that module's name to storm.stream as "
                    "leave=[...]."
                )


def _sum(residence: Residence) -> Sum:
    assert residence.stay is not None
    words = residence.stay.memory
    with torch.inference_mode(False), torch.no_grad():
        value = words[: words.numel() // 8 * 8].view(torch.int64).sum()
    return Sum(residence, residence.stay, residence.version, value)
