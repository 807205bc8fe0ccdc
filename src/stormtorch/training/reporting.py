"""Reports of a run to its user: its plan, its progress and pace, and the resources that it used."""

from __future__ import annotations

import contextlib
import re
import resource
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import nn

from ..core.budget import Budget
from ..core.sizes import format_bytes
from ..core.tags import Tier
from ..session.api import Session
from .settings.train_settings import TrainSettings, warmup_steps

_FIRST = 5  # slower steps: torch allocates memory and chooses kernels


@dataclass(frozen=True, kw_only=True)
class Status:
    """The progress of a run. ``loss``: of the last step whose result has arrived."""

    step: int
    total: int
    loss: float | None
    tokens_per_s: float | None
    left_s: float | None
    vram_bytes: int
    vram_limit_bytes: int
    ram_bytes: int
    ram_limit_bytes: int
    on_gpu: bool = True  # the CPU device has no VRAM


class Watcher(Protocol):
    """The observer of a run: the command line shows its events on a terminal, tests collect them."""

    def say(self, line: str) -> None:
        """Show a line to the user."""

    def warn(self, line: str) -> None:
        """Report an error that does not end the run."""

    def reading(self, total_bytes: int) -> Callable[[int], None]:
        """Called before text of that many bytes is read; returns a function to call with the bytes of each piece."""

    def show(self, status: Status) -> None:
        """Called after every step; ``log`` is called for those that deserve a line."""

    def log(self, status: Status) -> None:
        """Called for a step whose numbers were written to the metrics."""


def describe_model(model: nn.Module, origin: str) -> str:
    parameters = list(model.parameters())
    count = sum(parameter.numel() for parameter in parameters)
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    size = sum(parameter.nbytes for parameter in parameters)
    dtypes = ", ".join(sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters}))
    share = "all of them trained" if trained == count else f"{trained:,} of them trained"
    return (
        f"model      {type(model).__name__}: {count:,} parameters, {share}; {format_bytes(size)} ({dtypes}), {origin}"
    )


def describe_schedule(settings: TrainSettings, total: int, rows: int) -> str:
    batch = settings.batch * settings.accumulate
    passes = total * batch / rows
    warmup = warmup_steps(settings, total)
    clipped = f"clipped at {settings.clip:g}" if settings.clip else "not clipped"
    return (
        f"schedule   {_counted(total, 'step')} of {_counted(batch, 'row')} ({batch * settings.sequence:,} tokens), "
        f"{passes:.2f} passes over the data; lr {settings.lr:g}, {settings.schedule}, "
        f"{_counted(warmup, 'step')} of warm-up; {settings.optimizer}, {clipped}"
    )


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def describe_placement(session: Session) -> list[str]:
    """Each tier with its budget and its present use."""
    ledger, plan = session.ledger, session.plan
    device = _limit(ledger.budgets[Tier.DEVICE])
    if session.device.type == "cpu":  # a part of the RAM, without room for a driver
        budget = ledger.budgets[Tier.DEVICE]
        device = f"whose memory is RAM too, at most {format_bytes(budget.limit_bytes)} of it ({budget.given})"
    balances = [line for line in ledger.balances() if line.tier is Tier.HOST and line.used_bytes]
    used = [f"{line.tag.value} {format_bytes(line.used_bytes)}" for line in balances]
    lines = [
        f"device     {session.device}, {device}: {format_bytes(plan.pool.pool_bytes)} for streamed weights and "
        f"gradients ({plan.pool.reason})",
        f"RAM        {_limit(ledger.budgets[Tier.HOST])}: {', '.join(used)}",
    ]
    if plan.disk is not None:
        lines.append(f"disk       {plan.disk}")
    if plan.activations.mode != "keep":
        lines.append(f"activations {plan.activations.reason}")
    return lines


def _limit(budget: Budget) -> str:
    because = f", {budget.reason}" if budget.reason else ""
    return f"at most {format_bytes(budget.limit_bytes)} ({budget.given}{because})"


class Pace:
    """Measures the time of steps, without the pauses between them."""

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter, window: int = 50) -> None:
        self._clock = clock
        self._paused_s = 0.0
        self._ends: deque[float] = deque([clock()], maxlen=window + 1)
        self._steady_s = 0.0  # when the last of the first steps ended
        self.steps = 0

    def step_ended(self) -> None:
        self._ends.append(self._clock() - self._paused_s)
        self.steps += 1
        if self.steps == _FIRST:
            self._steady_s = self._ends[-1]

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude the block from the pace: evaluation, samples, saving."""
        began = self._clock()
        try:
            yield
        finally:
            self._paused_s += self._clock() - began

    @property
    def step_s(self) -> float | None:
        """Seconds per step, over the last steps; None before the first."""
        return (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1) if len(self._ends) > 1 else None

    @property
    def mean_step_s(self) -> float | None:
        """Seconds per step, over all but the first steps; None before those."""
        return (self._ends[-1] - self._steady_s) / (self.steps - _FIRST) if self.steps > _FIRST else None


class Spent(NamedTuple):
    """The time and bytes of reading or writing."""

    seconds: float
    size_bytes: int

    def __str__(self) -> str:
        return f"{self.seconds:.1f} s ({format_bytes(self.size_bytes)})"


def describe_usage(spent: Mapping[str, Sequence[Spent]]) -> str:
    """The peak of RAM, and the cost of loading, resuming and saving."""
    parts = [f"{kind} {spent[kind][-1]}" for kind in ("load", "resume") if kind in spent]
    if "save" in spent:
        parts.append(f"last of {len(spent['save'])} saves {spent['save'][-1]}")
    times = "; ".join(parts) or "nothing was loaded or saved"
    return f"process: peak RAM {format_bytes(_peak_rss_bytes())}; {times}"


def peaks(session: Session) -> dict[str, int]:
    """The peak memory of this process: RAM and device."""
    device = session.device
    held = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return {
        "peak_rss_bytes": _peak_rss_bytes(),
        "peak_vram_bytes": max(session.ledger.peak_bytes(Tier.DEVICE), held),
    }


def _peak_rss_bytes() -> int:
    """VmHWM, which includes mapped pages of files; where there is none, `getrusage`, which includes our parent."""
    found = re.search(r"^VmHWM:\s+(\d+)", Path("/proc/self/status").read_text(errors="replace"), re.MULTILINE)
    return (int(found[1]) if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024
