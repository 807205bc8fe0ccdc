"""STORM's loader over the same files as torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from stormtorch.data import tokens
from stormtorch.data.loader import DataLoader

from .cases import SEQUENCE, Case
from .made import plain_file


def feed(case: Case) -> Callable[[], Iterable[Tensor]]:
    """Gives the batches of an epoch, the next one each time."""
    file = plain_file(Path(case.folder), case.kind)
    source: Any = file if case.kind == "rows" else tokens(file, sequence=SEQUENCE, extra=0, dtype="uint16")
    loader = DataLoader(source, batch_size=case.batch, shuffle=True, device=case.device)
    return lambda: loader
