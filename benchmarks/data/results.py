"""What one case gives, and how a run of them is shown and stored."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .cases import OURS, Case, package_of

Shown = Callable[[Any], str]


@dataclass(frozen=True, kw_only=True)
class Result:
    """One case, measured or failed. ``figures`` have the names that the columns of its group ask for."""

    case: Case
    failed: str = ""
    figures: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Result:
        return cls(**{**fields, "case": Case(**fields["case"])})


def _as(form: str, scale: float = 1) -> Shown:
    return lambda value: format(value * scale, form)


_GB, _MIB = _as(".2f", 1e-9), _as(",.1f", 2**-20)
_SPEED: tuple[tuple[str, str, Shown], ...] = (
    ("samples/s", "rate", _as(",.0f")),
    ("GB/s", "bytes_per_s", _GB),
    ("fastest epoch", "best_rate", _as(",.0f")),
    ("CPU µs a sample", "cpu_s", _as(".2f", 1e6)),
    ("whole epochs, samples/s", "epoch_rate", _as(",.0f")),
    ("of the best peer", "of_best_peer", _as(".2f")),
    ("epochs", "rounds", str),
    ("RSS MiB", "rss_bytes", _MIB),
    ("load before", "load", _as(".1f")),
)
COLUMNS: dict[str, tuple[tuple[str, str, Shown], ...]] = {
    "rows": _SPEED,
    "tokens": _SPEED,
    "flat": (
        ("reading", "reading", str),
        ("µs a sample", "sample_s", _as(".2f", 1e6)),
        ("of the smallest", "of_smallest", _as(".3f")),
        ("plain direct reads, µs a sample", "disk_s", _as(".2f", 1e6)),
        ("of the smallest", "disk_of_smallest", _as(".3f")),
        ("STORM : plain", "ratio", _as(".3f")),
        ("of the smallest", "ratio_of_smallest", _as(".3f")),
        ("CPU µs a sample", "cpu_s", _as(".2f", 1e6)),
        ("of the smallest", "cpu_of_smallest", _as(".3f")),
        ("GB/s", "bytes_per_s", _GB),
        ("plain GB/s", "disk_bytes_per_s", _GB),
        ("plain, the pass before, GB/s", "before_bytes_per_s", _GB),
        ("slices", "slices", str),
        ("CPU of others", "others", _as(".0%")),
        ("epochs", "epochs", str),
        ("RSS MiB", "rss_bytes", _MIB),
        ("ring MiB", "ring_bytes", _MIB),
        ("load before", "load", _as(".1f")),
    ),
    "gpu": (
        ("reading", "reading", str),
        ("VRAM peak MiB", "vram_bytes", _MIB),
        ("torch's pool MiB", "vram_reserved_bytes", _MIB),
        ("µs a sample", "sample_s", _as(".3f", 1e6)),
        ("of the smallest", "of_smallest", _as(".3f")),
        ("resident µs a sample", "resident_sample_s", _as(".3f", 1e6)),
        ("overhead", "overhead", _as("+.2%")),
        ("asking, µs a batch", "asking_s", _as(".0f", 1e6)),
        ("resident", "resident_asking_s", _as(".0f", 1e6)),
        ("waited", "waited", _as(".1%")),
        ("loader alone, samples/s", "alone_rate", _as(",.0f")),
        ("plain direct reads GB/s", "disk_bytes_per_s", _GB),
        ("loader alone, of it", "of_disk", _as(".0%")),
        ("RSS MiB", "rss_bytes", _MIB),
        ("loss", "loss", _as(".4f")),
    ),
}

_OF_SMALLEST = {
    "sample_s": "of_smallest",
    "disk_s": "disk_of_smallest",
    "ratio": "ratio_of_smallest",
    "cpu_s": "cpu_of_smallest",
}
_SPREAD = {"sample_s": "a sample", "disk_s": "plain reads", "ratio": "STORM : plain", "cpu_s": "CPU"}


def completed(results: list[Result]) -> list[Result]:
    """With the figures that compare a case with others of its group."""
    return [Result(case=r.case, failed=r.failed, figures={**r.figures, **_compared(r, results)}) for r in results]


def _compared(result: Result, results: list[Result]) -> dict[str, float]:
    group = [other for other in results if other.case.group == result.case.group and not other.failed]
    if result.failed:
        return {}
    if result.case.group in {"rows", "tokens"}:
        peers = [other.figures["rate"] for other in group if package_of(other.case.method) != "storm"]
        return {"of_best_peer": result.figures["rate"] / max(peers)} if peers else {}
    alike = [other for other in group if other.case.method == result.case.method]
    least = min(other.case.rows for other in alike)
    smallest = [other.figures for other in alike if other.case.rows == least]
    return {
        shown: result.figures[name] / statistics.median(figures[name] for figures in smallest)
        for name, shown in _OF_SMALLEST.items()
        if name in result.figures
    }


def spread(results: list[Result]) -> str:
    """How flat the group is: for each method the least and the most, each size by the median of its runs."""
    lines = []
    for method in dict.fromkeys(result.case.method for result in results):
        runs = [result for result in results if result.case.method == method and not result.failed]
        sizes = sorted({run.case.total_bytes for run in runs})
        if len(sizes) < 2:
            continue
        parts = []
        for name, text in _SPREAD.items():
            if name not in runs[0].figures:
                continue
            by_size = [
                statistics.median(run.figures[name] for run in runs if run.case.total_bytes == size) for size in sizes
            ]
            of_smallest = [value / by_size[0] for value in by_size[1:]]
            parts.append(f"{text} {min(of_smallest):.2f} to {max(of_smallest):.2f}")
        span = f"{sizes[0] / 1e9:.1f} GB, up to {sizes[-1] / 1e9:.1f} GB"
        lines.append(f"{method}, of what it is at {span}: {', '.join(parts)}.  ")
    return "\n".join(lines)


def table(results: list[Result]) -> str:
    """Markdown, so that it can be read in a terminal and committed as it is. All results are of one group."""
    columns = COLUMNS[results[0].case.group]
    lines = [
        f"| case | rows | GB | {' | '.join(title for title, _, _ in columns)} | note |",
        "|---" * (len(columns) + 4) + "|",
    ]
    for result in completed(results):
        case = result.case
        head = [case.method, f"{case.rows:,}", f"{case.total_bytes / 1e9:.2f}"]
        shown = [_cell(result.figures.get(name), show) for _, name, show in columns]
        note = f"FAILED: {result.failed}" if result.failed else " ".join([case.note, result.figures.get("note", "")])
        lines.append(f"| {' | '.join([*head, *shown, note.strip().replace('|', '/')])} |")
    return "\n".join(lines)


def _cell(value: Any, show: Shown) -> str:
    return "" if value is None else show(value)


def text_of(results: list[Result], about: dict[str, str]) -> str:
    """What is printed last and committed: where it ran, then a table for each group."""
    parts = ["\n".join(f"{key}: {value}  " for key, value in about.items())]
    for group in dict.fromkeys(result.case.group for result in results):
        members = [result for result in results if result.case.group == group]
        parts += [f"## {group}", table(members), *([spread(members)] if group == "flat" else [])]
    return "\n\n".join(parts) + "\n"


def write(results: list[Result], about: dict[str, str], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".md").write_text(f"# Data loading\n\n{text_of(results, about)}")
    rows = [asdict(result) for result in completed(results)]
    out.with_suffix(".json").write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


def ours_failed(results: list[Result]) -> bool:
    return any(result.failed and result.case.method in OURS for result in results)
