"""What a worker is, whichever way it runs: it takes updates, waits for their gradients, tells when they are done."""

from __future__ import annotations

import abc
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from ..core.errors import SettingError
from . import flag_words
from .update import AdamStep, AdamTensors


@dataclass(frozen=True, slots=True)
class FlagValue:
    """The address of a 32-bit flag word, and the value it must reach.

    Reached means ``(int32)(word - value) >= 0``, the cyclic rule of ``cuStreamWaitValue32`` with GEQ: counters may
    wrap, as long as they are never 2^31 apart.

    ``owner`` is what keeps the word's memory; a worker holds it until the job is over. Without one, the caller must.
    """

    address: int
    value: int
    owner: object = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.address <= 0 or self.address % 4:
            raise SettingError(
                f"address={self.address} is not that of a 32-bit word. Accepted: a positive multiple of 4."
            )

    def reached(self) -> bool:
        return flag_words.has_reached(flag_words.load(self.address), self.value)

    def write(self) -> None:
        """Raises the word to the value; one that is already further stays there."""
        flag_words.store(self.address, self.value)


@dataclass(frozen=True, kw_only=True)
class WorkerStats:
    """Counted since the worker was opened. ``busy_s`` adds up all threads, so its limit is threads × time."""

    busy_s: float
    elements: int
    finished: int
    abandoned: int
    pending: int


def check_job(tensors: AdamTensors, priority: int) -> None:
    """Refuse tensors that the CPU cannot reach, and a priority that the queue, with 32 bits, takes for another one."""
    if tensors.device.type != "cpu":
        raise SettingError(
            f"A worker cannot update tensors on {tensors.device}. Accepted: CPU tensors; adamw_ takes those of a GPU."
        )
    if not isinstance(priority, int) or not -(1 << 31) <= priority < 1 << 31:
        raise SettingError(f"priority={priority!r} is not valid. Accepted: a whole number of 32 bits.")


class Worker(abc.ABC):
    """Updates tensors off the caller's thread, most urgent first.

    A job is *waiting* until its ready flag is reached, then *ready*: it competes by (priority, order of submission),
    lowest first, and one that becomes ready overtakes a less urgent one between two chunks. It is *over* when its
    done flag is written, which happens to every accepted job: after it was finished, or when it was abandoned.

    A job that has begun is always finished. One that has not is abandoned by ``close``, and when its abort flag is
    reached: whether or not its ready flag ever is, so that after an abort ``drain`` ends. Whoever aborts must write
    that flag before it lets ready flags be reached with nothing behind them; then no such gradient is ever used.
    """

    threads: int
    cores: list[int]

    @abc.abstractmethod
    def submit(
        self,
        tensors: AdamTensors,
        step: AdamStep,
        *,
        priority: int = 0,
        ready: FlagValue | None = None,
        done: FlagValue | None = None,
        abort: FlagValue | None = None,
    ) -> int:
        """Queues one update and returns its ticket, counted from 1. Does not block.

        Memory behind the tensors, ``grad_factor`` included, is read once the ready flag was reached, and not before.
        The tensors and the owners of the flags are kept alive until the job is over and a later call on the worker
        notices it. Raises LaneError when the worker is closed, has failed, or belongs to the process this one was
        forked from. Ctrl-C during the call leaves the job either queued or not; the worker stays usable.
        """

    @abc.abstractmethod
    def drain(self, timeout_s: float | None = None) -> bool:
        """Blocks until no job is left; False when the time ran out first. Can be interrupted by Ctrl-C."""

    @abc.abstractmethod
    def stats(self) -> WorkerStats:
        """What was done so far. Stays readable after ``close``."""

    @abc.abstractmethod
    def close(self) -> int:
        """Ends the threads and returns how many jobs were abandoned in all. May be called again.

        Jobs that have not begun are abandoned. Drain first to keep them.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
