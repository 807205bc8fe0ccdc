"""Chooses how to read a source: from the page cache if it fits there, else in windows with direct I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ...core.errors import SettingError
from ...core.sizes import GiB, format_bytes
from ...memory.books import limits
from ...memory.books.ledger import Ledger
from ...memory.disk.files import open_file
from ...native.cores import usable_count
from ..source import DecodedSource, FileSource
from .cached_reader import CachedReader
from .decoded_windows import DecodedWindows
from .file_windows import FileWindows
from .order import Order
from .window_reader import WindowReader, Windows, windows_needed

Reading = Literal["auto", "cached", "direct"]
_MIN_CORES = 4  # to launch work and gather rows, and one or two for one more copy


@dataclass(frozen=True, slots=True)
class Choice:
    """How a source is read, and the reason. ``processes``: torch's own loader reads it, not a reader."""

    mode: Literal["cached", "direct", "decoded", "processes"]
    reason: str


def choose(source: FileSource | DecodedSource, reading: Reading) -> Choice:
    """How to read ``source``, by its size and the free RAM."""
    if reading not in ("auto", "cached", "direct"):
        raise SettingError(f"reading={reading!r} is not accepted. Accepted: 'auto', 'cached', 'direct'.")
    if isinstance(source, DecodedSource):
        return Choice("decoded", "rows must be decoded")
    if reading != "auto":
        return Choice(reading, f"reading={reading!r}")
    size = source.rows * source.row_bytes
    free, total = limits.host_available_bytes(), limits.host_total_bytes()
    kept = min(max(2 * GiB, total // 10), free // 2)
    numbers = f"{format_bytes(size)} of data, {format_bytes(free)} of RAM free, {format_bytes(kept)} kept for others"
    return Choice("cached" if size <= free - kept else "direct", numbers)


def open_reader(
    source: FileSource | DecodedSource,
    order: Order,
    choice: Choice,
    *,
    ledger: Ledger,
    threads: int | None,
    batch_rows: int,
    used_rows: int,
    device: torch.device,
) -> CachedReader | WindowReader:
    """The reader of that choice, for batches to ``device``. Starts threads; takes memory for windows."""
    copiers = threads or max(1, min(4, usable_count() - 1))  # the calling thread helps while it waits
    if isinstance(source, FileSource) and choice.mode == "cached":
        return CachedReader(source, order, threads=copiers)
    if order.settings.shuffle == "full":
        if choice.mode == "direct":
            how, other = f"read from disk ({choice.reason})", "reading='cached' if RAM is large enough"
        else:
            how, other = "decoded in whole groups", "`storm data pack` the data first"
        raise SettingError(
            f"shuffle='full' reads rows one by one, in random order, and {source.name} is {how}. Use shuffle=True, or "
            f"{other}."
        )
    count = windows_needed(order, batch_rows)
    windows: Windows
    if isinstance(source, DecodedSource):
        copiers = threads or min(4, usable_count())
        windows = DecodedWindows(source, ledger=ledger, count=count, threads=copiers)
    else:
        with open_file(source.shards[0].strips[0].path) as trial:
            direct = trial.mode == "direct"
        staged = device.type == "cuda" and usable_count() >= _MIN_CORES
        windows = FileWindows(source, order, ledger=ledger, count=count, direct=direct, staged=staged)
    try:
        return WindowReader(windows, order, threads=copiers, used_rows=used_rows)
    except BaseException:
        windows.close()
        raise
