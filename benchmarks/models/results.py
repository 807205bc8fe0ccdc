"""What one case gives, and how a run of them is shown and stored."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .cases import RESIDENT, UNCLIPPED, Case

_GIB = 1 << 30
_COLUMNS = (
    "model", "parameters", "tokens", "method", "vram", "s a step", "wall s", "tokens/s", "of resident",
    "VRAM GiB (reserved)", "RSS GiB", "GPU", "limited by", "set-up s", "loss", "same numbers",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Result:
    """One case, measured or failed. A figure is None where the case did not get that far.

    ``step_s`` is the median over steps, between events on the compute stream; ``wall_s`` is the time of all measured
    steps, everything still pending at the end included, divided by their number. ``setup_s`` begins with a model in RAM
    and ends before the first step. ``rss_bytes`` is the peak of the process, page-locked memory included; ``ram_bytes``
    is the most that the machine's free RAM shrank meanwhile.
    """

    case: Case
    failed: str = ""
    parameters: int | None = None
    step_s: float | None = None
    wall_s: float | None = None
    steps_s: list[float] = field(default_factory=list)
    warm: int | None = None  # steps before the measured ones
    setup_s: float | None = None
    vram_allocated_bytes: int | None = None
    vram_reserved_bytes: int | None = None
    rss_bytes: int | None = None
    ram_bytes: int | None = None
    busy: str = ""
    limits: str = ""
    plan: str = ""  # for activations
    losses: list[float] = field(default_factory=list)  # of all steps
    answer: str = ""  # of what was generated

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Result:
        return cls(**{**fields, "case": Case(**fields["case"])})


def _alike(result: Result, results: list[Result]) -> list[Result]:
    """The resident runs of the same model and shape."""
    same = (result.case.model, result.case.shape)
    return [
        other
        for other in results
        if other.case.method in RESIDENT and (other.case.model, other.case.shape) == same and not other.failed
    ]


def speed_of_resident(result: Result, results: list[Result]) -> float | None:
    """Speed as a share of that of the fastest resident run of the same model and shape, if this run has one."""
    times = [other.step_s for other in _alike(result, results) if other.step_s is not None]
    return min(times) / result.step_s if times and result.step_s is not None else None


def same_numbers(result: Result, results: list[Result]) -> str:
    """Whether the losses of all steps are those of a resident run that updates in the same precision, to the bit; for
    generation, whether the tokens are the same."""
    others = [other for other in _alike(result, results) if other.case.updates == result.case.updates]
    if result.failed or not others or others[0] is result:
        return ""
    reference = others[0]
    if result.answer:
        return "yes" if result.answer == reference.answer else "no: other tokens"
    pairs = list(zip(result.losses, reference.losses, strict=False))
    apart = [number for number, (ours, theirs) in enumerate(pairs, 1) if ours != theirs]
    if not apart:
        return f"yes, {len(pairs)} steps" if pairs else ""
    most = max(abs(ours / theirs - 1) for ours, theirs in pairs)
    clipped = "; not clipped" if result.case.method in UNCLIPPED else ""
    return f"no: from step {apart[0]} of {len(pairs)}, at most {most:.1e}{clipped}"


def table(results: list[Result]) -> str:
    """Markdown, so that it can be read in a terminal and committed as it is."""
    lines = [f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|"]
    for result in results:
        row = _row(result, results)
        lines.append(f"| {' | '.join(row.get(column, '') for column in _COLUMNS)} |")
    return "\n".join(lines)


def _row(result: Result, results: list[Result]) -> dict[str, str]:
    case = result.case
    row = {
        "model": case.model,
        "parameters": "" if result.parameters is None else f"{result.parameters / 1e9:.3g}e9",
        "tokens": case.shape,
        "method": case.method,
        "vram": case.vram,
        "RSS GiB": _shown(result.rss_bytes, ".1f", _GIB),
    }
    if result.vram_allocated_bytes is not None and result.vram_reserved_bytes is not None:
        row["VRAM GiB (reserved)"] = (
            f"{result.vram_allocated_bytes / _GIB:.1f} ({result.vram_reserved_bytes / _GIB:.1f})"
        )
    if result.failed:
        return row | {"s a step": f"FAILED: {result.failed.replace('|', '/')}"}
    return row | {
        "s a step": _shown(result.step_s, ".3f"),
        "wall s": _shown(result.wall_s, ".3f"),
        "tokens/s": "" if result.step_s is None else f"{case.tokens / result.step_s:,.4g}" if case.generates
        else f"{case.tokens / result.step_s:,.0f}",
        "of resident": _shown(speed_of_resident(result, results), ".0%"),
        "GPU": result.busy,
        "limited by": result.limits,
        "set-up s": _shown(result.setup_s, ".1f"),
        "loss": f"{result.losses[-1]:.4f}" if result.losses else result.answer,
        "same numbers": same_numbers(result, results),
    }  # fmt: skip


def _shown(value: float | None, form: str, unit: float = 1) -> str:
    return "" if value is None else format(value / unit, form)


def text_of(results: list[Result], about: dict[str, str]) -> str:
    head = "\n".join(f"{key}: {value}  " for key, value in about.items())
    return f"{head}\n\n{table(results)}\n"


def write(results: list[Result], about: dict[str, str], out: Path) -> None:
    out.with_suffix(".md").write_text(f"# Models of transformers and diffusers\n\n{text_of(results, about)}")
    rows = [{**asdict(result), "of_resident": speed_of_resident(result, results)} for result in results]
    out.with_suffix(".json").write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
