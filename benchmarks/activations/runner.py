"""Runs planned cases, each in a process of its own."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.training.cases import Case
from benchmarks.training.isolation import run_isolated
from benchmarks.training.results import Result

from .cases import OURS, Planned
from .largest import largest
from .one import figures_in
from .results import Row

ROOT = Path(__file__).parents[2]
_ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def _environment(case: Case) -> dict[str, str]:
    """Where a limit is enforced, peers have what torch recommends there, and what STORM asks for by itself."""
    return _ALLOCATOR if case.vram and case.method not in OURS else {}


@dataclass
class Runner:
    """Runs cases in processes; ``traces`` is the folder for their timelines, if they are wanted."""

    folder: Path
    log: Path
    traces: Path | None
    count: int = 0

    def run(self, case: Case) -> Row:
        print(f"{case.settings} ...", end=" ", file=sys.stderr, flush=True)
        self.count += 1
        file = self.folder / f"{self.count}.json"
        command = [sys.executable, "-u", "-m", "benchmarks.activations.one", json.dumps(asdict(case)), str(file)]
        if self.traces is not None:
            name = f"{self.log.stem}_{self.count}_{case.method}_timeline.json"
            command += ["--trace", str((self.traces / name).absolute())]
        result = run_isolated(case, command, file, self.log, cwd=ROOT, environment=_environment(case))
        print(result.failed or f"{result.step_s:.3f} s a step", file=sys.stderr, flush=True)
        return Row(result=result, figures=figures_in(file))

    def at_peak(self, planned: Planned, before: list[Row]) -> Row:
        """Runs the case, within the peak of another that ran before if it is planned so."""
        if not planned.at_peak_of:
            return self.run(planned.case)
        peaks = [
            row.result.vram_allocated_bytes
            for row in before
            if row.result.case.method == planned.at_peak_of and not row.result.failed
        ]
        if not peaks or peaks[0] is None:
            reason = f"no peak of {planned.at_peak_of} is known: run it too, or give --vram"
            return Row(result=Result(case=planned.case, failed=reason))
        row = self.run(replace(planned.case, vram=str(peaks[0])))
        return replace(row, note=f"at the peak of {planned.at_peak_of}")

    def search(self, case: Case, *, most: int, guessed: bool) -> Row:
        """The row of the largest micro-batch that fits, within the case's time limit."""
        return largest(
            lambda micro_batch, left_s: self.run(replace(case, micro_batch=micro_batch, limit_s=left_s)),
            start=case.micro_batch,
            most=most,
            limit_s=case.limit_s,
            guessed=guessed,
        )
