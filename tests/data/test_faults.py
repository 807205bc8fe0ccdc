"""What goes wrong with files and users: an error with the file and the row, at once, and nothing left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stormtorch.core.errors import StorageError, StormError
from stormtorch.data.loader import DataLoader
from stormtorch.data.source import FileSource

from ..forkserver import Popen
from ..keyboard import Keyboard
from .made import deliver_late, numbered_source, rows_in

READINGS = pytest.mark.parametrize("reading", ["cached", "direct"])


@pytest.fixture(autouse=True, params=[0, 8], ids=["cpu", "lane"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches come as they are read, or, as to a GPU, in groups over a lane."""
    if request.param:
        deliver_late(monkeypatch, request.param)


@pytest.fixture
def source(tmp_path: Path) -> FileSource:
    return numbered_source(tmp_path, [1000, 1000])


def collect(loader: DataLoader, seen: list[int]) -> None:
    """Add the rows of every batch that comes."""
    for batch in loader:
        seen.extend(rows_in(batch))


def threads_of_ours() -> list[str]:
    names = []
    for task in Path("/proc/self/task").iterdir():
        try:
            names.append((task / "comm").read_text().strip())
        except OSError:
            continue
    return [name for name in names if name.startswith(("storm-rows", "storm-decode"))]


@pytest.fixture(autouse=True)
def _no_threads_left() -> Any:
    yield
    _expect_no_threads("the end of the test")


def _expect_no_threads(after: str) -> None:
    until = time.monotonic() + 300
    while threads_of_ours() and time.monotonic() < until:
        time.sleep(0.005)
    assert not threads_of_ours(), after


@READINGS
def test_a_file_that_was_cut_is_told_with_the_row(source: FileSource, tmp_path: Path, reading: Any) -> None:
    os.truncate(tmp_path / "shard1.bin", 500 * 256 + 100)
    seen: list[int] = []
    message = r"row 500 of .*shard1\.bin \(row 1500 of numbered\).*byte 128256.*128100 bytes now"
    with (
        DataLoader(source, 10, reading=reading, window=100 * 256) as loader,
        pytest.raises(StorageError, match=message),
    ):
        collect(loader, seen)
    assert seen == list(range(1500)), "what comes before is still given"


@READINGS
def test_a_file_that_shrinks_in_mid_epoch(source: FileSource, tmp_path: Path, reading: Any) -> None:
    with DataLoader(source, 10, shuffle=True, reading=reading, window=100 * 256) as loader:
        batches = iter(loader)
        for _ in range(4):
            next(batches)
        os.truncate(tmp_path / "shard0.bin", 0)
        with pytest.raises(StorageError, match=r"of .*shard0\.bin .*the file has 0 bytes now"):
            list(batches)
        state = loader.state_dict()
        assert 4 <= state["batch"] < 200
        numbered_source(tmp_path, [1000, 1000])  # restored
        loader.load_state_dict(state)
        rest = [row for batch in loader for row in rows_in(batch)]
        assert rest == loader._order.rows(0, state["batch"] * 10, 2000 - state["batch"] * 10).tolist()


@READINGS
def test_a_file_that_vanishes_before_it_was_opened(source: FileSource, tmp_path: Path, reading: Any) -> None:
    (tmp_path / "shard1.bin").unlink()
    seen: list[int] = []
    message = r"row 0 of .*shard1\.bin \(row 1000 of numbered\): it does not exist"
    with (
        DataLoader(source, 10, reading=reading, window=100 * 256) as loader,
        pytest.raises(StorageError, match=message),
    ):
        collect(loader, seen)
    assert seen == list(range(1000))


@READINGS
def test_a_file_that_may_not_be_read(source: FileSource, tmp_path: Path, reading: Any) -> None:
    if os.geteuid() == 0:  # root may read everything, but not a directory
        (tmp_path / "shard0.bin").unlink()
        (tmp_path / "shard0.bin").mkdir()
    else:
        (tmp_path / "shard0.bin").chmod(0)
    with DataLoader(source, 10, reading=reading) as loader, pytest.raises(StorageError, match=r"shard0\.bin"):
        next(iter(loader))


def test_no_data_at_all(tmp_path: Path) -> None:
    with pytest.raises(StormError):
        DataLoader(tmp_path / "nothing", 10)
    (tmp_path / "folder").mkdir()
    with pytest.raises(StormError):
        DataLoader(tmp_path / "folder", 10)


@READINGS
def test_a_loader_goes_on_after_an_error(source: FileSource, tmp_path: Path, reading: Any) -> None:
    with DataLoader(source, 10, reading=reading, window=100 * 256) as loader:
        content = (tmp_path / "shard1.bin").read_bytes()
        os.truncate(tmp_path / "shard1.bin", 0)
        with pytest.raises(StorageError):
            list(loader)
        (tmp_path / "shard1.bin").write_bytes(content)
        loader.set_epoch(0)
        assert [row for batch in loader for row in rows_in(batch)] == list(range(2000))


def _press_until(ended: threading.Event) -> None:
    """Press Ctrl-C, and again after a while: Python drops the exception if a finalizer runs at that moment."""
    pause_s = 0.05
    while not ended.wait(pause_s):
        os.kill(os.getpid(), signal.SIGINT)
        pause_s = 5.0


@READINGS
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a file that psutil was just opening
def test_ctrl_c_ends_at_once_and_the_loader_can_go_on(source: FileSource, reading: Any) -> None:
    with DataLoader(source, 7, shuffle=True, reading=reading, window=100 * 256, epochs=10_000) as loader:
        for _ in range(5):
            ended = threading.Event()
            keyboard = threading.Thread(target=_press_until, args=(ended,))
            keyboard.start()
            begin = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                collect(loader, [])
            ended.set()
            assert time.monotonic() - begin < 60
            keyboard.join()
            state = loader.state_dict()
            loader.load_state_dict(state)
            for batch in loader:
                first = state["batch"] * 7
                wanted = loader._order.rows(state["epoch"], first, min(7, 2000 - first))
                assert rows_in(batch) == wanted.tolist()
                break


FILES = (
    *(f"data/readers/{name}.py" for name in ("cached_reader", "window_reader", "file_windows")),
    *(f"data/readers/{name}.py" for name in ("descriptors", "choice")),
    *(f"data/delivery/{name}.py" for name in ("to_device", "row_engine")),
    "native/rows/c_rows.py",
)


@READINGS
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt inside a finalizer
def test_ctrl_c_between_any_two_lines(source: FileSource, reading: Any) -> None:
    for at in range(1, 1500, 61):
        with DataLoader(source, 100, shuffle=True, reading=reading, window=200 * 256) as loader:
            next(iter(loader))
            loader.set_epoch(0)
            keyboard = Keyboard(at, FILES)
            ended = keyboard.during(partial(collect, loader, []))
            if not keyboard.was_pressed:
                assert at > 600
                return  # all batches have come within fewer lines
            if not ended:  # else it came inside a finalizer, where Python ignores it
                state = loader.state_dict()
                loader.load_state_dict(state)
                done = state["batch"] * 100
                is_over = state["epoch"] > state["run_epoch"]  # the last batch was given, and the next one asked for
                wanted = [] if is_over else loader._order.rows(state["epoch"], done, 2000 - done).tolist()
                assert [row for batch in loader for row in rows_in(batch)] == wanted
        _expect_no_threads(keyboard.where)


@READINGS
def test_a_file_that_was_put_back_is_read(source: FileSource, tmp_path: Path, reading: Any) -> None:
    with DataLoader(source, 10, reading=reading, window=100 * 256) as loader:
        (tmp_path / "copy").write_bytes((tmp_path / "shard1.bin").read_bytes())
        os.truncate(tmp_path / "shard1.bin", 0)
        with pytest.raises(StorageError):
            list(loader)
        (tmp_path / "copy").replace(tmp_path / "shard1.bin")  # another file under the same name
        loader.set_epoch(0)
        assert [row for batch in loader for row in rows_in(batch)] == list(range(2000))


INTERRUPTED = """
import os, signal, sys, threading, time
import numpy as np
from stormtorch.data.loader import DataLoader
loader = DataLoader({path!r}, 4, shuffle=True, epochs=10**6, reading={reading!r}, window=100_000)
print("ready", flush=True)
for batch in loader:
    pass
"""


@pytest.mark.parametrize("_way", [0], indirect=True)  # which is set in this process alone
def test_a_process_ends_by_ctrl_c(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((5000, 64), dtype=np.float32))
    codes = [INTERRUPTED.format(path=str(tmp_path / "x.npy"), reading=reading) for reading in ("cached", "direct")]
    children = [
        Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for code in codes  # at once: most of their time is imports
    ]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    time.sleep(0.2)
    for child in children:
        child.send_signal(signal.SIGINT)
    begin = time.monotonic()
    for child in children:
        _, errors = child.communicate(timeout=500)
        assert time.monotonic() - begin < 100
        assert "KeyboardInterrupt" in errors
        assert child.returncode != 0


def test_threads_end_when_the_loop_raises(source: FileSource) -> None:
    loader = DataLoader(source, 10)
    with pytest.raises(AttributeError):  # None holds no rows
        collect(loader, None)  # type: ignore[arg-type]
    del loader
