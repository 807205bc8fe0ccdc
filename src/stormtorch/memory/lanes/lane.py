"""One lane: an ordered queue of work beside compute, and the events that tie lanes together. See lanes/build.py."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable

import torch

from ...core.errors import SettingError
from ...core.tags import Tag
from .flags import Flag

Delay = Callable[[], None]
"""Called inside a lane before each piece of its work; tests sleep in it, on the thread or on the stream."""


class Event(ABC):
    """A point in a lane's order."""

    @abstractmethod
    def done(self) -> bool:
        """Whether all work before the point has finished. Does not block."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the calling thread until ``done``. Raises LaneError if that work failed."""


class Lane(ABC):
    """An ordered queue. All methods return at once unless they say otherwise; tensors must stay alive until the work is
    done."""

    name: str

    @abstractmethod
    def copy(self, target: torch.Tensor, source: torch.Tensor, tag: Tag, unit: int | None = None) -> None:
        """Copy between contiguous tensors of the same dtype and number of elements; ``unit``: whose, for events."""

    @abstractmethod
    def fill(self, target: torch.Tensor, byte: int) -> None:
        """Set every byte of a contiguous ``target``; 0xFF makes NaN in every floating dtype."""

    @abstractmethod
    def record(self) -> Event:
        """The point after everything queued so far."""

    def place(self) -> Hashable:
        """Where work queued now would run, for ``record_at``: on a GPU, compute is the current stream."""
        return None

    def record_at(self, place: Hashable) -> Event:  # noqa: ARG002
        """The point after everything queued so far at ``place``."""
        return self.record()

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Hold back all later work of this lane until ``event``."""

    @abstractmethod
    def write_flag(self, flag: Flag, value: int) -> None:
        """Store ``value`` in ``flag`` once everything queued so far is done and visible to the CPU."""

    @abstractmethod
    def wait_flag(self, flag: Flag, value: int) -> None:
        """Hold back all later work of this lane until ``flag`` has reached ``value``."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block until the lane is empty; raises LaneError if any of its work failed."""

    def emit(self) -> None:  # noqa: B027  (most lanes tell at once)
        """Tell the sink of all work that is over. Without this call it is told some time later."""

    @abstractmethod
    def close(self) -> None:
        """Finish queued work, then end the lane. Safe to call twice; does not raise for work that failed."""


def check_copy(target: torch.Tensor, source: torch.Tensor) -> int:
    """Raise for tensors that a lane cannot copy; returns the bytes. Casts and strides are compute, not transport."""
    if target.dtype != source.dtype:
        raise SettingError(f"A lane does not cast: the target is {target.dtype}, the source {source.dtype}.")
    if target.numel() != source.numel():
        raise SettingError(f"A lane cannot copy {source.numel()} elements into {target.numel()}.")
    for tensor in (target, source):
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            raise SettingError("A lane copies contiguous memory, not strided or lazy views. Use .contiguous().")
    return source.nbytes


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous ``tensor``, flat."""
    return tensor.detach().reshape(-1).view(torch.uint8)
