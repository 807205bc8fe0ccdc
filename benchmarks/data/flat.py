"""What a sample costs as the data grow, and what the disk gives in the same minute.

Several epochs follow each other without a pause until there is enough to measure. The clock runs from a tenth of the
way to nine tenths: at the beginning a window is read that nobody has used yet, at the end one is used while nothing is
read.
"""

from __future__ import annotations

import math
import time
from typing import Any

from stormtorch.data.file_windows import READ_THREADS
from stormtorch.data.loader import DataLoader

from .cases import Case
from .disk import read_rate
from .made import shard_files
from .once import Tally
from .timing import peak_rss_bytes

DISK_SECONDS = 2.0
_GUESS = 2e9  # bytes per second, to choose the number of epochs where the disk's rate says nothing


def measure(case: Case) -> dict[str, Any]:
    files, reading = [file for file, _, _ in shard_files(case)], case.method.removeprefix("storm-")
    direct = reading == "direct"
    seconds = min(DISK_SECONDS, case.seconds)
    rates = [read_rate(files, threads=READ_THREADS, seconds=seconds)] if direct else []
    epochs = math.ceil(case.seconds * (rates[0] if direct else 2 * _GUESS) / case.total_bytes)
    if not direct:
        _warm(case, files)
    settings: dict[str, Any] = {"shuffle": True, "device": case.device, "reading": reading, "epochs": epochs}
    tally = Tally()
    with DataLoader(files, batch_size=case.batch, **settings) as loader:
        batches = -(-case.rows // case.batch) * epochs
        first, last = batches // 10, batches - 1 - batches // 10
        marks: dict[int, tuple[float, int]] = {}
        for number, batch in enumerate(loader):
            tally.add(batch[:, 0].cpu())
            if number in {first, last}:
                marks[number] = time.perf_counter(), tally.count
        report = loader.report()
    tally.check(case.rows, times=epochs)
    if direct:
        rates.append(read_rate(files, threads=READ_THREADS, seconds=seconds))
    (start_s, before), (end_s, after) = marks[first], marks[last]
    sample_s = (end_s - start_s) / (after - before)
    figures: dict[str, Any] = {
        "reading": report.reading,
        "sample_s": sample_s,
        "bytes_per_s": case.row_bytes / sample_s,
        "rss_bytes": peak_rss_bytes(),
        "ring_bytes": report.ring_bytes,
        "epochs": epochs,
    }
    if direct:
        rate = sum(rates) / len(rates)
        figures |= {"disk_bytes_per_s": rate, "disk_rates": rates, "of_disk": figures["bytes_per_s"] / rate}
    return figures


def _warm(case: Case, files: Any) -> None:
    """Brings the data into the page cache."""
    with DataLoader(files, batch_size=case.batch, reading="cached") as loader:
        for _ in loader:
            pass
