"""What can be measured: a case is one way to feed batches, with its data and its settings.

Imports neither torch nor STORM: the process that starts the cases must not hold a GPU, and a peer may have an
interpreter of its own, in which there is no STORM.
"""

from __future__ import annotations

from dataclasses import dataclass

ROW_FLOATS = 3072  # an image of CIFAR's shape
ROW_BYTES = ROW_FLOATS * 4
SEQUENCE = 2048
SHARD_ROWS = 50_000  # 0.6 GB: the smallest dataset, and the shards of all larger ones
WORKERS = (0, 1, 2)
OURS = ("storm", "storm-cached", "storm-direct", "train", "train-direct", "train-light")

# A method of a peer is PACKAGE-FORM-WORKERS.
TORCH = tuple(f"torch-{form}-{workers}" for form in ("items", "batched", "index") for workers in WORKERS)
HF = (
    *(f"hf-{form}-{workers}" for form in ("items", "batched", "iterable") for workers in WORKERS),
    "hf-iter-0",
)
MOSAIC = tuple(f"mosaic-items-{workers}" for workers in WORKERS)
PEERS = {"torch": TORCH, "hf": HF, "mosaic": MOSAIC}


def package_of(method: str) -> str:
    """Whose way it is: "storm" or a name of PEERS."""
    return next((name for name, methods in PEERS.items() if method in methods), "storm")


@dataclass(frozen=True, kw_only=True)
class Case:
    """``folder`` holds the data. ``seconds`` is how long is measured, warm-up not counted, ``limit_s`` when it ends.

    With ``set_rows`` the rows are whole shards, chosen at random, out of a set of so many rows.
    """

    group: str
    method: str
    kind: str  # of data: "rows" or "tokens"
    rows: int
    folder: str
    batch: int = 128
    rounds: int = 3  # at least
    seconds: float = 5
    limit_s: float = 240
    device: str = "cpu"
    width: int = 232  # of the convnet: 50 MB of weights, as in the table that is made again
    note: str = ""  # for the table
    set_rows: int = 0
    shard_rows: int = SHARD_ROWS
    window: str = "256MiB"  # the loader's, in the group `flat`
    patience_s: float = 60  # in the group `flat`: how long to wait, in all, for others to leave the CPU alone

    @property
    def row_bytes(self) -> int:
        return ROW_BYTES if self.kind == "rows" else SEQUENCE * 2

    @property
    def total_bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def settings(self) -> str:
        return f"{self.group} {self.method}, {self.rows:,} rows, {self.total_bytes / 1e9:.2f} GB"
