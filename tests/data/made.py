"""Datasets made for tests of the loader: rows whose content tells their number."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from stormtorch.data.delivery.to_device import LaneDelivery
from stormtorch.data.source import Field, FileSource, Shard, Strip
from stormtorch.memory.books.ledger import Ledger


def numbered(rows: int, width: int, *, first: int = 0) -> NDArray[np.float32]:
    """Row ``i`` holds ``first + i``, then the distance to it times 1000: no two elements of the data are alike."""
    start = np.arange(first, first + rows, dtype=np.float32)[:, None]
    return (start + np.arange(width, dtype=np.float32) / 1024).astype(np.float32)


def numbered_source(folder: Path, shards: list[int], width: int = 64, *, header: int = 0) -> FileSource:
    """One field ``x`` of ``width`` float32, in a file for each shard, behind ``header`` bytes that are not data."""
    made, first = [], 0
    for number, rows in enumerate(shards):
        path = folder / f"shard{number}.bin"
        path.write_bytes(b"\xff" * header + numbered(rows, width, first=first).tobytes())
        made.append(Shard(rows=rows, strips=(Strip(path=path, offset=header, stride=4 * width),)))
        first += rows
    field = Field(name="x", dtype=torch.float32, shape=(width,))
    return FileSource(name="numbered", fields=(field,), shards=tuple(made))


def rows_in(batch: torch.Tensor) -> list[int]:
    """The numbers of the rows of a batch of a numbered source; fails if any byte is not as it was made."""
    batch = batch.cpu()
    found = batch[:, 0].round().to(torch.int64)
    wanted = found[:, None].float() + torch.arange(batch.shape[1]) / 1024
    assert torch.equal(batch, wanted)
    rows: list[int] = found.tolist()
    return rows


def deliver_late(monkeypatch: pytest.MonkeyPatch, group: int) -> None:
    """Let the CPU play the GPU, with a lane that is late, and ``group`` batches travel at once."""

    def delivery(
        device: torch.device, fields: Sequence[Field], batch_rows: int, ledger: Ledger, *, batches: int, ahead: int
    ) -> LaneDelivery:
        late: dict[str, Any] = {"ahead": ahead, "delay": lambda: time.sleep(0.001)}
        return LaneDelivery(device, fields, batch_rows, ledger, batches=batches, **late)

    monkeypatch.setattr("stormtorch.data.delivery.row_engine.open_delivery", delivery)
    monkeypatch.setattr("stormtorch.data.delivery.row_engine.batches_at_once", lambda *_, **__: group)
