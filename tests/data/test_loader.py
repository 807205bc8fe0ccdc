"""The loader as a user meets it: loops, epochs, devices, transforms, memory that is the user's, threads that end."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from stormtorch.core.errors import LaneError, OutOfBudget, SettingError, StorageError, StormError
from stormtorch.core.sizes import MiB
from stormtorch.data.delivery.buffers import Buffers
from stormtorch.data.delivery.to_device import LaneDelivery, batches_at_once
from stormtorch.data.delivery.transforms import Cast, Normalise
from stormtorch.data.loader import DataLoader
from stormtorch.data.readers.choice import Reading
from stormtorch.data.source import Field, FileSource

from ..forkserver import run
from .made import deliver_late, numbered, numbered_source, rows_in


@pytest.fixture
def source(tmp_path: Path) -> FileSource:
    return numbered_source(tmp_path, [70, 30])


def rows_of(loader: DataLoader) -> list[int]:
    return [row for batch in loader for row in rows_in(batch)]


@pytest.mark.parametrize("reading", ["cached", "direct"])
def test_a_loop_gives_every_row_on_the_device(source: FileSource, device: torch.device, reading: str) -> None:
    with DataLoader(source, 16, shuffle=True, device=device, reading=reading) as loader:  # type: ignore[arg-type]
        batches = list(loader)
        assert [len(batch) for batch in batches] == [16] * 6 + [4]
        assert len(loader) == 7
        assert all(batch.device == loader.device and batch.dtype == torch.float32 for batch in batches)
        assert sorted(row for batch in batches for row in rows_in(batch)) == list(range(100))


def test_npy_files_by_their_path(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", numbered(50, 8))
    np.save(tmp_path / "y.npy", np.arange(50))
    with DataLoader(tmp_path / "x.npy", 20) as loader:
        assert rows_of(loader) == list(range(50))
    with DataLoader({"x": tmp_path / "x.npy", "y": tmp_path / "y.npy"}, 20, shuffle=True) as loader:
        for batch in loader:
            assert rows_in(batch["x"]) == batch["y"].tolist()


def test_epochs_are_shuffled_anew_and_chosen(source: FileSource) -> None:
    with DataLoader(source, 10, shuffle=True) as loader:
        first, second = rows_of(loader), rows_of(loader)
        assert first != second
        assert loader.epoch == 2
        loader.set_epoch(0)
        assert rows_of(loader) == first
        assert rows_of(loader) == second
    with DataLoader(source, 10, shuffle=True, epochs=2) as loader:
        assert len(loader) == 20
        assert rows_of(loader) == first + second
        assert loader.epoch == 2
    with DataLoader(source, 10, shuffle=True, seed=1) as loader:
        assert rows_of(loader) != first


def test_a_loop_that_was_left_is_over(source: FileSource) -> None:
    with DataLoader(source, 10, shuffle=True) as loader:
        epochs = [rows_of(loader) for _ in range(3)]
        loader.set_epoch(0)
        for batch in loader:
            assert rows_in(batch) == epochs[0][:10]
            break
        assert loader.epoch == 0
        assert rows_of(loader) == epochs[1], "the next loop begins with the next epoch"
        with pytest.raises(ZeroDivisionError):
            rows_of(Failing(loader))  # type: ignore[arg-type]
        assert loader.epoch == 2
        loader.set_epoch(2)
        assert rows_of(loader) == epochs[2]


class Failing:
    """A loop whose body fails in the fourth batch."""

    def __init__(self, loader: DataLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number, batch in enumerate(self.loader):
            1 / (number - 3)
            yield batch


def test_an_older_loop_is_told(source: FileSource) -> None:
    with DataLoader(source, 10) as loader:
        older = iter(loader)
        next(older)
        assert len(list(loader)) == 10
        with pytest.raises(StormError, match="another loop over the same loader began"):
            next(older)


def test_batches_are_the_users(tmp_path: Path) -> None:
    """Memory is used again only when the user has let go of it, and then it is."""
    source = numbered_source(tmp_path, [20_000], 256)  # batches of 100 KiB and more are recycled
    with DataLoader(source, 100, shuffle=True, epochs=2) as loader:
        kept = list(loader)
        assert sorted(row for batch in kept for row in rows_in(batch)) == sorted(2 * list(range(20_000)))
        assert len({batch.data_ptr() for batch in kept}) == 400
        del kept
        places = set()
        for batch in loader:
            batch.fill_(-1)
            places.add(batch.data_ptr())
        group = loader._engine._group  # type: ignore[union-attr]
        assert group > 1
        most = loader.report().depth + 4 * group  # under load more is read ahead
        assert len(places) <= most < 400, "memory that came back is used again"
        view = None
        for number, batch in enumerate(loader):
            if number == 3:
                view, wanted = batch[5:7, 1:], batch[5:7, 1:].clone()
        assert view is not None
        assert torch.equal(view, wanted), "a part that was kept keeps its memory"
    assert torch.equal(view, wanted)


def test_batches_of_one_group_share_nothing_that_shows(tmp_path: Path) -> None:
    source = numbered_source(tmp_path, [1000], 64)
    with DataLoader(source, 16) as loader:
        batches = list(loader)
        assert loader._engine._group > 1  # type: ignore[union-attr]
    assert all(batch.storage_offset() == 0 and batch.untyped_storage().nbytes() == batch.nbytes for batch in batches)
    assert all(batch.data_ptr() % 64 == 0 for batch in batches)
    assert not any(batch._is_view() for batch in batches)
    batches[3].fill_(-1)
    assert rows_in(batches[2]) + rows_in(batches[4]) == list(range(32, 48)) + list(range(64, 80))
    with DataLoader(source, 15) as loader:
        wanted = [rows_in(batch) for batch in loader]  # 3,840 bytes each: 64 divides them
        assert loader._engine._group > 1  # type: ignore[union-attr]
    assert [row for rows in wanted for row in rows] == list(range(1000))
    narrow = numbered_source(tmp_path, [1000], 3)
    with DataLoader(narrow, 15) as loader:
        assert [row for batch in loader for row in rows_in(batch)] == list(range(1000))
        assert loader._engine._group == 1, "batches that do not end with a cache line"  # type: ignore[union-attr]


def test_a_batch_may_be_saved_by_itself(tmp_path: Path) -> None:
    source = numbered_source(tmp_path, [400], 256)
    with DataLoader(source, 100) as loader:
        batch = next(iter(loader))
        assert batch.untyped_storage().nbytes() == batch.nbytes
        assert not batch.is_inference()
        assert not batch.requires_grad


def test_read_ahead_in_inference_mode_is_for_any_mode(tmp_path: Path) -> None:
    source = numbered_source(tmp_path, [400], 256)
    with DataLoader(source, 100) as loader:
        batches = iter(loader)
        with torch.inference_mode():
            next(batches)
        assert not next(batches).is_inference()


def test_close_lets_go_of_memory_that_waits(tmp_path: Path) -> None:
    source = numbered_source(tmp_path, [4000], 256)
    loader = DataLoader(source, 100)
    for batch in loader:
        del batch
    gone: deque[object] = deque()
    waiting = [weakref.ref(pages, gone.append) for pages in loader._engine._delivery._buffers[0]._all]  # type: ignore[union-attr]
    loader.close()
    assert waiting
    assert len(gone) == len(waiting)


def test_pages_count_as_used_while_any_tensor_is_there() -> None:
    buffers = Buffers(Field(name="x", dtype=torch.float32, shape=(1 << 16,)), 1)
    buffers.most = 1
    held = buffers.tensor(buffers.take(), 0, 1)
    place = held.data_ptr()
    array = held.numpy()
    del held
    other = buffers.tensor(buffers.take(), 0, 1)
    assert other.data_ptr() != place, "numpy holds it"
    del array, other
    again = buffers.tensor(buffers.take(), 0, 1)
    place = again.data_ptr()
    del again
    assert buffers.tensor(buffers.take(), 0, 1).data_ptr() == place


def test_what_counts_as_used_does_not_depend_on_a_debugger() -> None:
    """One that looked at all names while the module was imported made a buffer with one holder look free."""
    code = (
        "import sys\n"
        "def look(frame, *_):\n"
        "    frame.f_locals\n"
        "    return look\n"
        "import torch\n"
        "sys.settrace(look)\n"
        "from stormtorch.data.delivery.buffers import _UNUSED, Buffers\n"
        "sys.settrace(None)\n"
        "from stormtorch.data.delivery.buffers import _reference_count\n"
        "from collections import deque\n"
        "print(_UNUSED == _reference_count(deque([(__import__('ctypes').c_ubyte * 1)()])))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


@pytest.mark.parametrize("kind", ["rows", pytest.param("items", marks=pytest.mark.wide)])
def test_a_script_may_end_in_the_middle_of_a_loop(tmp_path: Path, kind: str) -> None:
    """Its loop is dropped after the modules that it would need to end in order."""
    np.save(tmp_path / "x.npy", np.arange(4000).reshape(1000, 4))
    data = "sys.argv[1]" if kind == "rows" else "torch.utils.data.TensorDataset(torch.arange(1000))"
    code = (
        "import sys\n"
        "import torch\n"
        "import stormtorch as storm\n"
        f"loader = storm.DataLoader({data}, 10, device='cpu')\n"
        "it = iter(loader)\n"
        "first = next(it)\n"
    )
    for more in ("", "import gc; gc.disable()\n", "loader.self = [it]; del it, first\n"):
        command = [sys.executable, "-c", code + more, str(tmp_path / "x.npy")]
        start = run if more else subprocess.run  # once with all that an interpreter clears away
        done = start(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("late", [False, True], ids=["cpu", "late"])
def test_interrupted_between_sent_and_no_longer_pending(
    tmp_path: Path, group: int, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C is what the user sees, and all is there in the next loop."""
    monkeypatch.setattr("stormtorch.data.delivery.row_engine.batches_at_once", lambda *_, **__: group)
    if late:
        deliver_late(monkeypatch, group)

    pressed: list[bool] = []

    class Pressing(deque[Any]):
        def popleft(self) -> Any:
            if not pressed:
                pressed.append(True)
                raise KeyboardInterrupt
            return super().popleft()

    with DataLoader(numbered_source(tmp_path, [200]), 16) as loader:
        batches = iter(loader)
        next(batches)
        engine: Any = loader._engine
        engine._pending = Pressing(engine._pending)
        with pytest.raises(KeyboardInterrupt):
            deque(batches)
        loader.set_epoch(0)
        assert rows_of(loader) == list(range(200))


def test_drop_last_and_ranks(source: FileSource) -> None:
    with DataLoader(source, 16, drop_last=True) as loader:
        assert [len(batch) for batch in loader] == [16] * 6
    ranks = [DataLoader(source, 16, shuffle=True, rank=rank, world=3) for rank in range(3)]
    rows = [rows_of(loader) for loader in ranks]
    assert [len(found) for found in rows] == [34] * 3
    assert set().union(*rows) == set(range(100))
    for loader in ranks:
        loader.close()


def test_several_loaders_at_once(source: FileSource) -> None:
    loaders = [DataLoader(source, 9, shuffle=True, seed=seed) for seed in range(4)]
    wanted = [rows_of(loader) for loader in loaders]
    for loader in loaders:
        loader.set_epoch(0)
    found: list[list[int]] = [[] for _ in loaders]
    for batches in zip(*loaders, strict=True):
        for number, batch in enumerate(batches):
            found[number] += rows_in(batch)
    assert found == wanted
    for loader in loaders:
        loader.close()


def test_transforms_run_on_the_device(tmp_path: Path, device: torch.device) -> None:
    np.save(tmp_path / "image.npy", np.arange(40 * 3 * 4, dtype=np.uint8).reshape(40, 3, 4))
    np.save(tmp_path / "tokens.npy", np.arange(40, dtype=np.uint16))
    files = {"image": tmp_path / "image.npy", "tokens": tmp_path / "tokens.npy"}
    transform: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "image": Normalise((1.0, 2.0, 3.0), 2.0),
        "tokens": Cast(torch.int64),
    }
    with DataLoader(files, 40, device=device, transform=transform) as loader:
        batch = next(iter(loader))
    plain = torch.from_numpy(np.load(tmp_path / "image.npy")).float()
    wanted = (plain - torch.tensor([1.0, 2.0, 3.0])[:, None]) / 2
    assert torch.equal(batch["image"].cpu(), wanted)
    assert batch["tokens"].tolist() == list(range(40))
    assert batch["tokens"].dtype == torch.int64
    assert batch["tokens"].device.type == device.type
    with DataLoader(files["image"], 40, device=device, transform=lambda images: (images.sum(), len(images))) as loader:
        assert next(iter(loader))[1] == 40


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, r"batch_size=0 .* at least 1"),
        ({"batch_size": True}, "batch_size=True"),
        ({"epochs": 0}, "epochs=0"),
        ({"seed": -1}, "seed=-1"),
        ({"nan": "warn"}, "Accepted: 'allow', 'error'"),
        ({"workers": 0}, "workers=0"),
        ({"reading": "mmap"}, "reading='mmap'"),
        ({"shuffle": 3}, "shuffle=3"),
        ({"window": "8G"}, "window='8G'"),
        ({"device": "tpu"}, "device='tpu'"),
        ({"transform": {"z": Cast(torch.int64)}}, "'z', which is not a field. The fields are: x"),
        ({"transform": 3}, "transform=3 cannot be called"),
        ({"batch_size": 200, "drop_last": True}, r"has 100 rows, which fill no batch: batch_size=200"),
        ({"batch_size": 60, "drop_last": True, "world": 2}, r"fill no batch: batch_size=60, world=2"),
    ],
)
def test_what_cannot_be_meant_is_refused(source: FileSource, settings: dict[str, object], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        DataLoader(source, **settings)  # type: ignore[arg-type]


def test_a_batch_larger_than_the_data_is_all_of_it(source: FileSource) -> None:
    with DataLoader(source, 1000) as loader:
        assert rows_of(loader) == list(range(100))
        assert len(loader) == 1


def test_nan_is_found_with_its_row(tmp_path: Path) -> None:
    data = np.ones((100, 8), dtype=np.float32)
    data[3, 3] = np.inf
    data[42, 7] = np.nan
    np.save(tmp_path / "x.npy", data)
    np.save(tmp_path / "y.npy", np.arange(100))
    files = {"y": tmp_path / "y.npy", "x": tmp_path / "x.npy"}
    with DataLoader(files, 10, nan="error") as loader:
        with pytest.raises(StorageError, match=r"NaN in field 'x' of row 42 of .*x\.npy .*nan='allow'"):
            list(loader)
        assert loader.state_dict()["batch"] == 4, "infinities are numbers, and batches before it are good"
    with DataLoader(files, 10) as loader:
        assert len(list(loader)) == 10


def test_the_report_says_what_happened(source: FileSource) -> None:
    with DataLoader(source, 10, shuffle=True) as loader:
        assert loader.report().samples == 0
        list(loader)
        report = loader.report()
        assert (report.samples, report.bytes) == (100, 100 * 64 * 4)
        assert report.reading == "cached"
        assert "RAM free" in report.reason
        assert report.samples_per_s > 0
        assert report.ring_bytes > 0
        assert report.depth >= 1
        assert "100 samples" in str(report)
        assert "cached" in repr(loader)


def standing() -> tuple[int, int, int]:
    gc.collect()
    process = psutil.Process()
    until = time.monotonic() + 2
    count = process.num_threads()
    while time.monotonic() < until and (now := process.num_threads()) != count:  # they end a little after their join
        count = now
    return threading.active_count(), process.num_threads(), len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("reading", ["cached", "direct"])
def test_nothing_is_left_however_a_loader_ends(source: FileSource, device: torch.device, reading: str) -> None:
    def use(how: str) -> None:
        loader = DataLoader(source, 10, shuffle=True, device=device, reading=reading)  # type: ignore[arg-type]
        for _ in islice(loader, 3):
            pass
        if how == "close":
            loader.close()
            loader.close()
        elif how == "again":
            assert len(list(loader)) == 10
            loader.close()
            assert len(list(loader)) == 10, "a later loop opens everything again"
            loader.close()

    for _ in range(3):
        use("close")
    time.sleep(0.05)
    before = standing()
    for how in ("close", "again", "drop") * 5:
        use(how)
    time.sleep(0.05)
    assert standing() == before


def own_bytes() -> int:
    """Memory of this process that is not the page cache's, which a map of a file shows."""
    memory = psutil.Process().memory_info()
    return int(memory.rss - memory.shared)


def test_memory_stays_flat(tmp_path: Path) -> None:
    source = numbered_source(tmp_path, [20_000], 1024)  # 80 MB
    for reading in ("cached", "direct"):
        with DataLoader(
            source,
            64,
            shuffle=True,
            reading=reading,
            window="8MiB",
            ram="64MiB",
        ) as loader:
            for _ in range(2):  # in which the depth is found
                for _ in loader:
                    pass
            before = own_bytes()
            for _ in range(4):
                for _ in loader:
                    pass
            assert own_bytes() - before < 20 * MiB, "320 MB went through"
            assert loader.report().ring_bytes <= 64 * MiB


def test_a_forked_child_reads_by_itself(source: FileSource) -> None:
    with DataLoader(source, 10, shuffle=True) as loader:
        wanted = rows_of(loader)
        loader.set_epoch(0)
        running = iter(loader)
        next(running)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of threads here; that is the test
            child = os.fork()
        if child == 0:
            outcome = 1
            try:
                try:
                    next(running)
                except StormError as error:
                    outcome = 2 if "fork" in str(error) else 3
                loader.set_epoch(0)
                if outcome == 2 and rows_of(loader) == wanted:
                    outcome = 0
            finally:
                os._exit(outcome)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert [row for batch in running for row in rows_in(batch)] == wanted[10:]


class Squares(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 50

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"row": torch.tensor(row), "square": torch.full((3,), row * row)}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_torch_dataset(workers: int, device: torch.device) -> None:
    with DataLoader(Squares(), 8, shuffle=True, workers=workers, device=device) as loader:
        assert len(loader) == 7
        seen = []
        for batch in loader:
            seen += batch["row"].tolist()
            assert batch["square"].device.type == device.type
            assert torch.equal(batch["square"][:, 0], batch["row"] ** 2)
        assert sorted(seen) == list(range(50))
        assert seen == loader._order.rows(0, 0, 50).tolist()
        state = None
        for number, _ in enumerate(loader):
            if number == 2:
                state = loader.state_dict()
                break
        assert state is not None
    with DataLoader(Squares(), 8, shuffle=True, workers=0, device=device) as other:
        other.load_state_dict(state)
        rest = [row for batch in other for row in batch["row"].tolist()]
        assert rest == other._order.rows(1, 24, 26).tolist()


class Measured(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"row": torch.tensor(row), "x": torch.full((2, 2), float("nan") if row == 13 else 1.0)}


def test_settings_hold_for_a_torch_dataset_too(device: torch.device) -> None:
    with DataLoader(Measured(), 4, shuffle=True, workers=0, nan="error", device=device) as loader:
        with pytest.raises(StorageError, match=r"NaN in item 13 of Measured, .*nan='allow'"):
            list(loader)
        assert loader.state_dict()["batch"] == loader._order.rows(0, 0, 20).tolist().index(13) // 4
    with DataLoader(Measured(), 4, workers=0, transform={"row": Cast(torch.float64)}, device=device) as loader:
        batch = next(iter(loader))
        assert batch["row"].dtype == torch.float64
        assert batch["x"].dtype == torch.float32
    with pytest.raises(SettingError, match=r"'z', which is not a field of Measured\. Its fields: row, x"):
        list(DataLoader(Measured(), 4, workers=0, transform={"z": Cast(torch.float64)}))
    pairs = torch.utils.data.TensorDataset(torch.arange(3), torch.arange(3))
    with pytest.raises(SettingError, match="batches of TensorDataset are lists without names"):
        list(DataLoader(pairs, 2, workers=0, transform={"z": Cast(torch.float64)}))
    with pytest.raises(SettingError, match="transform=3 cannot be called"):
        DataLoader(Measured(), transform=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("group", [1, 4, 58])
@pytest.mark.parametrize("reading", ["cached", "direct"])
def test_copies_that_take_their_time(tmp_path: Path, reading: str, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way to a GPU with the CPU in its role, and a lane that is late: a missing wait would be a wrong number."""

    deliver_late(monkeypatch, group)
    source = numbered_source(tmp_path, [500, 77])
    with DataLoader(source, 10, shuffle=True, reading=reading, epochs=2) as loader:  # type: ignore[arg-type]
        batches = list(loader)
        wanted = [row for epoch in (0, 1) for row in loader._order.rows(epoch, 0, 577).tolist()]
        assert [row for batch in batches for row in rows_in(batch)] == wanted
        for _ in islice(loader, 5):
            pass
        assert len(rows_of(loader)) == 2 * 577
        loader._engine._ledger.check()  # type: ignore[union-attr]


@pytest.mark.parametrize("reading", ["cached", "direct"])
@pytest.mark.parametrize("drop_last", [True, False])
def test_a_state_within_a_group(
    tmp_path: Path, reading: Reading, drop_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loader that continues from it may send other groups, or none."""
    source = numbered_source(tmp_path, [300, 77])
    settings: dict[str, Any] = {"shuffle": True, "reading": reading, "epochs": 2, "drop_last": drop_last}
    deliver_late(monkeypatch, 4)
    with DataLoader(source, 10, **settings) as loader:
        whole = [rows_in(batch) for batch in loader]
    for stop, group in ((1, 4), (6, 3), (37, 4), (38, 1), (40, 5)):
        deliver_late(monkeypatch, 4)
        with DataLoader(source, 10, **settings) as loader:
            before = [rows_in(batch) for batch in islice(loader, stop)]
            state = loader.state_dict()
        deliver_late(monkeypatch, group)
        with DataLoader(source, 10, **settings) as loader:
            loader.load_state_dict(state)
            assert before + [rows_in(batch) for batch in loader] == whole


def test_batches_of_a_group_are_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To change one, or to give it other memory, does nothing to the next; what is kept of a group is what is held."""
    deliver_late(monkeypatch, 4)
    with DataLoader(numbered_source(tmp_path, [80]), 10) as loader:
        given = []
        for number, batch in enumerate(loader):
            assert rows_in(batch) == list(range(10 * number, 10 * number + 10))
            assert batch._base is None
            assert batch.untyped_storage().nbytes() == batch.nbytes
            batch.resize_(20, 64).fill_(-1)
            given.append(batch)
        assert len({batch.data_ptr() for batch in given}) == 8


@pytest.mark.parametrize("reading", ["cached", "direct"])
def test_an_error_comes_when_its_batch_is_due(
    tmp_path: Path, reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of the same group that come before it can be read, and are given."""
    deliver_late(monkeypatch, 8)
    rows = numbered(200, 8)
    rows[137, 3] = np.nan
    np.save(tmp_path / "rows.npy", rows)
    given: list[list[int]] = []
    with DataLoader(tmp_path / "rows.npy", 10, reading=reading, nan="error") as loader:
        with pytest.raises(StorageError, match="row 137"):
            given.extend(rows_in(batch) for batch in loader)
        assert given == [list(range(at, at + 10)) for at in range(0, 130, 10)]
        assert loader.state_dict()["batch"] == 13


def parquet_of(folder: Path, groups: list[int]) -> Path:
    """Rows of 1 KiB, in groups of so many."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    def table(rows: int) -> Any:
        values = arrow.array(np.zeros(256 * rows, dtype=np.float32))
        return arrow.table({"x": arrow.FixedSizeListArray.from_arrays(values, 256)})

    with parquet.ParquetWriter(folder / "x.parquet", table(1).schema) as writer:
        for rows in groups:
            writer.write_table(table(rows), row_group_size=rows)
    return folder / "x.parquet"


@pytest.mark.parametrize(("group", "ram"), [(0, "1100KiB"), (2, "1500KiB")], ids=["cpu", "lane"])
def test_memory_for_one_window_at_a_time(tmp_path: Path, group: int, ram: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that end with their window need no more; others say what they lack when it is their turn."""
    if group:
        deliver_late(monkeypatch, group)
    path = parquet_of(tmp_path, [512] * 4)
    with DataLoader(path, 16, window="512KiB", ram="1100KiB") as loader:
        assert sum(len(batch) for batch in loader) == 2048
    rows: list[int] = []
    with (
        DataLoader(path, 24, window="512KiB", ram=ram) as loader,
        pytest.raises(OutOfBudget, match="decode group 1"),
    ):
        rows.extend(len(batch) for batch in loader)
    assert sum(rows) == 504


@pytest.mark.parametrize("group", [0, 8], ids=["cpu", "lane"])
def test_what_comes_before_a_window_that_is_too_large_is_given(
    tmp_path: Path, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if group:
        deliver_late(monkeypatch, group)
    path, rows = parquet_of(tmp_path, [256, 256, 4096]), list[int]()
    with (
        DataLoader(path, 16, window="256KiB", ram="2MiB") as loader,
        pytest.raises(OutOfBudget, match="decode group 2"),
    ):
        rows.extend(len(batch) for batch in loader)
    assert sum(rows) == 512


@pytest.mark.parametrize("reading", ["cached", "direct"])
def test_groups_are_of_equal_size_and_touch_no_window_that_their_first_batch_does_not(
    tmp_path: Path, reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each costs the same, however small; and there is memory for those windows alone."""
    deliver_late(monkeypatch, 7)
    source = numbered_source(tmp_path, [1000, 1000])
    with DataLoader(source, 16, shuffle=True, reading=reading, window=256 * 256) as loader:
        window = loader._order.window_rows
        assert window % 16 != 0
        next(iter(loader))
        reader, groups = loader._engine._reader, []  # type: ignore[union-attr]
        start = reader.start

        def note(epoch: int, first: int, count: int, *rest: Any) -> Any:
            read = start(epoch, first, count, *rest)
            if read is not None:
                groups.append((first, -(-count // 16)))
            return read

        monkeypatch.setattr(reader, "start", note)
        loader.set_epoch(0)
        assert sorted(rows_of(loader)) == list(range(2000))
    assert [first for first, _ in groups] == [16 * sum(size for _, size in groups[:at]) for at in range(len(groups))]
    sizes = [size for _, size in groups]
    assert sizes[:3] == [1, 2, 4]  # the first batch does not wait for a large one
    if reading == "cached":
        assert set(sizes[3:]) == {7, 6}
        assert len(sizes) == 3 + 17  # of 125 batches
    else:
        assert min(sizes[3:-1]) > 3
        for first, size in groups:
            assert (first + 16 * size - 1) // window == (first + 15) // window or first + 16 * size > 2000


@pytest.mark.parametrize("bad", [3, 5])
@pytest.mark.parametrize("once", [True, False])
def test_a_group_that_cannot_be_sent_is_not_left_out(
    tmp_path: Path, bad: int, once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    deliver_late(monkeypatch, 4)
    send, count = LaneDelivery.send, 0

    def fail(delivery: LaneDelivery, group: Any) -> None:
        nonlocal count
        count += 1
        if count == bad or (count > bad and not once):
            raise LaneError("the lane has failed")
        send(delivery, group)

    monkeypatch.setattr(LaneDelivery, "send", fail)
    seen: list[int] = []

    def collect(loader: DataLoader) -> None:
        for batch in loader:
            seen.extend(rows_in(batch))

    with DataLoader(numbered_source(tmp_path, [100]), 5) as loader:
        if once:
            collect(loader)
        else:
            with pytest.raises(LaneError, match="the lane has failed"):
                collect(loader)
    assert seen == list(range(100 if once else len(seen)))


@pytest.mark.parametrize("group", [1, 7])
def test_memory_on_the_device_is_taken_ahead(tmp_path: Path, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for groups that are not full; and batches that are the user's have no more than they need."""
    deliver_late(monkeypatch, group)
    allocate, sends = LaneDelivery._allocate, list[bool]()  # whether that was what a send did

    def note(delivery: LaneDelivery, count: int) -> Any:
        sends.append(sys._getframe(1).f_code.co_name == "send")
        return allocate(delivery, count)

    monkeypatch.setattr(LaneDelivery, "_allocate", note)
    with DataLoader(numbered_source(tmp_path, [1000]), 16, epochs=2) as loader:
        for batch in loader:
            assert batch.untyped_storage().nbytes() == batch.nbytes
    assert sum(sends) == (3 + 2 if group == 1 else 1)  # the first ones; with single batches, the short ones


def test_small_batches_travel_together() -> None:
    def at_once(
        row_bytes: int, *, most_rows: int = 1 << 20, free_bytes: int = 1 << 40, device: str = "cuda", rows: int = 16
    ) -> int:
        return batches_at_once(
            torch.device(device),
            batch_rows=rows,
            fields=[Field(name="x", dtype=torch.uint8, shape=(row_bytes,))],
            most_rows=most_rows,
            free_bytes=free_bytes,
        )

    assert at_once(MiB - 56) == 2
    assert at_once((MiB // 8) - 56) == 16
    assert at_once((MiB // 8) - 56, most_rows=5 * 16 + 15) == 5
    assert at_once(4) == 32
    assert at_once(4, rows=1 << 17) == 4, "rows take memory beside their own bytes"
    assert at_once(1 << 30) == 1
    assert at_once(MiB - 56, free_bytes=32 * MiB) == 1
    assert at_once(4, most_rows=0) == 1
    assert at_once(4, free_bytes=-5) == 1
    assert at_once(4, device="cpu") == 8
    assert at_once(3, device="cpu") == 1, "batches that do not end with a cache line"
    assert at_once(MiB // 8 - 56, device="cpu") == 4


@pytest.mark.gpu
def test_a_group_is_used_on_several_streams(tmp_path: Path) -> None:
    """Each batch is ready for the stream that is current when it is given."""
    source = numbered_source(tmp_path, [3000], 1024)
    streams = [torch.cuda.current_stream(), *(torch.cuda.Stream() for _ in range(6))]  # 7: groups begin on any of them
    sums, wanted = [], []
    with DataLoader(source, 50, shuffle=True, device="cuda") as loader:
        batches = iter(loader)
        for number in range(60):
            with torch.cuda.stream(streams[number % 7]):
                batch = next(batches)
                if number % 3 == 0:
                    torch.cuda._sleep(2_000_000)
                sums.append(batch[:, 0].double().sum())
                del batch
            wanted.append(float(loader._order.rows(0, number * 50, 50).sum()))
        torch.cuda.synchronize()
        assert [float(value) for value in sums] == wanted
        assert loader._engine._group > 1  # type: ignore[union-attr]


@pytest.mark.gpu
def test_device_memory_is_never_used_too_early(tmp_path: Path) -> None:
    """The user's stream is made slow; batches that were freed, kept or used on another stream hold what was read."""
    source = numbered_source(tmp_path, [3000], 1024)
    side = torch.cuda.Stream()
    sums, wanted = [], []
    with DataLoader(source, 50, shuffle=True, device="cuda", epochs=2) as loader:
        order = loader._order
        for number, batch in enumerate(loader):
            torch.cuda._sleep(2_000_000)
            noise = torch.empty_like(batch).fill_(-1)
            if number % 3 == 0:
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    sums.append(batch[:, 0].double().sum())
                batch.record_stream(side)
            else:
                sums.append(batch[:, 0].double().sum())
            del noise
            epoch, at = divmod(number, 60)
            wanted.append(float(order.rows(epoch, at * 50, 50).sum()))
    torch.cuda.synchronize()
    assert [float(value) for value in sums] == wanted
