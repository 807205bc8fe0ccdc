"""MosaicML streaming: MDS shards on the local disk, its data set and its loader, shuffled by its default algorithm."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .cases import ROW_FLOATS, SEQUENCE, Case
from .made import pieces

streaming: Any = importlib.import_module("streaming")  # not in the environment that checks types


def prepare(case: Case) -> None:
    """Writes the rows with type and shape in the index, so that a sample's bytes are its data and nothing more."""
    out = Path(case.folder) / f"mosaic_{case.kind}"
    if out.exists():
        return
    kind = f"ndarray:float32:{ROW_FLOATS}" if case.kind == "rows" else f"ndarray:uint16:{SEQUENCE}"
    part = out.with_suffix(".part")
    with streaming.MDSWriter(out=str(part), columns={"x": kind}) as writer:
        for piece in pieces(case.kind, case.rows):
            for row in piece:
                writer.write({"x": row})
    part.rename(out)


def feed(case: Case) -> Callable[[], Iterable[Tensor]]:
    streaming.base.util.clean_stale_shared_memory()  # a case before this one may have been ended
    workers = int(case.method.split("-")[2])
    data = streaming.StreamingDataset(
        local=str(Path(case.folder) / f"mosaic_{case.kind}"), shuffle=True, batch_size=case.batch, num_canonical_nodes=1
    )
    keep: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
    loader = streaming.StreamingDataLoader(data, batch_size=case.batch, collate_fn=_collate, **keep)
    return lambda: loader


def _collate(samples: list[dict[str, Any]]) -> Tensor:
    """One numpy stack: faster than the default, which makes a tensor of every sample first."""
    return torch.from_numpy(np.stack([sample["x"] for sample in samples]))
