"""What a micro benchmark returns, and how it is shown."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One measurement.

    ``against`` is the figure of the plain way to do the same, measured in the same run; ``ratio`` is ours over it.
    """

    case: str
    what: str
    ours: float
    unit: str
    against: float | None = None
    plain: str = ""

    @property
    def ratio(self) -> float | None:
        return None if not self.against else self.ours / self.against


def table(rows: list[Row]) -> str:
    """Markdown, so that it can be read in a terminal and committed as it is."""
    lines = ["| case | what | ours | plain way | ratio | plain way is |", "|---|---|---|---|---|---|"]
    for row in rows:
        against = "" if row.against is None else f"{row.against:.2f} {row.unit}"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        lines.append(f"| {row.case} | {row.what} | {row.ours:.2f} {row.unit} | {against} | {ratio} | {row.plain} |")
    return "\n".join(lines)


def machine() -> str:
    """The machine in one line."""
    import psutil
    import torch

    from stormtorch.native.library import describe

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    cores = len(os.sched_getaffinity(0))
    ram = psutil.virtual_memory().total / 2**30
    return f"{platform.machine()}, {cores} cores, {ram:.0f} GiB RAM, {gpu}, torch {torch.__version__}, {describe()}"
