"""Hugging Face ``datasets``, with the torch format, from Arrow files on disk.

``hf-items-N``: the data set in torch's ``DataLoader``, as its documentation shows it. ``hf-batched-N``: a batch is one
index into the data set. ``hf-iter-0``: a shuffled data set and its own ``iter``. ``hf-iterable-N``: the iterable form,
which shuffles shards and within a buffer. N is the number of workers.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from .cases import ROW_FLOATS, SEQUENCE, Case
from .made import Array, pieces

datasets: Any = importlib.import_module("datasets")  # neither has types
pa: Any = importlib.import_module("pyarrow")

_SHARDS = 16  # of the iterable form: what its shuffle permutes first
_BUFFER = 1000  # rows in which it then mixes; its default

datasets.disable_progress_bars()


def _table(kind: str, piece: Array) -> Any:
    width = ROW_FLOATS if kind == "rows" else SEQUENCE
    return pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(piece.ravel()), width)})


def prepare(case: Case) -> None:
    """Saves the rows with fixed length lists, the layout that ``datasets`` turns into tensors without Python lists."""
    out = Path(case.folder) / f"hf_{case.kind}"
    if out.exists():
        return
    file = out.with_suffix(".arrow")
    tables = (_table(case.kind, piece) for piece in pieces(case.kind, case.rows))
    first = next(tables)
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, first.schema) as writer:
        writer.write_table(first)
        for table in tables:
            writer.write_table(table)
    datasets.Dataset.from_file(str(file)).save_to_disk(str(out))
    file.unlink()


def feed(case: Case) -> Callable[[], Iterable[Tensor]]:
    # Tokens come as int64, the format's default; asking it for uint16 makes it no faster.
    data = datasets.load_from_disk(str(Path(case.folder) / f"hf_{case.kind}")).with_format("torch")
    _, form, workers = case.method.split("-")
    if form == "iter":
        seeds = count()
        return lambda: _only(data.shuffle(seed=next(seeds)).iter(case.batch))
    keep: dict[str, Any] = {"num_workers": int(workers), "persistent_workers": int(workers) > 0}
    if form == "items":
        loader = DataLoader(data, batch_size=case.batch, shuffle=True, **keep)
    elif form == "batched":
        sampler = BatchSampler(RandomSampler(data), case.batch, drop_last=False)
        loader = DataLoader(data, batch_size=None, sampler=sampler, **keep)
    else:
        stream = data.to_iterable_dataset(num_shards=min(_SHARDS, case.rows))
        stream = stream.shuffle(seed=0, buffer_size=_BUFFER)
        loader = DataLoader(stream, batch_size=case.batch, **keep)
    return lambda: _only(loader)


def _only(batches: Iterable[dict[str, Tensor]]) -> Iterator[Tensor]:
    return (batch["x"] for batch in batches)
