"""A state names the exact next batch, whatever was read ahead, and survives the death of its process."""

from __future__ import annotations

import hashlib
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stormtorch.core.errors import SettingError
from stormtorch.data.loader import DataLoader
from stormtorch.data.source import FileSource

from ..forkserver import Popen, run
from .made import numbered_source, rows_in


def batches_of(loader: DataLoader) -> list[list[int]]:
    return [rows_in(batch) for batch in loader]


@settings(max_examples=25)
@given(
    stop=st.integers(1, 22),
    shuffle=st.sampled_from([True, False, "full"]),
    drop_last=st.booleans(),
    window=st.sampled_from([2000, 9000, 1 << 28]),
    ways=st.tuples(st.sampled_from(["cached", "direct"]), st.sampled_from(["cached", "direct"])),
    workers=st.integers(1, 3),
)
def test_a_state_goes_on_with_the_next_batch(
    tmp_path: Path, stop: int, shuffle: Any, drop_last: bool, window: int, ways: tuple[Any, Any], workers: int
) -> None:
    source = numbered_source(tmp_path, [50, 25])

    def loader(reading: Any, threads: int) -> DataLoader:
        reading = "cached" if shuffle == "full" else reading
        return DataLoader(
            source,
            7,
            shuffle=shuffle,
            drop_last=drop_last,
            window=window,
            epochs=2,
            reading=reading,
            workers=threads,
        )

    with loader("cached", 1) as plain:
        wanted = batches_of(plain)
        following = batches_of(plain)
    stop = min(stop, len(wanted))
    with loader(ways[0], workers) as first:
        seen = []
        for batch in first:
            seen.append(rows_in(batch))
            if len(seen) == stop:
                state = json.loads(json.dumps(first.state_dict()))
                break
    with loader(ways[1], 4 - workers) as second:
        second.load_state_dict(state)
        assert second.state_dict() == state
        assert seen + batches_of(second) == wanted
        assert batches_of(second) == following, "and the loop after that is a new one"


@pytest.fixture
def source(tmp_path: Path) -> FileSource:
    return numbered_source(tmp_path, [50, 25])


def test_a_state_between_loops(source: FileSource) -> None:
    with DataLoader(source, 10, shuffle=True) as loader:
        epochs = [batches_of(loader) for _ in range(3)]
        loader.set_epoch(0)
        list(loader)
        state = loader.state_dict()
        list(loader)
        loader.load_state_dict(state)
        assert batches_of(loader) == epochs[1]
        for _ in loader:
            break
        loader.load_state_dict(state)
        loader.set_epoch(1)
        assert batches_of(loader) == epochs[1]
        loader.load_state_dict({**state, "batch": 3})
        loader.set_epoch(1)  # as a loop over epochs does before each: the place stays
        assert batches_of(loader) == epochs[1][3:]


def test_a_loop_of_which_nothing_was_asked_has_not_begun(source: FileSource) -> None:
    with DataLoader(source, 10, shuffle=True) as loader:
        wanted = batches_of(loader)
        loader.load_state_dict({**loader.state_dict(), "epoch": 0, "batch": 3, "run_epoch": 0})
        iter(loader)
        assert batches_of(loader) == wanted[3:]


def test_a_state_of_something_else_is_refused(source: FileSource, tmp_path: Path) -> None:
    with DataLoader(source, 10, shuffle=True) as loader:
        state = loader.state_dict()
        for settings_of, message in (
            ({"batch_size": 5}, "batch_size=10, this loader has batch_size=5"),
            ({"seed": 1}, "seed=0, this loader has seed=1"),
            ({"shuffle": False}, "shuffle=True"),
            ({"rank": 1, "world": 2}, "rank=0"),
            ({"drop_last": True}, "drop_last=False"),
            ({"window": "1MiB"}, "window="),
        ):
            other = DataLoader(source, **{"batch_size": 10, "shuffle": True, **settings_of})  # type: ignore[arg-type]
            with pytest.raises(SettingError, match=message):
                other.load_state_dict(state)
        folder = tmp_path / "other"
        folder.mkdir()
        with pytest.raises(SettingError, match="other data"):
            DataLoader(numbered_source(folder, [25, 50]), 10, shuffle=True).load_state_dict(state)
        for bad, message in (
            ({}, "not a state of a DataLoader"),
            ({name: value for name, value in state.items() if name != "run_epoch"}, "not a state of a DataLoader"),
            ({**state, "version": 99}, "version 99"),
            ({**state, "batch": 8}, "batch 8 of epoch 0"),
            ({**state, "epoch": 2}, "epochs=1"),
        ):
            with pytest.raises(SettingError, match=message):
                loader.load_state_dict(bad)


CHILD = """
import hashlib, json, os, sys
from pathlib import Path
from stormtorch.data.loader import DataLoader
from stormtorch.data.source import Field, FileSource, Shard, Strip
import torch
folder, reading = Path({folder!r}), {reading!r}
field = Field(name="x", dtype=torch.float32, shape=(64,))
shards = tuple(Shard(rows=rows, strips=(Strip(path=folder / f"shard{{i}}.bin", offset=0, stride=256),))
               for i, rows in enumerate((700, 1300)))
loader = DataLoader(FileSource(name="n", fields=(field,), shards=shards), 16, shuffle=True, epochs=3, seed=5,
                    window=65536, reading=reading)
kept = folder / "state.json"
if kept.exists():
    loader.load_state_dict(json.loads(kept.read_text()))
with open(folder / "log", "a") as log:
    for number, batch in enumerate(loader):
        place = loader.state_dict()
        log.write(f"{{place['epoch']}} {{place['batch']}} {{hashlib.sha256(batch.numpy().tobytes()).hexdigest()}}\\n")
        log.flush()
        if number % 5 == 0:
            new = folder / "state.new"
            new.write_text(json.dumps(place))
            os.replace(new, kept)
print("all")
"""


def digests(source: FileSource) -> dict[tuple[int, int], str]:
    """What the child logs if it is left alone."""
    found = {}
    with DataLoader(source, 16, shuffle=True, epochs=3, seed=5, window=65536) as loader:
        for batch in loader:
            place = loader.state_dict()
            found[place["epoch"], place["batch"]] = hashlib.sha256(batch.numpy().tobytes()).hexdigest()
    return found


def test_killed_at_any_moment_the_same_samples_come(tmp_path: Path) -> None:
    """Killed while it reads one way, killed again while it reads the other way, ended by the first."""
    wanted = digests(numbered_source(tmp_path, [700, 1300]))
    assert len(wanted) == 3 * 125
    log = tmp_path / "log"
    log.touch()
    codes = [CHILD.format(folder=str(tmp_path), reading=reading) for reading in ("cached", "direct")]
    for code in codes:
        lines = log.stat().st_size + random.randint(1, 60) * 70  # of about 70 bytes each
        child = Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
        until = time.monotonic() + 300
        while time.monotonic() < until and child.poll() is None and log.stat().st_size < lines:
            time.sleep(0.0005)
        child.send_signal(signal.SIGKILL)
        child.wait()
    done = run([sys.executable, "-c", codes[0]], capture_output=True, text=True, timeout=500, check=False)
    assert done.stdout == "all\n", done.stderr
    found: dict[tuple[int, int], str] = {}
    for line in log.read_text().splitlines():
        epoch, batch, digest = line.split()
        assert found.setdefault((int(epoch), int(batch)), digest) == digest, "a batch that came twice is the same"
    assert found == wanted
