"""The report of a session: events give the data, the data gives the text. Decisions and the ledger's balances are added
as they are."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ..core.events import What
from ..core.plan import Plan
from ..core.sizes import format_bytes
from ..core.tags import Tag, Tier
from ..memory.books.ledger import Balance, Ledger
from .recorder import Mark, Totals

_INWARDS = ("load", "files", "aside")  # lanes towards the device
_NOTABLE = 0.05  # of the time


@dataclass(frozen=True, kw_only=True)
class GpuTime:
    """Shares of the last steps' time: kernels run, the GPU waits for the host, or compute waits for a lane."""

    busy: float
    waits_for_host: float
    waits_for_lanes: float

    def __str__(self) -> str:
        return (
            f"busy {self.busy:.0%}, waits for the host {self.waits_for_host:.0%}, "
            f"waits for lanes {self.waits_for_lanes:.0%}"
        )


def gpu_time(marks: Sequence[Mark]) -> GpuTime | None:
    """How the GPU has spent the time between the first mark and the last."""
    if len(marks) < 2 or marks[-1].looked_s == marks[0].looked_s:
        return None
    first, last = marks[0], marks[-1]
    idle = (last.idle_s - first.idle_s) / (last.looked_s - first.looked_s)
    lanes = min(1 - idle, (last.waited_s - first.waited_s) / (last.at_s - first.at_s))
    return GpuTime(busy=1 - idle - lanes, waits_for_host=idle, waits_for_lanes=lanes)


@dataclass(frozen=True, kw_only=True)
class DiskTraffic:
    """What a step reads and writes on disk, how long that takes, and how much of that time compute waits for."""

    read_bytes: float
    written_bytes: float
    busy_s: float
    exposed_s: float

    @property
    def hidden(self) -> float:
        """The share of the time in which compute does not wait for it."""
        return 1 - min(1.0, self.exposed_s / self.busy_s) if self.busy_s else 1.0

    def __str__(self) -> str:
        return (
            f"read {format_bytes(int(self.read_bytes))}, written {format_bytes(int(self.written_bytes))} per step, "
            f"busy {self.busy_s:.4f} s, {self.hidden:.0%} of it hidden"
            + (f"; {self.written_bytes / 1e9:.3g} TB written per 1,000 steps" if self.written_bytes else "")
        )


@dataclass(frozen=True, kw_only=True)
class Report:
    """Measured since the session began; ``str`` gives the table. Per-step figures are means, ``step_s`` is a median."""

    steps: int
    step_s: float | None
    samples_per_s: float | None
    tokens_per_s: float | None
    setup_s: float
    units: int
    loads: int
    misses: int
    bytes_in_per_step: dict[str, float]
    bytes_out_per_step: dict[str, float]
    waits_s_per_step: dict[str, float]
    disk: DiskTraffic | None  # None: nothing lies there
    gpu: GpuTime | None  # None if the GPU cannot be checked, and on the CPU
    limits_s: dict[str, float]  # the least time of a step, by what would set it: compute, in, out, cpu, disk, host
    limited_by: str | None
    percent_of_limit: float | None
    balances: list[Balance]
    device_peak_bytes: int
    host_peak_bytes: int
    pinned_bytes: int
    pool_bytes: int
    plan: Plan

    def __str__(self) -> str:
        lines = [
            f"steps {self.steps}, "
            + (f"{self.step_s:.4f} s each (median)" if self.step_s else "not timed yet")
            + (f", {self.tokens_per_s:,.0f} tokens/s" if self.tokens_per_s else "")
            + (f", {self.samples_per_s:,.1f} samples/s" if self.samples_per_s else "")
            + f"; set-up {self.setup_s:.2f} s",
            f"units {self.units}, loaded {self.loads} times, {self.misses} of them not prefetched",
        ]
        for title, table in (("in", self.bytes_in_per_step), ("out", self.bytes_out_per_step)):
            parts = ", ".join(f"{name} {format_bytes(int(size))}" for name, size in table.items())
            lines.append(f"{title:<4}per step: {parts or 'nothing'}")
        if self.disk is not None:
            lines.append(f"disk: {self.disk}")
        if self.limited_by:
            limits = ", ".join(f"{name} {seconds:.4f} s" for name, seconds in self.limits_s.items())
            lines.append(
                f"a step needs at least: {limits}; limited by {self.limited_by}, {self.percent_of_limit:.0f} % reached"
            )
        if self.gpu is not None:
            lines.append(f"GPU: {self.gpu}")
        waits = ", ".join(f"{cause} {seconds:.4f} s" for cause, seconds in self.waits_s_per_step.items())
        lines.append(f"compute waited per step: {waits or 'nothing measured'}")
        lines.append(f"pool {format_bytes(self.pool_bytes)} on the device: {self.plan.pool.reason}")
        if self.plan.optimizer is not None:
            lines.append(f"optimizer: {self.plan.optimizer.reason}")
        if self.plan.activations.mode != "keep":
            lines.append(f"activations: {self.plan.activations.reason}")
        lines.append(
            f"peaks: device {format_bytes(self.device_peak_bytes)}, host {format_bytes(self.host_peak_bytes)}, "
            f"page-locked {format_bytes(self.pinned_bytes)}"
        )
        lines += [
            f"  {b.tier.value:<7}{b.tag.value:<12}"
            f" now {format_bytes(b.used_bytes):>11}  peak {format_bytes(b.peak_bytes):>11}"
            for b in self.balances
        ]
        return "\n".join(lines)


def make_report(
    totals: Totals, *, ledger: Ledger, plan: Plan, samples_per_step: int | None, tokens_per_step: int | None
) -> Report:
    ends = totals.step_ends_s
    spans = [b - a for a, b in itertools.pairwise(ends)]
    step_s = statistics.median(spans[1:] or spans) if spans else None
    steps = max(len(ends), 1)

    waits = {cause: seconds / steps for cause, seconds in totals.waits_s.items()}
    limits = {
        "compute": max(0.0, (step_s or 0.0) - sum(waits.values())),  # its time without waits
        "in": sum(seconds for (name, _), seconds in totals.busy_s.items() if name in _INWARDS) / steps,
        "out": sum(seconds for (name, _), seconds in totals.busy_s.items() if name == "store") / steps,
        "cpu": totals.seconds.get(What.UPDATE, 0.0) / steps,
    }
    disk = _disk_traffic(totals, steps, waits)
    if disk is not None:
        limits["disk"] = disk.busy_s
    gpu = gpu_time(list(totals.marks)[1:])  # the first step is cold
    if gpu is not None and step_s:
        limits["compute"] = gpu.busy * step_s
        if gpu.waits_for_host > max(_NOTABLE, gpu.waits_for_lanes):
            limits["host"] = step_s  # it launches all the time, and the GPU runs out of work
    limited_by = max(limits, key=lambda name: limits[name]) if step_s else None
    return Report(
        gpu=gpu,
        disk=disk,
        steps=len(ends),
        step_s=step_s,
        samples_per_s=samples_per_step / step_s if samples_per_step and step_s else None,
        tokens_per_s=tokens_per_step / step_s if tokens_per_step and step_s else None,
        setup_s=totals.seconds.get(What.SETUP, 0.0),
        units=len(plan.units),
        loads=totals.times.get(What.LOAD, 0),
        misses=totals.times.get(What.MISS, 0),
        bytes_in_per_step=_per_step(totals, steps, *_INWARDS),
        bytes_out_per_step=_per_step(totals, steps, "store"),
        waits_s_per_step=waits,
        limits_s=limits,
        limited_by=limited_by,
        percent_of_limit=100 * min(1.0, limits[limited_by] / step_s) if limited_by and step_s else None,
        balances=ledger.balances(),
        device_peak_bytes=ledger.peak_bytes(Tier.DEVICE),
        host_peak_bytes=ledger.peak_bytes(Tier.HOST),
        pinned_bytes=ledger.pinned_bytes,
        pool_bytes=totals.pool_bytes,
        plan=plan,
    )


def _disk_traffic(totals: Totals, steps: int, waits: dict[str, float]) -> DiskTraffic | None:
    read, written = (sum(_per_step(totals, steps, what.value).values()) for what in (What.READ, What.WRITE))
    busy_s = sum(seconds for (name, _), seconds in totals.busy_s.items() if name == What.READ.value) / steps
    if not read and not written:
        return None
    causes = ["updates", *(["weights"] if (What.READ.value, Tag.PARAMETERS) in totals.bytes else [])]
    exposed_s = sum(waits.get(cause, 0.0) for cause in causes)
    return DiskTraffic(read_bytes=read, written_bytes=written, busy_s=busy_s, exposed_s=exposed_s)


@dataclass(frozen=True, kw_only=True)
class ActivationReport:
    """Treatment of activations in all passes so far; ``str`` gives the text."""

    steps: int
    bytes_in_per_step: dict[str, float]
    bytes_out_per_step: dict[str, float]
    waits_s_per_step: dict[str, float]
    pinned_bytes: int
    reason: str

    def __str__(self) -> str:
        moved = (sum(table.values()) for table in (self.bytes_out_per_step, self.bytes_in_per_step))
        out, back = (format_bytes(int(size)) for size in moved)
        waits = ", ".join(f"{cause} {seconds:.4f} s" for cause, seconds in self.waits_s_per_step.items())
        return (
            f"passes {self.steps}; out {out}, in {back} each; {format_bytes(self.pinned_bytes)} page-locked\n"
            f"activations: {self.reason}\ncompute waited each: {waits or 'nothing measured'}"
        )


def make_activation_report(totals: Totals, *, passes: int, ledger: Ledger, reason: str) -> ActivationReport:
    steps = max(passes, 1)
    return ActivationReport(
        steps=passes,
        bytes_in_per_step=_per_step(totals, steps, "load"),
        bytes_out_per_step=_per_step(totals, steps, "store"),
        waits_s_per_step={cause: seconds / steps for cause, seconds in totals.waits_s.items()},
        pinned_bytes=ledger.pinned_bytes,
        reason=reason,
    )


def _per_step(totals: Totals, steps: int, *lanes: str) -> dict[str, float]:
    table: dict[str, float] = {}
    for (name, tag), size in totals.bytes.items():
        if name in lanes:
            table[tag.value] = table.get(tag.value, 0.0) + size / steps
    return table
