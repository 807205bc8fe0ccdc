"""The table of a run."""

from __future__ import annotations

from typing import Any

from .cases import CASES

COLUMNS = (
    "case", "parameters", "tokens", "step s", "tokens/s", "least s", "of least", "GB a step", "disk GB/s", "hidden",
    "VRAM GiB", "RAM GiB", "anonymous RAM GiB", "loss",
)  # fmt: skip
_KEY = (
    "RAM: the most that the machine's free RAM shrank by, with the model's construction. Anonymous: of the process, "
    "after the steps, without memory of the GPU's driver."
)


def text(rows: list[tuple[str, dict[str, Any]]], about: dict[str, str]) -> str:
    lines = [f"{name}: {value}  " for name, value in about.items()]
    lines += ["", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    steps_s = {case: row["step_s"] for case, row in rows if "failed" not in row}
    for case, row in rows:
        if "failed" in row:
            why = str(row["failed"]).replace("|", "/").replace("\n", " ")
            lines.append(f"| {case} | FAILED: {why} |" + " |" * (len(COLUMNS) - 2))
        else:
            lines.append(f"| {' | '.join(_cells(case, row, steps_s.get(CASES[case].beside, 0.0)))} |")
    return "\n".join(["# Optimizer states on disk", "", *lines, "", _KEY]) + "\n"


def _cells(case: str, row: dict[str, Any], in_ram_s: float) -> list[str]:
    moved = row["read_bytes"] + row["written_bytes"]
    least_s = max(in_ram_s, moved / row["rate"] if row["rate"] else 0.0)
    losses = [f"{loss:.4f}" for loss in row["losses"]]
    return [
        case,
        f"{row['parameters']:,}",
        f"{row['tokens']:,}",
        f"{row['step_s']:.3f}",
        f"{row['tokens'] / row['step_s']:,.0f}",
        f"{least_s:.3f}" if least_s else "",
        f"{row['step_s'] / least_s:.2f}" if least_s else "",
        f"{row['read_bytes'] / 1e9:.2f} + {row['written_bytes'] / 1e9:.2f}",
        f"{row['rate'] / 1e9:.2f}" if row["rate"] else "",
        "" if row["hidden"] is None else f"{row['hidden']:.0%}",
        f"{row['vram_bytes'] / 2**30:.1f}",
        f"{row['ram_bytes'] / 2**30:.1f}",
        f"{row['anonymous_bytes'] / 2**30:.1f}",
        f"{losses[0]} to {losses[-1]}" if len(losses) > 1 else f"{losses[0]} (mean)",
    ]
