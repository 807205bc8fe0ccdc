"""What one case gives, and how a group of them is shown and stored. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.training.results import Result, speed_of_resident

_GIB = 1 << 30
_NOTICED_BYTES = 1 << 20  # less traffic than this in a step is not offloading


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What is measured here beside a training ``Result``; None where it is not known.

    Bytes are those of one step, ``counted`` by the method's own report or in the profiler's trace; the trace's are kept
    beside the report's. ``busy`` is the share of a profiled step in which a kernel ran, ``at_once`` that in which a
    kernel ran and bytes moved both ways.
    """

    link_in_bytes_per_s: float | None = None
    link_out_bytes_per_s: float | None = None
    in_bytes: int | None = None
    out_bytes: int | None = None
    counted: str = ""
    traced_in_bytes: int | None = None
    traced_out_bytes: int | None = None
    pinned_bytes: int | None = None
    busy: float | None = None
    at_once: float | None = None
    timeline: str = ""


@dataclass(frozen=True, kw_only=True)
class Row:
    result: Result
    figures: Figures = field(default_factory=Figures)
    note: str = ""

    @property
    def link_s(self) -> tuple[float, float] | None:
        """The least time in which the link moves a step's bytes in, and that for those out."""
        figures = self.figures
        if figures.in_bytes is None or figures.out_bytes is None:
            return None
        if not figures.link_in_bytes_per_s or not figures.link_out_bytes_per_s:
            return None
        if figures.in_bytes + figures.out_bytes < _NOTICED_BYTES:
            return None
        return figures.in_bytes / figures.link_in_bytes_per_s, figures.out_bytes / figures.link_out_bytes_per_s

    @property
    def of_link(self) -> float | None:
        """How near the step is to a limit: both ways at once, so the longer of them."""
        step_s = self.result.step_s
        return None if self.link_s is None or not step_s else max(self.link_s) / step_s

    @property
    def of_link_in_turn(self) -> float | None:
        """The same where out belongs to forward and in to backward, so that they follow each other."""
        step_s = self.result.step_s
        return None if self.link_s is None or not step_s else sum(self.link_s) / step_s


_COLUMNS = (
    "case", "vram", "model", "batch", "step s", "tokens/s", "of resident", "VRAM GiB (reserved)", "RSS GiB",
    "pinned GiB", "GiB in / out", "link GB/s in / out", "of link: max / sum", "GPU busy", "all at once", "loss", "note",
)  # fmt: skip


def table(rows: list[Row]) -> str:
    """Markdown, so that it can be read in a terminal and committed as it is."""
    lines = [f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|"]
    lines += [f"| {' | '.join(_cells(row, rows))} |" for row in rows]
    return "\n".join(lines)


def _cells(row: Row, rows: list[Row]) -> list[str]:
    result, figures, case = row.result, row.figures, row.result.case
    vram, rss = result.vram_allocated_bytes, result.rss_bytes
    head = [case.name, _budget(case.vram), case.size, str(case.micro_batch)]
    reserved = "" if vram is None else f" ({_gib(result.vram_reserved_bytes)})"
    memory = [_gib(vram) + reserved, _gib(rss), _gib(figures.pinned_bytes)]
    if result.failed:
        said = f"FAILED: {result.failed.replace('|', '/')}"
        return [*head, said, "", "", *memory, *[""] * (len(_COLUMNS) - len(head) - len(memory) - 4), row.note]
    return [
        *head,
        _shown(result.step_s, ".3f"),
        _shown(result.tokens_per_s, ",.0f"),
        _shown(speed_of_resident(result, [other.result for other in rows]), ".0%"),
        *memory,
        _pair(_gib(figures.in_bytes), _gib(figures.out_bytes)),
        _pair(_rate(figures.link_in_bytes_per_s), _rate(figures.link_out_bytes_per_s)),
        _pair(_shown(row.of_link, ".0%"), _shown(row.of_link_in_turn, ".0%")),
        _shown(figures.busy, ".0%"),
        _shown(figures.at_once, ".0%"),
        _shown(result.loss, ".4f"),
        row.note.replace("|", "/"),
    ]


def _budget(vram: str) -> str:
    """A measured peak is a number of bytes; what a person wrote stays as it is."""
    return f"{_gib(int(vram))} GiB" if vram.isdecimal() else vram


def _gib(size: int | None) -> str:
    return _shown(None if size is None else size / _GIB, ".1f")


def _rate(bytes_per_s: float | None) -> str:
    return _shown(None if bytes_per_s is None else bytes_per_s / 1e9, ".1f")


def _pair(first: str, second: str) -> str:
    return f"{first} / {second}" if first or second else ""


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


_LEGEND = (
    "VRAM: peak allocated (reserved). Of link: the time that the link, as measured in the same process, needs for a "
    "step's bytes, over the step's time; max takes the longer way, sum one way after the other. All at once: kernels "
    "and copies both ways."
)


def text_of(rows: list[Row], about: dict[str, str]) -> str:
    """What is printed last and committed: where it ran, the table, then the timelines that were drawn."""
    parts = ["\n".join(f"{key}: {value}  " for key, value in about.items()), table(rows), _LEGEND]
    parts += [
        f"One step of {row.result.case.settings}:\n\n```\n{row.figures.timeline}\n```"
        for row in rows
        if row.figures.timeline
    ]
    return "\n\n".join(parts) + "\n"


def write(rows: list[Row], about: dict[str, str], folder: Path) -> None:
    """Write both files again, named after the group."""
    folder.mkdir(parents=True, exist_ok=True)
    name = about["group"]
    (folder / f"{name}.md").write_text(f"# Activations: {name}\n\n{text_of(rows, about)}")
    fields: list[dict[str, Any]] = [
        {
            **asdict(row.result),
            **asdict(row.figures),
            "note": row.note,
            "tokens_per_s": row.result.tokens_per_s,
            "of_resident": speed_of_resident(row.result, [other.result for other in rows]),
            "of_link": row.of_link,
            "of_link_in_turn": row.of_link_in_turn,
        }
        for row in rows
    ]
    (folder / f"{name}.json").write_text(json.dumps({**about, "rows": fields}, indent=1) + "\n")
