"""What one case gives, and how a run of them is shown and stored."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .cases import Case


@dataclass(frozen=True, kw_only=True)
class Result:
    """One case, measured or failed. A figure is None where the case did not get that far.

    ``step_s`` is the median over steps, between events on the compute stream; ``wall_s`` is the time of all measured
    steps, everything still pending at the end included, divided by their number. ``rss_bytes`` is the peak of the
    process, page-locked memory included; ``ram_bytes`` is the most that the machine's free RAM shrank meanwhile.
    """

    case: Case
    failed: str = ""
    parameters: int | None = None
    tokens: int | None = None
    step_s: float | None = None
    wall_s: float | None = None
    steps_s: list[float] = field(default_factory=list)
    init_s: float | None = None
    prepare_s: float | None = None
    setup_s: float | None = None
    first_step_s: float | None = None
    vram_allocated_bytes: int | None = None
    vram_reserved_bytes: int | None = None
    rss_bytes: int | None = None
    ram_bytes: int | None = None
    loss: float | None = None
    trace: str = ""

    @property
    def tokens_per_s(self) -> float | None:
        return None if self.step_s is None or self.tokens is None else self.tokens / self.step_s

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Result:
        return cls(**{**fields, "case": Case(**fields["case"])})


def speed_of_resident(result: Result, results: list[Result]) -> float | None:
    """Speed as a share of that of the resident run of the same model and micro-batch, if this run has one."""
    alike = [
        other.step_s
        for other in results
        if other.case.method == "resident"
        and (other.case.size, other.case.micro_batch) == (result.case.size, result.case.micro_batch)
        and other.step_s is not None
    ]
    return alike[0] / result.step_s if alike and result.step_s is not None else None


_COLUMNS = (
    "case", "model", "batch", "step s", "wall s", "tokens/s", "of resident",
    "VRAM GiB (reserved)", "RSS GiB", "B/param", "set-up s", "first step s", "loss",
)  # fmt: skip


def table(results: list[Result]) -> str:
    """Markdown, so that it can be read in a terminal and committed as it is."""
    lines = [f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|"]
    for result in results:
        case = result.case
        head = [f"{case.name}{f', {case.vram}' if case.vram else ''}", case.size, str(case.micro_batch)]
        if result.failed:
            figures = [f"FAILED: {result.failed.replace('|', '/')}", "", "", "", *_memory(result), "", "", ""]
        else:
            figures = [
                _shown(result.step_s, ".3f"),
                _shown(result.wall_s, ".3f"),
                _shown(result.tokens_per_s, ",.0f"),
                _shown(speed_of_resident(result, results), ".0%"),
                *_memory(result),
                _shown(result.setup_s, ".1f"),
                _shown(result.first_step_s, ".1f"),
                _shown(result.loss, ".4f"),
            ]
        lines.append(f"| {' | '.join(head + figures)} |")
    return "\n".join(lines)


def _memory(result: Result) -> list[str]:
    gib = 1 << 30
    vram = ""
    if result.vram_allocated_bytes is not None and result.vram_reserved_bytes is not None:
        vram = f"{result.vram_allocated_bytes / gib:.1f} ({result.vram_reserved_bytes / gib:.1f})"
    rss, parameters = result.rss_bytes, result.parameters
    each = rss / parameters if rss is not None and parameters else None
    return [vram, _shown(None if rss is None else rss / gib, ".1f"), _shown(each, ".1f")]


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def text_of(results: list[Result], about: dict[str, str]) -> str:
    """What is printed last and committed: where it ran, the table, then the trace if one was taken."""
    parts = ["\n".join(f"{key}: {value}  " for key, value in about.items()), table(results)]
    parts += [f"Trace of {result.case.settings}:\n\n{result.trace}" for result in results if result.trace]
    return "\n\n".join(parts) + "\n"


def write(results: list[Result], about: dict[str, str], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".md").write_text(f"# Training, every method on one workload\n\n{text_of(results, about)}")
    rows = [
        {**asdict(result), "tokens_per_s": result.tokens_per_s, "of_resident": speed_of_resident(result, results)}
        for result in results
    ]
    out.with_suffix(".json").write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
