"""Makes the plan for a model's blocks, and changes it while the model trains.

The first passes recompute every block, and measure. Then comes a plan (plan.py): recompute, with inputs on the device
where there is room; or keep all, if all have room. It is made again when the peak is better known. With
``activations="auto"`` other plans take turns with it (comparison.py). Larger inputs start all over."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from ...core.notices import say_once
from ...core.plan import Activations, Block, Origin
from .offloading.stream import ActivationStream
from .outside_blocks import Loose
from .plans.comparison import Comparison
from .plans.plan import KEEP, ActivationPlan, BlockPlan, choose, cost_s, recompute
from .plans.profiles import ROUNDS, Profiles
from .plans.room import Gauge

REPLAN_AT = (4, 8)  # passes after which the plan is made again from the peak
_NOTED = 64  # passes to wait for a comparison to begin: noting levels costs queries of the device
_COMPARE_AT = (8, 64, 512)  # passes after which the second plan is tried; the machine may have changed since


class Planning:
    """The plan in force (``plan``), and the measurements that it is made from (``known``)."""

    def __init__(self, mode: str, stream: ActivationStream, gauge: Gauge, loose: Loose) -> None:
        self._mode, self._stream, self._gauge, self._loose = mode, stream, gauge, loose
        self._levels, self._around = gauge.levels, gauge.around
        self.known = Profiles()
        self.plan: ActivationPlan | None = None
        self.passes = 0
        self.comparisons = 0  # so far, with inputs of the present size
        self._passes_before = 0  # those before inputs had the present size
        self._sequence: list[Any] = []  # the kinds of the blocks called in the last pass
        self._held: list[int] = []  # bytes that each of them has kept
        self._planned: list[Any] = []  # the kinds that the plan is for
        self._plans: list[ActivationPlan] = []  # to compare: the best so far, then those that should be faster
        self._is_better = False  # whether one of these has won
        self._comparison: Comparison | None = None
        self._step_began: tuple[float, int] | None = None  # when, and after how many optimizer steps
        self._step_bytes = 0  # inputs of the blocks since then
        self._trim_at = 0  # the pass that gives back RAM that the plan does not need

    @property
    def age(self) -> int:
        """The number of this pass, counted from the first with inputs of the present size."""
        return self.passes - self._passes_before

    @property
    def choice(self) -> Activations:
        """What is in force in this pass."""
        origin = Origin.MEASURED if self.plan is not None else Origin.PLANNED
        if self._mode in ("keep", "offload"):
            reason = f"activations={self._mode!r}"
        elif self.plan is not None:
            reason = self.plan.reason
        elif self.passes < 2 or self.known:
            reason = "not measured yet"
        else:
            reason, origin = self._loose.reason or "kept: no blocks were found to arrange", Origin.MEASURED
        plans, profiles = (self.plan.blocks, self.known.of(self._planned)) if self.plan is not None else ([], None)
        blocks = [
            Block(
                kind=plan.kind,
                inputs_away=plan.inputs_away,
                device_bytes=plan.held_bytes(input_bytes=profile.input_bytes, saved_bytes=profile.saved_bytes),
                host_bytes=plan.sent_bytes(profile),
            )
            for plan, profile in zip(plans, profiles or (), strict=False)
        ]
        return Activations(
            mode=self._mode,
            blocks=tuple(blocks),
            outside="offload" if self._mode == "offload" or self._loose.leaves else "keep",
            reason=reason,
            origin=origin if self._mode == "auto" else Origin.FORCED,
        )

    def notes_levels(self) -> bool:
        """Whether to note how full the device is at each block: as long as a plan may be made from it."""
        waits = self._mode == "auto" and self.comparisons == 0 and bool(self.known) and self.age <= _NOTED
        return waits or self.age <= REPLAN_AT[-1]

    def for_block(self, position: int, kind: Any) -> BlockPlan | None:
        """The plan for a block; None if there is none for this one."""
        if self.plan is None or self._planned[position : position + 1] != [kind]:
            return None
        return self.plan.blocks[position]

    def begin_pass(self, sequence: list[Any], held: list[int]) -> None:
        """A pass begins. In the last one blocks of the kinds ``sequence`` ran, and kept ``held`` bytes each."""
        self.passes += 1
        self._sequence, self._held = sequence, held
        self._end_step()
        if self.age == REPLAN_AT[-1] and (over := self._gauge.over()):
            say_once(over, key="over the budget")
        if self._mode in ("auto", "recompute"):
            self._look_back()
        if self.passes == self._trim_at:
            self._stream.trim()

    def begin_block(self, kind: Any, size: int) -> bool:
        """A block is called with inputs of ``size`` bytes. True if they are larger than before, and measurements with
        smaller ones were dropped."""
        self._step_bytes += size
        known = self.known.size(kind)
        if known is None or size <= known:
            return False
        growth = size / max(1, known)
        self.known.forget(kind, growth)
        self.plan = self._comparison = None
        self.comparisons = 0
        self._levels.forget(growth)
        self._passes_before = self.passes - 1  # this pass is the first with larger inputs
        return True

    def never_again(self, kind: Any) -> None:
        """A block of this kind has turned out not to be repeatable."""
        if self.known.never_again(kind):
            self.plan = self._comparison = None

    def _look_back(self) -> None:
        """Make the plan from measurements, or make it again from a better known peak."""
        if self.age > ROUNDS and (self.plan is None or self.age in REPLAN_AT):
            before = self.plan
            self._plan_blocks()
            is_new = self.plan is not before or self.age in (ROUNDS + 1, *REPLAN_AT)
            if self._mode == "auto" and is_new and self.age <= REPLAN_AT[-1]:  # later, loose tensors are not counted
                self._plan_loose()
        if self._mode == "auto" and self.plan is not None:
            self._compare()

    def _plan_blocks(self) -> None:
        profiles = self.known.of(self._sequence)
        if profiles is None:
            return
        means = self._gauge.means(self._sequence, profiles, self._held)
        plan = recompute(profiles, means)
        if self._mode == "auto":
            best = choose(profiles, means)
            plan = best if all(block == KEEP for block in best.blocks) else plan
        self._planned, self._comparison = self._sequence, None
        self._set_plan(plan)
        self._stream.stay_bytes = 0  # only for passes without blocks

    def _set_plan(self, plan: ActivationPlan) -> None:
        if self.plan is None or plan.blocks != self.plan.blocks:
            self._levels.begin_plan()
            self._trim_at = self.passes + 2  # offloaded tensors of the plan before have come back by then
        self.plan = plan

    def _plan_loose(self) -> None:
        is_short = self._loose.leaves or bool(self._gauge.over())
        if self.plan is not None:
            self._loose.leaves = is_short and self._loose.size > self.plan.spare_bytes
        elif is_short and not self._sequence:  # else blocks exist, and the device still shows their levels
            self._loose.plan_alone(lambda stayed: self._gauge.means([], [], [stayed]).rooms[-1])
            self._levels.begin_plan()

    def _compare(self) -> None:
        """Begin, continue or end the comparison of the two plans."""
        if self._comparison is None:
            is_due = self.comparisons < len(_COMPARE_AT) and self.age >= _COMPARE_AT[self.comparisons]
            if is_due and self._around.is_settled():
                self._begin_comparison()
            return
        if not self._comparison.is_over:
            self.plan = self._plans[self._comparison.second]
            return
        ratio, (best, candidate, *others) = self._comparison.ratio, self._plans
        if self._comparison.second_wins:
            took = f"{ratio:.2f} of the time of {'fewer' if self._is_better else 'no'} blocks so"
            best, self._is_better = replace(candidate, reason=f"{candidate.reason}; {took}"), True
        else:
            lost = f"to have {candidate.reason} took {ratio:.2f} of the time"
            best = replace(best, reason=f"{best.reason}; {lost}")
        self._take_turns([best, *others])
        self._trim_at = self.passes + 2  # also where the last turn was the simple plan's

    def _begin_comparison(self) -> None:
        assert self.plan is not None
        self.comparisons += 1
        profiles = self.known.of(self._planned)
        if profiles is None or self._planned != self._sequence or self.plan.blocks[0] == KEEP:
            return
        means = self._gauge.means(self._planned, profiles, self._held)
        plans = [recompute(profiles, means)]
        for better in (choose(profiles, means, offload=False), choose(profiles, means)):
            if cost_s(profiles, better) < cost_s(profiles, plans[-1]):
                plans.append(better)
        self._is_better = False
        if len(plans) > 1:
            self._take_turns(plans)

    def _take_turns(self, plans: list[ActivationPlan]) -> None:
        """Use the first of ``plans``, and compare it with the next one."""
        self._plans = plans
        self._comparison = Comparison(does_less=plans[1].does_less_than(plans[0])) if len(plans) > 1 else None
        self._set_plan(plans[0])

    def _end_step(self) -> None:
        """Note the time of the step that ends where this pass begins, if one does."""
        now_s = time.perf_counter()
        steps = self.passes if self._around.steps is None else self._around.steps()
        if self._step_began is not None and self._step_began[1] == steps:
            return
        if self._comparison is not None and self._step_began is not None:
            self._comparison.end_step(now_s - self._step_began[0], self._step_bytes)
        self._step_began, self._step_bytes = (now_s, steps), 0
