"""``storm.DataLoader``: batches of a dataset of any size, on the device, at constant memory.

A loader has settings, a place (epoch and batch), and an *engine* (delivery/engine.py): threads, files and memory, made
for the first batch and kept until ``close``.

Epochs. Every ``for`` loop over the loader is a run of ``epochs`` epochs. The first starts at epoch 0, the next where
the last ended, so each pass has another order. A loop that is left by ``break`` or an exception is over: the next one
starts with the following epoch. ``set_epoch`` overrides that.

A state may be taken after any batch, and names the next one. It also holds its run: the first loop after
``load_state_dict`` gives the rest of that run, even if it is empty, and the next loop is a new run.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Generator, Mapping
from dataclasses import asdict
from time import perf_counter
from typing import Any, Literal

import torch

from ..core.endings import Closing
from ..core.errors import SettingError, StormError
from ..core.events import Span, What
from ..core.sizes import parse_bytes, round_up
from ..core.tags import Tag
from ..memory.books.ledger import open_ledger
from ..memory.books.limits import usable_device
from .delivery.engine import Counts, EngineSettings, LoaderReport
from .delivery.item_engine import ItemEngine
from .delivery.row_engine import RowsEngine
from .delivery.state import VERSION, check_state, content_of, fingerprint
from .delivery.transforms import Transform, apply, check_transform
from .formats.items import ItemSource
from .formats.open import open_source
from .formats.paths import whole_number
from .readers.choice import Choice, Reading, choose
from .readers.order import WINDOW_BYTES, Order, OrderSettings, Shuffle
from .source import DecodedSource


class DataLoader(Closing):
    """Batches of ``source``, in order or shuffled, on ``device``. For one thread at a time."""

    def __init__(
        self,
        source: object,
        batch_size: int = 1,
        *,
        shuffle: Shuffle = False,
        seed: int = 0,
        device: torch.device | str = "cpu",
        drop_last: bool = False,
        epochs: int = 1,
        rank: int = 0,
        world: int = 1,
        transform: Transform | None = None,
        reading: Reading = "auto",
        ram: object = "auto",
        window: object = WINDOW_BYTES,
        nan: Literal["allow", "error"] = "allow",
        workers: int | None = None,
    ) -> None:
        """Read headers, but no data; start nothing.

        ``source``: a path, a list of paths, a directory, a dict of name to path, ``stormtorch.data.tokens(...)`` or
        ``raw(...)``, a ``datasets.Dataset``, or any map-style torch ``Dataset``. A source with one field gives tensors,
        one with several gives dicts. The user owns each batch: the loader never writes to it later.

        ``shuffle``: True shuffles rows within windows of ``window`` bytes, made of random blocks; "full" shuffles all
        rows, for data in RAM. ``drop_last`` leaves out rows that do not fill a batch or divide evenly among ``world``
        ranks; otherwise the last batch is smaller, and a few rows repeat so that ranks get equal numbers.
        ``transform``: a function of the batch, or a dict of field to function, called on the device. ``reading``:
        "cached", "direct", or "auto", which chooses by the data and the RAM. ``ram``: the loader's RAM budget.
        ``workers``: reading threads; for a torch ``Dataset``, processes.
        """
        self.batch_size, self.epochs = whole_number("batch_size", batch_size, 1), whole_number("epochs", epochs, 1)
        seed = whole_number("seed", seed, 0)
        if nan not in ("allow", "error"):
            raise SettingError(f"nan={nan!r} is not accepted. Accepted: 'allow', 'error'.")
        self.source = open_source(source)
        if workers is not None:
            workers = whole_number("workers", workers, 0 if isinstance(self.source, ItemSource) else 1)
        self.device, self.drop_last = usable_device(device), drop_last
        self._transform, self._ram = transform, ram
        self._fingerprint = fingerprint(self.source)
        self._content: str | None = None
        window_bytes = parse_bytes(window, setting="window")
        settings = OrderSettings(
            shuffle=shuffle, seed=seed, rank=rank, world=world, drop_last=drop_last, window_bytes=window_bytes
        )
        self._order = Order(
            self.source.groups, self.source.row_bytes, settings, whole_shards=isinstance(self.source, DecodedSource)
        )
        rows = self._order.rows_per_epoch
        self._per_epoch = rows // self.batch_size if drop_last else -(-rows // self.batch_size)
        if self._per_epoch == 0:
            raise SettingError(
                f"{self.source.name} has {self.source.rows} rows, which fill no batch: batch_size={batch_size}, "
                f"world={world}, drop_last={drop_last}. Lower batch_size, or use drop_last=False."
            )
        self._names = [field.name for field in self.source.fields]
        check_transform(transform, self._names)
        if isinstance(transform, Mapping) and len(self._names) == 1:
            self._transform = transform.get(self._names[0])
        if isinstance(self.source, ItemSource):
            self._choice = Choice("processes", "a torch Dataset")
        else:
            self._choice = choose(self.source, reading)
        self._engine: RowsEngine | ItemEngine | None = None
        self._finalizer: weakref.finalize[[], DataLoader] | None = None  # closes the engine with the loader
        self._running = False  # the engine reads batches of the present loop
        self._place = self._run_begin = 0  # the next batch, and the first one of its run, counted through all epochs
        self._resumed = True  # the next loop starts at the present place
        self._turn = 0  # counts the loops over this loader
        self._counts = Counts()
        self._engine_settings = EngineSettings(
            order=self._order,
            device=self.device,
            batch_rows=self.batch_size,
            per_epoch=self._per_epoch,
            workers=workers,
            refuses_nan=nan == "error",
            counts=self._counts,
        )

    def __len__(self) -> int:
        """This rank's batches in one loop, over all its epochs."""
        return self._per_epoch * self.epochs

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._place // self._per_epoch

    def set_epoch(self, epoch: int) -> None:
        """Start the next loop with ``epoch``. After ``load_state_dict``, naming the state's epoch changes nothing."""
        if self._resumed and epoch == self.epoch and self._place % self._per_epoch > 0:
            return
        self._place = self._run_begin = epoch * self._per_epoch
        self._resumed = True

    def __iter__(self) -> Generator[Any, None, None]:
        self._end_run()
        if not self._resumed:
            self._place = self._run_begin = round_up(self._place, self._per_epoch)
        self._resumed = True  # a loop has not begun before its first batch
        self._turn += 1
        return self._batches(self._turn)

    def _batches(self, turn: int) -> Generator[Any, None, None]:
        end = self._run_begin + len(self)
        last = perf_counter()
        if turn == self._turn:
            self._resumed = False
        try:
            while True:
                if turn != self._turn:
                    raise StormError("This loop is over: another loop over the same loader began. Use two loaders.")
                if self._running and self._engine is not None and self._engine.pid != os.getpid():
                    raise StormError("This loop belongs to the process before the fork. Start a new one here.")
                found = self._next(end)
                if found is None:
                    self._run_begin, self._resumed = self._place, True
                    return
                given, samples, size = found
                batch = self._finished(given)
                del found, given
                now = perf_counter()
                self._counts(Span(What.BATCH, last, now, "", Tag.DATA, size, None, samples))
                last = now
                self._place += 1  # just before the yield: Ctrl-C cannot lose the batch
                yield batch
                del batch  # once the user drops it too, its memory is used again
        finally:
            if turn == self._turn:
                self._end_run()

    def _next(self, end: int) -> tuple[Any, int, int] | None:
        """The next batch of the run, its samples and bytes; the first request starts the run."""
        try:
            if not self._running:
                engine = self._own_engine()
                self._running = True
                engine.start(self._place, end)
            assert self._engine is not None
            return self._engine.next()
        except BaseException:
            # Ctrl-C may have left the engine inconsistent. After an error, the user may fix a file by replacing it,
            # so open files must not be used again either.
            try:
                self._end_run()
            finally:
                self._drop_engine()
            raise

    def state_dict(self) -> dict[str, Any]:
        """The place after the last batch that the user got; prefetched batches do not count. Changes nothing.

        The first call reads samples of the data, by which the state recognises it: 256 rows, or up to 4 MiB whole."""
        epoch, batch = divmod(self._place, self._per_epoch)
        place = {"epoch": epoch, "batch": batch, "run_epoch": self._run_begin // self._per_epoch}
        return {"version": VERSION, **place, **self._identity(content=True)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start the next loop with the batch after the state, and end it where the state's loop would have ended.

        Raises SettingError if the state was made with other data, or with settings that change the order. Threads,
        device, memory and ``reading`` may differ. Data is compared by its layout and by samples of its rows, up to 4
        MiB all of them; of a torch ``Dataset`` only by the number of items.
        """
        check_state(state, self._identity(content=isinstance(state, Mapping) and state.get("content") is not None))
        epoch, batch, run_epoch = (int(state[name]) for name in ("epoch", "batch", "run_epoch"))
        if not (0 <= batch < self._per_epoch and 0 <= run_epoch <= epoch <= run_epoch + self.epochs):
            raise SettingError(
                f"The state is at batch {batch} of epoch {epoch}, in a loop that began with epoch {run_epoch}; this "
                f"loader has {self._per_epoch} batches an epoch and epochs={self.epochs}. Make it as it was."
            )
        self._end_run()
        self._turn += 1
        self._place, self._run_begin = epoch * self._per_epoch + batch, run_epoch * self._per_epoch
        self._resumed = True

    def report(self) -> LoaderReport:
        """The loader's totals so far; print it, or use its numbers."""
        engine = self._engine
        return LoaderReport(
            **asdict(self._counts),
            reading=self._choice.mode,
            reason=self._choice.reason,
            depth=0 if engine is None else engine.depth_batches,
            ring_bytes=0 if engine is None else engine.ring_bytes,
        )

    def close(self) -> None:
        """End threads, close files, return memory; the user's batches remain valid. A later loop opens them again."""
        self._end_run()
        self._turn += 1
        self._drop_engine()

    def __repr__(self) -> str:
        return (
            f"<DataLoader {self.source.name}: {self.source.rows} rows, {len(self)} batches of {self.batch_size} to "
            f"{self.device}, {self._choice.mode}: {self._choice.reason}>"
        )

    def _identity(self, *, content: bool) -> dict[str, Any]:
        settings = self._order.settings
        if content and self._content is None:
            self._content = content_of(self.source)
        return {
            "seed": settings.seed,
            "shuffle": settings.shuffle,
            "batch_size": self.batch_size,
            "drop_last": settings.drop_last,
            "rank": settings.rank,
            "world": settings.world,
            "window": settings.window_bytes,
            "rows": self.source.rows,
            "data": self._fingerprint,
            **({"content": self._content} if content else {}),
        }

    def _finished(self, given: list[torch.Tensor]) -> Any:
        """The batch as the user gets it: a tensor for one field, else a dict; or torch's collated items."""
        batch: Any = given
        if self._names:
            batch = given[0] if len(given) == 1 else dict(zip(self._names, given, strict=True))
        return apply(self._transform, batch, self.source.name)

    def _own_engine(self) -> RowsEngine | ItemEngine:
        if self._engine is not None and self._engine.pid != os.getpid():
            self._engine = None  # the parent's: a fork does not copy threads
            self._finalizer = None
        if self._engine is None:
            if isinstance(self.source, ItemSource):
                self._engine = ItemEngine(self.source, self._engine_settings)
            else:
                ledger = open_ledger(self.device, ram=self._ram)
                self._engine = RowsEngine(self.source, self._choice, ledger, self._engine_settings)
            self._finalizer = weakref.finalize(self, self._engine.close)
        return self._engine

    def _drop_engine(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()
            if self._finalizer is not None:
                self._finalizer.detach()  # only now: after Ctrl-C the finalizer closes it

    def _end_run(self) -> None:
        running, self._running = self._running, False
        if self._finalizer is not None and not self._finalizer.alive:
            return  # the interpreter is exiting: the engine is closed, and modules are empty
        if running and self._engine is not None and self._engine.pid == os.getpid():
            try:
                self._engine.stop()
            except BaseException:
                self._drop_engine()
                raise
