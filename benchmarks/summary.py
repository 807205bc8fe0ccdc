"""``python -m benchmarks.summary FOLDER``: what the tables of a folder say, in few lines; gpu.sh prints it last.

A table named NAME-ROUND.md was made by the code of here, NAME-ROUND-COMMIT.md by that of an older commit in the same
run. Of those, the median over rounds of each figure stands here, and what it is divided by the older one's."""

from __future__ import annotations

import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

_FIGURES = ("step s", "samples/s", "VRAM GiB (reserved)", "RSS GiB", "set-up s")
_SHOWN = (
    "auto / recompute", "auto / checkpoint", "busy", "step s", "s a token", "of the link", "of vram", "VRAM GiB",
    "VRAM GiB (reserved)", "first loss, s", "in all, s", "least vram", "samples/s",
)  # fmt: skip
_NAMES = ("table", "model", "case", "tokens", "vram", "method", "way", "batch")
_TURN = re.compile(r"(?P<name>.+)-(?P<round>\d+)(-(?P<commit>[0-9a-z]+))?")
Row = dict[str, str]


def main() -> int:
    folder = Path(sys.argv[1])
    turns: defaultdict[str, defaultdict[str, defaultdict[tuple[str, str], list[float]]]]
    turns = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for file in sorted([*folder.glob("*.md"), *folder.glob("*/*.md")]):
        stem = file.stem if file.parent == folder else file.parent.name
        match = _TURN.fullmatch(stem)
        for row in rows(file.read_text()):
            name = " ".join(row[column] for column in _NAMES if row.get(column))
            if match is None:
                print(f"{stem}: {name}: " + "; ".join(_shown(row)))
                continue
            for column in _FIGURES:
                if (figure := number(row.get(column, ""))) is not None:
                    turns[match["name"]][match["commit"] or ""][name, column].append(figure)
            if "FAILED" in str(row):
                print(f"{stem}: {name}: FAILED")
    for benchmark, commits in turns.items():
        for (name, column), here in commits[""].items():
            said = f"{benchmark}: {name}: {column} {statistics.median(here):.3f} of {len(here)}"
            for commit, found in commits.items():
                if commit and (there := found.get((name, column))):
                    old = statistics.median(there)
                    ratio = f"{statistics.median(here) / old:.3f}" if old else "?"
                    said += f"; {commit}: {old:.3f} of {len(there)}, so {ratio}"
            print(said)
    return 0


def _shown(row: Row) -> Iterator[str]:
    for column in _SHOWN:
        if row.get(column):
            yield f"{column} {row[column][:120]}"


def rows(text: str) -> Iterator[Row]:
    """Of all tables in a Markdown file; "table" is the heading of those that have one of their own."""
    columns: list[str] = []
    heading: Row = {}
    for line in text.splitlines():
        if line.startswith("## "):
            heading = {"table": line[3:].strip()}
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            columns = []
        elif not columns:
            columns = cells
        elif set(line) - set("|-: "):
            yield heading | dict(zip(columns, cells, strict=False))


def number(cell: str) -> float | None:
    """The first one: of ``13.7 (14.8)`` 13.7."""
    match = re.match(r"[\d,]+(\.\d+)?", cell)
    return float(match[0].replace(",", "")) if match else None


if __name__ == "__main__":
    sys.exit(main())
