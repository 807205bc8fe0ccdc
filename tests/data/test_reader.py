"""Whichever way data is read, the same bytes come in the same order; memory stays within what was allowed."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stormtorch.core.errors import OutOfBudget, SettingError
from stormtorch.core.sizes import GiB, MiB
from stormtorch.data.delivery import row_engine
from stormtorch.data.loader import DataLoader
from stormtorch.data.readers import file_windows
from stormtorch.data.readers import order as order_module
from stormtorch.data.readers.choice import choose
from stormtorch.data.readers.descriptors import NOT_OPEN, Descriptors, allow_open
from stormtorch.data.readers.order import Order, OrderSettings, Shuffle
from stormtorch.data.readers.window_reader import Windows
from stormtorch.data.source import DecodedSource, Field, FileSource, Shard, Strip
from stormtorch.memory.books import limits
from stormtorch.native import library as library_module
from stormtorch.native.rows.jobs import Pieces, RowsJob, RowsPool
from stormtorch.native.rows.open import open_rows

from .made import numbered_source, rows_in


class Groups(DecodedSource):
    """A numbered source that has to be decoded."""

    def __init__(self, groups: list[int], width: int = 64) -> None:
        self.name, self.groups, self.width = "groups", groups, width
        self.fields = (Field(name="x", dtype=torch.float32, shape=(width,)),)
        self.decoded: list[int] = []

    def decode(self, group: int) -> Mapping[str, Tensor]:
        self.decoded.append(group)
        first = sum(self.groups[:group])
        rows = torch.arange(first, first + self.groups[group], dtype=torch.float32)[:, None]
        return {"x": rows + torch.arange(self.width) / 1024}


@settings(max_examples=25)
@given(
    shards=st.lists(st.integers(1, 120), min_size=1, max_size=5),
    width=st.integers(1, 700),
    header=st.sampled_from([0, 1, 128, 5000]),
    batch=st.integers(1, 150),
    shuffle=st.booleans(),
    window=st.sampled_from([1, 60_000, 300_000, 256 * MiB]),
    world=st.integers(1, 2),
)
def test_both_ways_give_the_rows_of_the_order(
    tmp_path: Path, shards: list[int], width: int, header: int, batch: int, shuffle: bool, window: int, world: int
) -> None:
    source = numbered_source(tmp_path, shards, width, header=header)
    given_rows = []
    for reading in ("cached", "direct"):
        with DataLoader(
            source,
            batch,
            shuffle=shuffle,
            reading=reading,
            window=window,
            world=world,
            rank=world - 1,
            epochs=2,
            workers=2,
        ) as loader:
            order = loader._order
            given_rows.append([row for found in loader for row in rows_in(found)])
            wanted = np.concatenate([order.rows(epoch, 0, order.rows_per_epoch) for epoch in (0, 1)])
            assert given_rows[-1] == wanted.tolist()
    assert given_rows[0] == given_rows[1]


def test_without_the_library_the_same_rows_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = numbered_source(tmp_path, [500, 77], 300, header=10)
    with DataLoader(source, 32, shuffle=True, window=100_000) as loader:
        wanted = [row for batch in loader for row in rows_in(batch)]
    monkeypatch.setattr(library_module, "_load", lambda: "hidden by a test")
    for reading in ("cached", "direct"):
        with DataLoader(source, 32, shuffle=True, window=100_000, reading=reading) as loader:
            assert [row for batch in loader for row in rows_in(batch)] == wanted


class Opened:
    """Takes the place of ``open_rows`` for windows, and keeps what was asked of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads, self.stage_bytes, self.jobs = 0, 0, list[Pieces]()
        monkeypatch.setattr(file_windows, "open_rows", self.open)

    def open(self, threads: int, *, stage_bytes: int = 0) -> RowsPool:
        self.threads, self.stage_bytes = threads, stage_bytes
        pool = open_rows(threads, stage_bytes=stage_bytes)
        submit = pool.submit

        def kept(pieces: Pieces, keep: object) -> RowsJob:
            self.jobs.append(pieces.copy())
            return submit(pieces, keep)

        pool.submit = kept  # type: ignore[method-assign]
        return pool


def test_small_fields_take_no_place_of_large_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Opened(monkeypatch)
    monkeypatch.setattr(order_module, "BLOCK_BYTES", 64 * 1024)
    images, labels = tmp_path / "images.npy", tmp_path / "labels.npy"
    np.save(images, np.zeros((4096, 256), dtype=np.float32))
    np.save(labels, np.arange(4096))
    with DataLoader({"images": images, "labels": labels}, 32, shuffle=True, reading="direct", window="2MiB") as loader:
        assert sorted(int(row) for batch in loader for row in batch["labels"]) == list(range(4096))
    for pieces in opened.jobs:  # threads take them in their order, so as many as threads are in flight at a time
        large = pieces[:, 0] == pieces[pieces[:, 2].argmax(), 0]  # by their file: runs at the ends are short
        counts = np.convolve(large, np.ones(opened.threads), mode="valid")
        assert counts.min() >= file_windows.READ_THREADS


def with_stages(windows: Callable[..., Windows], *arguments: Any, staged: bool, **settings: Any) -> Windows:
    assert not staged, "the CPU computes here"
    return windows(*arguments, staged=True, **settings)


def test_blocks_come_through_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Opened(monkeypatch)
    monkeypatch.setattr(file_windows, "_STAGE_BYTES", 4096)
    monkeypatch.setattr(row_engine, "FileWindows", partial(with_stages, file_windows.FileWindows))
    source = numbered_source(tmp_path, [500, 77], 300, header=10)
    settings: dict[str, Any] = {"shuffle": True, "window": 200_000, "seed": 3, "epochs": 2}
    with DataLoader(source, 4, reading="cached", **settings) as loader:
        wanted = [row for batch in loader for row in rows_in(batch)]
    for stage_bytes, ram in ((4096, "auto"), (0, "520KiB")):  # where RAM is short there are none
        with DataLoader(source, 4, reading="direct", ram=ram, **settings) as loader:
            assert [row for batch in loader for row in rows_in(batch)] == wanted
            assert loader.report().ring_bytes <= 520 * 1024 or ram == "auto"
        assert opened.stage_bytes == stage_bytes


def records(folder: Path, rows: int) -> FileSource:
    """Records of 40 bytes: 8 that are no data, then 4 float32, 3 int16, 10 bytes; and a field in a file of its own."""
    kind = np.dtype([("pad", "V8"), ("x", "<f4", 4), ("y", "<i2", 3), ("z", "u1", 10)])
    assert kind.itemsize == 40
    for number in range(2):
        made = np.zeros(rows, dtype=kind)
        base = np.arange(rows) + number * rows
        made["x"], made["y"], made["z"] = base[:, None], (base % 1000)[:, None], (base % 251)[:, None]
        made.tofile(folder / f"records{number}")
        base.astype("<i8").tofile(folder / f"labels{number}")
    fields = (
        Field(name="y", dtype=torch.int16, shape=(3,)),
        Field(name="x", dtype=torch.float32, shape=(2, 2)),
        Field(name="z", dtype=torch.uint8, shape=(10,)),
        Field(name="label", dtype=torch.int64, shape=()),
    )

    def shard(number: int) -> Shard:
        record, labels = folder / f"records{number}", folder / f"labels{number}"
        inside = (Strip(path=record, offset=at, stride=40) for at in (24, 8, 30))
        return Shard(rows=rows, strips=(*inside, Strip(path=labels, offset=0, stride=8)))

    return FileSource(name="records", fields=fields, shards=(shard(0), shard(1)))


@pytest.mark.parametrize("reading", ["cached", "direct"])
def test_fields_side_by_side_in_records(tmp_path: Path, reading: str) -> None:
    source = records(tmp_path, 1000)
    with DataLoader(source, 64, shuffle=True, window=20_000, reading=reading) as loader:  # type: ignore[arg-type]
        seen = []
        for batch in loader:
            label = batch["label"]
            assert list(batch) == ["y", "x", "z", "label"]
            assert torch.equal(batch["x"], label.float()[:, None, None].expand(-1, 2, 2))
            assert torch.equal(batch["y"], (label % 1000).to(torch.int16)[:, None].expand(-1, 3))
            assert torch.equal(batch["z"], (label % 251).to(torch.uint8)[:, None].expand(-1, 10))
            seen += label.tolist()
    assert sorted(seen) == list(range(2000))


@pytest.mark.parametrize("reading", ["cached", "direct"])
def test_rows_that_overlap(tmp_path: Path, reading: str) -> None:
    path = tmp_path / "flat"
    np.arange(10_001, dtype=np.uint16).tofile(path)
    field = Field(name="tokens", dtype=torch.uint16, shape=(101,))
    shard = Shard(rows=100, strips=(Strip(path=path, offset=0, stride=200),))
    source = FileSource(name="flat", fields=(field,), shards=(shard,))
    with DataLoader(source, 7, shuffle=True, window=3000, reading=reading) as loader:  # type: ignore[arg-type]
        found = torch.cat([batch.to(torch.int64) for batch in loader])
    assert sorted(found[:, 0].tolist()) == list(range(0, 10_000, 100))
    assert torch.equal(found, found[:, :1] + torch.arange(101))


@settings(max_examples=20)
@given(
    groups=st.lists(st.integers(1, 200), min_size=1, max_size=8),
    batch=st.integers(1, 100),
    shuffle=st.booleans(),
    window=st.sampled_from([1000, 30_000, 256 * MiB]),
)
def test_decoded_groups_come_like_files(groups: list[int], batch: int, shuffle: bool, window: int) -> None:
    source = Groups(groups)
    with DataLoader(source, batch, shuffle=shuffle, window=window) as loader:
        seen = [row for found in loader for row in rows_in(found)]
        assert sorted(seen) == list(range(sum(groups)))
        assert seen == loader._order.rows(0, 0, sum(groups)).tolist()
        assert loader.report().reading == "decoded"


def test_a_group_is_decoded_once_an_epoch_though_windows_share_it() -> None:
    source = Groups([100] * 10)
    with DataLoader(source, 10, shuffle=True, window=64 * 4 * 150) as loader:
        for _ in loader:
            pass
        loader.close()
    assert max(source.decoded.count(group) for group in range(10)) <= 2, "once more at most, for the epoch after"


def test_groups_are_charged() -> None:
    source = Groups([1000] * 4, width=256)  # groups of 1 MiB
    with (
        DataLoader(source, 10, ram="800KiB") as loader,
        pytest.raises(OutOfBudget, match=r"decode group 0.*ram='800KiB'"),
    ):
        next(iter(loader))
    with DataLoader(source, 10, ram="1500KiB", window=1000 * 1024) as loader:
        assert sum(len(batch) for batch in loader) == 4000, "one at a time will do"


def test_windows_that_do_not_fit_are_refused_with_what_would(tmp_path: Path) -> None:
    source = numbered_source(tmp_path, [40_000], 256)  # 39 MiB
    with DataLoader(source, 10, shuffle=True, reading="direct", ram="20MiB") as loader:
        message = r"2 windows of 39\.\d MiB.*ram='20MiB'.*window='\d+MiB' would fit"
        with pytest.raises(OutOfBudget, match=message) as caught:
            next(iter(loader))
    size = str(caught.value).split("window='")[1].split("'")[0]
    with DataLoader(source, 10, shuffle=True, reading="direct", ram="20MiB", window=size) as loader:
        assert len(rows_in(next(iter(loader)))) == 10
        assert loader.report().ring_bytes <= 20 * MiB


def test_a_batch_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    source = numbered_source(tmp_path, [4000], 256)
    with (
        DataLoader(source, 4000, ram="1MiB") as loader,
        pytest.raises(OutOfBudget, match=r"ram='1MiB'.*lower batch_size"),
    ):
        next(iter(loader))


def test_ram_bounds_what_is_read_ahead(tmp_path: Path) -> None:
    source = numbered_source(tmp_path, [40_000], 256)
    with DataLoader(source, 1000, ram="5MiB", reading="cached") as loader:  # a batch is almost 1 MiB
        assert sum(len(rows_in(batch)) for batch in loader) == 40_000
        assert loader.report().ring_bytes <= 5 * MiB
        assert 1 <= loader.report().depth <= 4


def test_the_choice_depends_on_what_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = numbered_source(tmp_path, [40_000], 256)  # 39 MiB
    monkeypatch.setattr(limits, "host_total_bytes", lambda: 64 * GiB)
    monkeypatch.setattr(limits, "host_available_bytes", lambda: 20 * GiB)
    assert choose(source, "auto").mode == "cached"
    assert "39.1 MiB of data, 20.0 GiB of RAM free" in choose(source, "auto").reason
    monkeypatch.setattr(limits, "host_available_bytes", lambda: 50 * MiB)
    assert choose(source, "auto").mode == "direct"
    with pytest.raises(SettingError, match="Accepted: 'auto', 'cached', 'direct'"):
        choose(source, "mapped")  # type: ignore[arg-type]


def test_a_full_shuffle_from_disk_is_refused(tmp_path: Path) -> None:
    source = numbered_source(tmp_path, [100])
    with (
        DataLoader(source, 10, shuffle="full", reading="direct") as loader,
        pytest.raises(SettingError, match="shuffle='full' reads rows one by one"),
    ):
        next(iter(loader))


def test_files_are_opened_when_they_are_needed(tmp_path: Path) -> None:
    paths = [tmp_path / str(number) for number in range(50)]
    for path in paths[:-1]:
        path.write_bytes(path.name.encode())
    files = Descriptors(paths, direct=False)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for number in range(49):
        files.open(np.array([0, number, number]))
        assert os.pread(int(files.fds[number]), 10, 0) == str(number).encode()
        assert len(list(Path("/proc/self/fd").iterdir())) - before == number + 1
    files.open(np.array([49]))
    assert (files.fds[49], files.errors[49].errno) == (NOT_OPEN, errno.ENOENT)
    paths[49].write_bytes(b"49")
    files.open(np.array([49]))
    assert os.pread(int(files.fds[49]), 10, 0) == b"49"
    assert not files.errors
    files.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize(
    ("files", "soft", "hard", "raised"),
    [(64, 1024, 4096, None), (500, 1024, 1 << 20, 4000), (500, 1024, 1024, None), (500, 1024, -1, 4000)],
)
def test_the_limit_of_open_files_is_raised(
    files: int, soft: int, hard: int, raised: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits_set: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits_set.append(pair))
    allow_open(files)
    assert limits_set == ([] if raised is None else [(raised, hard)])


@pytest.mark.parametrize("reading", ["cached", "direct"])
def test_more_files_than_may_be_open_are_refused(tmp_path: Path, reading: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = numbered_source(tmp_path, [3] * 40, 16)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    with (
        DataLoader(source, 16, reading=reading) as loader,
        pytest.raises(SettingError, match=r"40 files: this process may open 64.*storm data pack"),
    ):
        next(iter(loader))


@pytest.mark.parametrize("shuffle", [True, "full"])
def test_the_first_epoch_announces_every_row(tmp_path: Path, shuffle: Shuffle) -> None:
    source = numbered_source(tmp_path, [3000, 2000], 512)
    order = Order([3000, 2000], 2048, OrderSettings(shuffle=shuffle, window_bytes=MiB))
    seen = np.concatenate([window.rows() for window in order.windows_from(0, 0)])
    assert sorted(seen.tolist()) == list(range(5000))
    with DataLoader(source, 50, shuffle=shuffle, window=MiB, reading="cached") as loader:
        assert sorted(row for batch in loader for row in rows_in(batch)) == list(range(5000))
        list(loader)
        assert loader._engine._reader._is_warm  # type: ignore[union-attr]


@pytest.mark.parametrize("reading", ["cached", "direct"])
def test_many_shards(tmp_path: Path, reading: str) -> None:
    source = numbered_source(tmp_path, [3] * 300, 16)
    with DataLoader(source, 16, shuffle=True, window=16 * 4 * 45, reading=reading) as loader:  # type: ignore[arg-type]
        assert sorted(row for batch in loader for row in rows_in(batch)) == list(range(900))
