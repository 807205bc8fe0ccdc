"""Times steps: some to warm up, until STORM's plans have settled, then those that count."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from benchmarks.trainer.profiled import look
from torch import Tensor

from stormtorch.memory.cuda.idle_meter import idle_meter_for
from stormtorch.observe.recorder import Mark
from stormtorch.observe.report import gpu_time

from .settled import is_settled

MOST_WARM = 56  # STORM compares plans from the 8th step on, and steps with and without updates ahead until the 51st


class Clock:
    """``session`` gives STORM's session while one is open, or None. Without one, and if ``metered``, it measures the
    GPU's idle time all the same. Adds to ``known`` what it has found."""

    def __init__(
        self,
        device: torch.device,
        *,
        warm: int,
        steps: int,
        session: Callable[[], Any],
        metered: bool,
        known: dict[str, Any],
    ) -> None:
        self._gpu, self._warm, self._steps, self._session = device.type == "cuda", warm, steps, session
        self._meter: Any = idle_meter_for(device) if self._gpu and metered else None
        self._began_s = time.perf_counter()
        self._number = self._from = 0
        self._marks: list[Any] = []
        self._look: Mark | None = None
        self._wall_from_s = 0.0
        self._losses: list[Tensor] = []
        self._found = known

    @staticmethod
    def most_steps(warm: int, steps: int) -> int:
        """The same for every method: the learning rate depends on it."""
        return max(warm, MOST_WARM) + steps

    def first(self) -> None:
        """The first step begins."""
        if self._number == 0:
            self._settle()
            self._found["setup_s"] = time.perf_counter() - self._began_s

    def loss(self, loss: Tensor) -> None:
        self._losses.append(loss.detach().clone())

    def end_step(self) -> bool:
        """Whether that was the last one."""
        self._number += 1
        if self._from:
            self._marks.append(self._mark())
            if self._number < self._from + self._steps:
                return False
            self._settle()
            self._note()
            return True
        if self._number >= self._warm and (is_settled(self._session()) or self._number >= MOST_WARM):
            gc.collect()
            self._settle()
            self._from, self._look, self._wall_from_s = self._number, self._looked(), time.perf_counter()
            self._marks = [self._mark()]
        return False

    def _note(self) -> None:
        self._found["wall_s"] = (time.perf_counter() - self._wall_from_s) / self._steps
        gpu = gpu_time([mark for mark in (self._look, self._looked()) if mark is not None])
        self._found["busy"] = str(gpu or "")
        session = self._session()
        if session is not None:
            report = session.report()
            print(report)
            self._found["plan"] = report.plan.activations.reason
            if report.limited_by:
                self._found["limits"] = f"{report.limited_by}, {report.percent_of_limit:.0f} %"
        self._found["warm"] = self._from
        self._found["steps_s"] = [self._between(*pair) for pair in pairwise(self._marks)]
        self._found["step_s"] = statistics.median(self._found["steps_s"])
        self._found["losses"] = [float(loss) for loss in self._losses]

    def _settle(self) -> None:
        session = self._session()
        if session is not None:
            session.synchronize()
        if self._gpu:
            torch.cuda.synchronize()

    def _looked(self) -> Mark | None:
        session = self._session()
        if session is not None:
            return look(session, session._parts.ground.idle)
        if self._meter is None:
            return None
        looked_s, idle_s = self._meter.read()
        return Mark(at_s=time.perf_counter(), waited_s=0.0, looked_s=looked_s, idle_s=idle_s)

    def _mark(self) -> Any:
        if not self._gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, first: Any, second: Any) -> float:
        return float(first.elapsed_time(second) / 1e3 if self._gpu else second - first)
