"""torch's ``DataLoader`` over a memory map, in the ways people write it.

``torch-items-N``: one item at a time and the default collation, as in every tutorial. ``torch-batched-N``: a batch is
one fancy index into numpy's memory map. ``torch-index-N``: a batch is one ``index_select`` on a tensor over the memory
map, which torch spreads over its threads: as fast as it gets without leaving torch. N is the number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from .cases import SEQUENCE, Case
from .made import plain_file


class Items(Dataset[Tensor]):
    """Opens its map in the process that reads: a worker must not get the data pickled."""

    def __init__(self, case: Case) -> None:
        self.case, self._data = case, None

    @property
    def data(self) -> Any:
        if self._data is None:
            file = plain_file(Path(self.case.folder), self.case.kind)
            if self.case.kind == "rows":
                self._data = np.load(file, mmap_mode="c")  # "c": torch complains about memory that is read-only
            else:
                self._data = np.memmap(file, dtype=np.uint16, mode="c").reshape(-1, SEQUENCE)  # type: ignore[assignment]
        return self._data

    def __len__(self) -> int:
        return self.case.rows

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(self.data[index])


class Batches(Items):
    """Indexed with the row numbers of a whole batch."""

    def __getitem__(self, index: Sequence[int]) -> Tensor:  # type: ignore[override]
        return torch.from_numpy(self.data[index])


class Selected(Items):
    """The same by ``index_select``."""

    def __getitem__(self, index: Sequence[int]) -> Tensor:  # type: ignore[override]
        return torch.from_numpy(self.data).index_select(0, torch.tensor(index))


def feed(case: Case) -> Callable[[], Iterable[Tensor]]:
    """Gives the batches of an epoch. Workers stay from one epoch to the next."""
    _, form, workers = case.method.split("-")
    keep: dict[str, Any] = {"num_workers": int(workers), "persistent_workers": int(workers) > 0}
    if torch.cuda.is_available():
        keep["pin_memory"] = True
    if form in {"batched", "index"}:
        items = Batches(case) if form == "batched" else Selected(case)
        sampler = BatchSampler(RandomSampler(items), case.batch, drop_last=False)
        loader = DataLoader(items, batch_size=None, sampler=sampler, **keep)
    else:
        loader = DataLoader(Items(case), batch_size=case.batch, shuffle=True, **keep)
    return lambda: loader
