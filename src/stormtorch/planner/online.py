"""Tunes a session while it trains, from measurements: changes where work is done, never a result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import nn

from ..core.errors import OutOfBudget
from ..core.plan import Choice, OptimizerShare, Origin, Placement
from ..core.sizes import format_bytes, round_up
from ..core.tags import Tag, Tier
from ..memory.books.ledger import Ledger
from ..memory.cuda.device_meter import DeviceMeter, PeakMeter
from ..memory.pools.pool import GRAIN, DevicePool
from ..native.worker.jobs import Worker
from ..observe.recorder import Recorder, Totals, lane_rate, link_rates
from ..streams.activations.runner import Saving
from ..streams.gradients.stream import GradientStream
from ..streams.optimizer.shares import Rates, device_share
from ..streams.optimizer.updater import NoUpdater, Updater
from ..streams.units.partition import Partition
from ..streams.units.placement import growth
from .ahead import Sparing

_GROW_AT = (2, 4)  # steps after which the peak of activations is known
_INWARD = ("load", "aside")
_STALL = "buckets"  # the cause of compute's waits when gradients have no room
_OF_UPDATES = ("updates", "states")  # causes of compute's waits when the optimizer is late
_SHARE_AT = (2, 3, 5, 8, 12, 20, 50)  # steps after which the optimizer's work is divided again


class Tuning:
    """Grows the pool, divides the optimizer's work, and tells activations what is left for them."""

    def __init__(
        self,
        meter: DeviceMeter | None,
        *,
        ledger: Ledger,
        pool: DevicePool,
        placement: Placement,
        partition: Partition,
        recorder: Recorder,
        mode: str,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        """``mode``: of the step. ``look`` brings the recorder up to date."""
        self._ledger, self.pool, self._placement = ledger, pool, placement
        self._partition, self._recorder, self._mode, self._look = partition, recorder, mode, look
        self._updater: Updater = NoUpdater()
        self._worker: Worker | None = None  # None: there is no work to divide
        self._can_travel: Callable[[], bool | None] = lambda: False
        self._travels: bool | None = None  # its answer; until there is one, nothing is decided
        self._undecided_steps = 0  # steps without an answer
        self._past: tuple[Totals, float, int] = (Totals(), 0.0, 0)
        self._planned_at = Totals()  # when activations were last planned
        self._share_is_fixed = self._is_share_due = self._is_growth_due = False
        self._grown_at: int | None = None  # the step after which the pool took the memory that activations leave
        self._accumulates = True  # as far as is known
        self.steps = 0
        self.meter = meter
        self.peak = PeakMeter(int if meter is None else meter.peak)
        self.foreign_bytes = 0  # other memory of the process on the device, not part of the session's budget
        self._is_measured = False  # the pool has been given what activations leave, or refused it
        self._share_choice = Choice(reason="on the CPU", origin=Origin.PLANNED)
        self._rates: Rates | None = None  # that the share was chosen by
        self._sparing: Sparing | None = None

    @property
    def is_settled(self) -> bool:
        """Whether steps have run since the pool has grown: the VRAM that they leave is for activations."""
        return self._grown_at is not None and self.steps >= self._grown_at + 2

    @property
    def limit_bytes(self) -> int:
        return self._ledger.budgets[Tier.DEVICE].limit_bytes

    def note_foreign_memory(self, model: nn.Module) -> None:
        """Note which memory is on the device before the first step."""
        if self.meter is not None:
            mine = self.pool.capacity_bytes + sum(b.nbytes for b in model.buffers() if b.device == self.pool.device)
            self.foreign_bytes = max(0, self.meter.allocated() - mine)
            self.meter.forget_peak()

    def take_adam(
        self, adam: Updater, worker: Worker, *, can_travel: Callable[[], bool | None], fixed_share: float | None
    ) -> None:
        """Divide the work of ``adam`` between ``worker`` and the device; a fixed share is for tests. ``can_travel``:
        whether lanes can copy the states; None until that is known."""
        self._updater, self._worker, self._share_is_fixed = adam, worker, fixed_share is not None
        self._can_travel = can_travel
        if fixed_share is not None:
            self._share_choice = Choice(reason=f"{fixed_share:.0%} on the device, as set", origin=Origin.FORCED)
        elif self.meter is not None:
            self._share_choice = replace(self._share_choice, reason="on the CPU until rates have been measured")
        if fixed_share:
            self._share(fixed_share)
        if self.meter is not None and self._mode in ("auto", "forward"):
            self._sparing = Sparing(adam, worker, self._ledger, self._recorder)

    def before_step(self, gradients: GradientStream) -> None:
        """Divide the coming update by the latest measurements, unless backward has done it. Not after the step: updates
        that it left to the device would have to be done at once, on the CPU, if the device gets no share any more."""
        if self._mode != "backward":
            self._divide(gradients)

    def after_step(self, gradients: GradientStream, activations: Saving | None) -> None:
        """Apply what this step's measurements have shown."""
        self._look()
        self._recorder.step()
        self.steps += 1
        if self._travels is None:
            self._travels = self._can_travel()
            self._undecided_steps = max(0, self.steps - _SHARE_AT[0])
        age = self.steps - self._undecided_steps if self._travels is not None else 0
        # With updates ahead the CPU's rate is another: what was measured without them remains right.
        self._is_share_due = age in _SHARE_AT and not self._updater.ahead_units
        if self._is_share_due:
            self._rates = None
        # Not before ``can_travel`` is known: weights would take the room of states, which are copied more often. And
        # before the share is chosen, which needs that room.
        if self.meter is not None and (age in _GROW_AT or self._is_growth_due):
            wished = 0 if activations is None else activations.wish_bytes  # by activations that would like to stay
            self._grow(gradients, wished, self.meter)
            # The host may be steps ahead of a device that has not reported yet how much activations take.
            self._is_growth_due = age >= _GROW_AT[-1] and wished > 0
        if age == _GROW_AT[-1]:
            self._grown_at = self.steps
        if self._sparing is not None and self._sparing.after_step(age):
            self._is_share_due = True  # by the rates that are known
        if self._mode == "backward":
            self._divide(gradients)

    def _divide(self, gradients: GradientStream) -> None:
        began, self._accumulates = gradients.has_added and not self._accumulates, gradients.has_added
        is_due, self._is_share_due = self._is_share_due, False
        if self._worker is None or self.meter is None:
            return  # without a meter, the device is RAM as well, with the same cores
        if is_due and not self._share_is_fixed:
            if self._travels:
                self._choose_share(in_ring=gradients.memory.is_ring)
            else:
                reason = "on the CPU: its states could not be page-locked"
                self._share_choice = Choice(reason=reason, origin=Origin.MEASURED)
        elif began and self._updater.there.sets_bytes:
            self._share(self._updater.there.share_now)  # without the memory that accumulation needs now

    # --- the pool

    @property
    def placement(self) -> Placement:
        """The pool as it is now."""
        there, planned = self._updater.there, self._placement
        now = replace(
            planned, pool_bytes=self.pool.capacity_bytes, kept_bytes=there.kept_bytes, passing_bytes=there.sets_bytes
        )
        if self._is_measured:
            needs = f"what activations and other programs leave; the whole needs {format_bytes(planned.whole_bytes)}"
            return replace(now, reason="all of it fits" if now.is_whole else needs, origin=Origin.MEASURED)
        if now.pool_bytes - now.kept_bytes > planned.pool_bytes:
            return replace(now, reason="enlarged for weights in use at once", origin=Origin.MEASURED)
        return now

    def _grow(self, gradients: GradientStream, wished_bytes: int, meter: DeviceMeter) -> None:
        """Give the pool the part of the budget that activations have left."""
        self._is_measured = True
        wide = gradients.memory.has_wide
        grown = growth(
            self._placement,
            pool_bytes=self.pool.capacity_bytes - self._state_bytes,
            limit_bytes=self.limit_bytes,
            peak_bytes=self.peak.bytes() - self.foreign_bytes + wished_bytes,
            free_bytes=meter.free(),
            lost_bytes=meter.lost(self.limit_bytes + self.foreign_bytes),
            step_bytes=max(unit.image_bytes for unit in self._partition.units),
            state_bytes=self._updater.there.keepable(wide=wide) if self._travels else {},
        )
        if grown.pool_bytes:
            try:
                with self.peak.growing(grown.pool_bytes):
                    self.pool.grow(grown.pool_bytes)
            except OutOfBudget:  # other programs have taken the memory meanwhile; training goes on without it
                return
        self._updater.there.keep(grown.keep, wide=wide)

    @property
    def _state_bytes(self) -> int:
        """Bytes of the pool for optimizer states, kept or passing through."""
        return self._updater.there.kept_bytes + self._updater.there.sets_bytes

    def enlarge(self, size: int) -> bool:
        """Add ``size`` bytes to a pool that is too small for what is held now, if the budget has them left."""
        left = self._ledger.free_bytes(Tier.DEVICE)
        if self.meter is not None:  # activations are not in the ledger
            used = self.peak.bytes() if self.steps else self.meter.allocated()
            left = min(left, self.limit_bytes - used + self.foreign_bytes)
        size = round_up(size, GRAIN)
        if size > left:
            return False
        try:
            self.pool.grow(size)
        except OutOfBudget:
            return False
        return True

    # --- the optimizer

    @property
    def share(self) -> OptimizerShare | None:
        """How the work of our own Adam is divided now; None if another optimizer runs."""
        if self._worker is None:
            return None
        there, choice = self._updater.there, self._share_choice
        if there.gave_way:
            why = "on the CPU: states in flight to the device had no room beside the weights"
            choice = Choice(reason=why, origin=Origin.MEASURED)
        count, ahead = len(self._partition.units), self._updater.ahead_units
        spare = format_bytes(self._updater.spare_bytes)
        others = [f"{len(there.kept_units)} of {count} units kept on the device"] if there.kept_units else []
        others += [f"{ahead} of {count} units updated in backward, into {spare} of RAM"] if ahead else []
        return OptimizerShare(
            device_share=there.share_now,
            reason=(f"{'; '.join(others)}; of the rest " if others else "") + choice.reason,
            origin=choice.origin,
        )

    def _choose_share(self, *, in_ring: bool = False) -> None:
        """Choose again how much of the optimizer's work the device does. ``in_ring``: gradients pass through one."""
        assert self._worker is not None
        there = self._updater.there
        if there.gave_way:
            return
        rates = self._rates = self._measured_rates(in_ring=in_ring) if self._rates is None else self._rates
        units = self._partition.units
        count = max(1, sum(unit.state_count for unit in units))
        states = sum(8 * unit.state_count + unit.master_bytes + unit.grad_bytes for unit in units)
        share, reason = device_share(
            rates,
            mode="backward" if self._mode == "backward" else "forward",
            share=there.share_now,
            weight_bytes=sum(unit.image_bytes for unit in units) / count,
            state_bytes=states / count,
            ahead=self._updater.ahead_elements / count,
        )
        self._share(share)
        if share and not there.share_now:
            reason = f"on the CPU: the pool has no room for states in flight; otherwise {reason}"
        origin = Origin.MEASURED if rates.are_known else Origin.PLANNED
        self._share_choice = Choice(reason=reason, origin=origin)

    def _measured_rates(self, *, in_ring: bool) -> Rates:
        """Rates since they were measured last."""
        assert self._worker is not None
        totals, worker = self._recorder.snapshot(), self._worker.stats()
        past_totals, past_busy_s, past_elements = self._past
        self._past = (totals, worker.busy_s, worker.elements)
        ends = totals.step_ends_s
        steps = len(ends) - len(past_totals.step_ends_s)
        between = max(1, min(steps, len(ends) - 1))  # the start of the first step is unknown
        busy_s = (worker.busy_s - past_busy_s) / self._worker.threads
        loads, states_in = link_rates(totals)[1], lane_rate(totals, "aside", since=past_totals)
        stalled_s = totals.waits_s.get(_STALL, 0.0) - past_totals.waits_s.get(_STALL, 0.0)
        return Rates(
            cpu_elements_per_s=(worker.elements - past_elements) / busy_s if busy_s > 0 else 0.0,
            load_bytes_per_s=min(loads, states_in) if states_in else loads,  # states share RAM with the CPU
            cpu_busy_s=busy_s / steps,
            step_s=(ends[-1] - ends[-1 - between]) / between,
            stalled_s=stalled_s / max(1, steps) if in_ring else None,
        )

    def _share(self, share: float) -> None:
        there = self._updater.there
        least = self._placement.least_bytes - self._idle_bytes
        there.share(share, self.pool.capacity_bytes - there.kept_bytes - least, early=self._mode != "backward")

    @property
    def _idle_bytes(self) -> int:
        """Bytes of the pool reserved for accumulation, while user code does not accumulate. States may pass through
        them; they give way when accumulation begins."""
        return 0 if self._accumulates else self._placement.adding_bytes

    # --- activations

    def free_rates(self, forward_s: float) -> tuple[float, float]:
        """The link's free rates for activations, out and in, beside weights and other loads.

        ``forward_s``: the time of the blocks' forward without waits. If forward waits for an update that runs behind
        it, then link and RAM are late already: offloading in that time delays the update further."""
        totals, past = self._recorder.snapshot(), self._planned_at
        self._planned_at = totals
        out_rate, in_rate = link_rates(totals)
        ends = totals.step_ends_s
        if len(ends) < 2:
            return out_rate, in_rate
        others_s = sum(s for (lane, tag), s in totals.busy_s.items() if lane in _INWARD and tag is not Tag.ACTIVATIONS)
        busy = others_s / (len(ends) + 1) / ((ends[-1] - ends[0]) / (len(ends) - 1))
        in_rate *= max(0.0, 1 - busy)
        steps = len(ends) - len(past.step_ends_s)
        if self._mode != "backward" and steps and forward_s > 0:
            late_s = sum(totals.waits_s.get(cause, 0.0) - past.waits_s.get(cause, 0.0) for cause in _OF_UPDATES)
            out_rate *= max(0.0, 1 - late_s / steps / forward_s)
        return out_rate, in_rate

    def can_recompute(self, block: nn.Module) -> bool:
        """Whether the pool has room to recompute ``block``: for all its weights at once and the next unit's, or for all
        weights of the model."""
        if self.placement.is_whole:
            return True
        inside = {id(module) for module in block.modules()}
        units = {unit for entry in self._partition.entries if id(entry.module) in inside for unit in entry.units}
        blocks = [unit for unit in self._partition.units if unit not in self._partition.large]
        largest = max(unit.image_bytes for unit in blocks or self._partition.units)  # no table comes after a block
        states = max(0, self._state_bytes - self._idle_bytes)  # in idle memory they are not in the way
        room = self.pool.capacity_bytes - self._placement.fixed_bytes - states
        return sum(unit.image_bytes + GRAIN for unit in units) + largest <= room
