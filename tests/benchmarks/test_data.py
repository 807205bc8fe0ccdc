"""The benchmark of data loading runs tiny; its proof of every row once can fail; its table compares what it should."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.data import made
from benchmarks.data.cases import HF, MOSAIC, PEERS, TORCH, Case, package_of
from benchmarks.data.disk import PlainReads, read_rate
from benchmarks.data.isolation import run_isolated
from benchmarks.data.made import make, pieces, plain_file, shard_files
from benchmarks.data.once import Tally
from benchmarks.data.plan import Machine, cases_of
from benchmarks.data.results import Result, completed, ours_failed, spread, table
from benchmarks.data.slices import Windows
from benchmarks.data.timing import check_once, numbers_of, timed_epochs
from benchmarks.data.torch_feed import feed

from ..forkserver import run

ROOT = Path(__file__).parents[2]
GB = 10**9


def data(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.data", *words]
    return run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)


def run_tiny(tmp_path: Path, *words: str) -> list[dict[str, Any]]:
    done = data(*words, "--tiny", "--scratch", str(tmp_path), "--out", str(tmp_path / "result"))
    assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "result.log").read_text()
    assert not list(tmp_path.glob("storm_data_*")), "the data are removed"
    report = json.loads((tmp_path / "result.json").read_text())
    assert report["machine"]
    assert done.stdout.strip() in (tmp_path / "result.md").read_text()
    rows: list[dict[str, Any]] = report["rows"]
    return rows


@pytest.mark.wide
def test_every_row_comes_once_from_ours_and_from_torch(tmp_path: Path) -> None:
    methods = ("storm", "torch-batched-0")
    rows = run_tiny(tmp_path, "rows", "tokens", "--methods", *methods)
    assert [(row["case"]["group"], row["case"]["method"]) for row in rows] == [
        (group, method) for group in ("rows", "tokens") for method in methods
    ]
    assert not any(row["failed"] for row in rows)
    assert all(row["figures"]["rate"] > 0 and row["figures"]["of_best_peer"] > 0 for row in rows)


@pytest.mark.wide
@pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="no datasets here")
def test_every_row_comes_once_from_datasets(tmp_path: Path) -> None:
    (row,) = run_tiny(tmp_path, "rows", "--methods", "hf-batched-0")
    assert not row["failed"]


@pytest.mark.wide
def test_what_grows_runs_tiny(tmp_path: Path) -> None:
    rows = run_tiny(tmp_path, "flat", "gpu")
    assert not any(row["failed"] for row in rows)
    flat = [row["figures"] for row in rows if row["case"]["group"] == "flat"]
    assert all(figures["sample_s"] > 0 and figures["ring_bytes"] > 0 for figures in flat)
    assert all(figures["ratio"] > 0 for figures in flat if figures["reading"] == "direct")
    train = [row["figures"] for row in rows if row["case"]["method"] == "train"]
    assert all("overhead" in figures and figures["asking_s"] > 0 for figures in train)


def test_a_peer_that_is_not_there_or_too_slow_is_a_result(tmp_path: Path) -> None:
    case = Case(group="rows", method="mosaic-items-0", kind="rows", rows=8, folder=str(tmp_path))
    files: dict[str, Any] = {"file": tmp_path / "1.json", "log": tmp_path / "log"}
    assert "no interpreter /nowhere" in run_isolated(case, python="/nowhere", **files).failed
    case = replace(case, method="torch-items-0", limit_s=0.05)
    assert run_isolated(case, python=sys.executable, **files).failed == "stopped after 0.05 s"
    assert not ours_failed([Result(case=case, failed="stopped")])
    assert ours_failed([Result(case=replace(case, method="storm"), failed="stopped")])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nothing",), "There are rows, tokens, flat, gpu"),
        (("--python", "nobody=x"), "PEER one of torch, hf, mosaic"),
        (("--largest", "40G"), "not a byte size"),
    ],
)
def test_a_bad_setting_is_refused_with_the_good_ones(words: tuple[str, ...], said: str) -> None:
    done = data(*words, "--tiny")
    assert done.returncode == 2
    assert said in done.stderr


@pytest.mark.parametrize("kind", ["rows", "tokens"])
def test_rows_carry_their_numbers(tmp_path: Path, kind: str) -> None:
    marks = torch.cat([torch.from_numpy(piece[:, :2].copy()) for piece in pieces(kind, 5000, first=70_000)])
    assert torch.equal(numbers_of(kind, marks), torch.arange(70_000, 75_000))
    make(Case(group=kind, method="storm", kind=kind, rows=10, folder=str(tmp_path)))
    file = plain_file(tmp_path, kind)
    stored = np.load(file) if kind == "rows" else np.fromfile(file, dtype=np.uint16).reshape(10, -1)
    assert numbers_of(kind, torch.from_numpy(stored[:, :2].copy())).tolist() == list(range(10))


def test_a_row_too_few_or_twice_is_noticed() -> None:
    case = Case(group="rows", method="storm", kind="rows", rows=4, folder="")
    marks = torch.arange(4.0)[:, None].expand(4, 2)
    check_once(case, [marks[2:], marks[:2]])
    for wrong in (marks[:3], torch.cat([marks[:3], marks[:1]])):
        with pytest.raises(RuntimeError, match="4 rows were due once each"):
            check_once(case, [wrong])


def test_the_tally_tells_every_row_once_from_anything_else() -> None:
    numbers = np.random.default_rng(0).permutation(1000)
    tally = Tally()
    for part in (numbers[:600], torch.from_numpy(numbers[600:])):
        tally.add(part)
    tally.check([range(400), range(400, 1000)], times=1)
    tally.add(numbers)
    tally.check([range(400), range(400, 1000)], times=2)
    for wrong in (numbers[:-1], np.where(numbers == 5, 6, numbers), np.where(numbers < 2, 1 - numbers * 0, numbers)):
        tally = Tally()
        tally.add(wrong)
        with pytest.raises(RuntimeError, match="1000 rows were due 1 times"):
            tally.check([range(400), range(400, 1000)], times=1)


def test_shards_grow_and_keep_what_is_there(tmp_path: Path) -> None:
    small = Case(group="gpu", method="train", kind="rows", rows=4, folder=str(tmp_path), shard_rows=4)
    make(small)
    ((first, _, _),) = shard_files(small)
    stamp = first.stat().st_mtime_ns
    large = replace(small, rows=10)
    make(large)
    files = [file for file, _, _ in shard_files(large)]
    assert files[0] == first
    assert first.stat().st_mtime_ns == stamp
    assert np.concatenate([np.load(file)[:, 0] for file in files]).tolist() == list(range(10))
    assert len(np.load(made.labels_file(large))) == 10


def test_sizes_follow_the_machine(tmp_path: Path) -> None:
    small = Machine(disk_free_bytes=20 * GB, ram_bytes=10 * GB, device="cpu")
    settings: dict[str, Any] = {"tiny": False, "largest": 40 * GB, "packages": []}
    flat = cases_of("flat", tmp_path, small, **settings)
    direct = [case for case in flat if case.method == "storm-direct"]
    assert direct[0].total_bytes == pytest.approx(0.6 * GB, rel=0.03)
    assert 15 * GB < direct[-1].total_bytes < 20 * GB
    assert "20 GB free" in direct[-1].note
    assert max(case.total_bytes for case in flat if case.method == "storm-cached") < 6 * GB
    large = replace(small, disk_free_bytes=100 * GB, ram_bytes=200 * GB)
    flat = cases_of("flat", tmp_path, large, **settings)
    assert [case.rows for case in flat if case.method == "storm-direct"] == [50_000, 200_000, 800_000, 3_250_000]
    training = cases_of("gpu", tmp_path, large, **settings)
    assert [case.rows for case in training if case.method == "train"] == [
        50_000, 100_000, 500_000, 1_000_000, 5_000_000,
    ]  # fmt: skip
    assert [(case.method, case.rows) for case in training if case.method != "train"] == [
        ("train-light", 500_000), ("train-direct", 1_000_000),
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"need 0\.6 GB of disk"):
        cases_of("gpu", tmp_path, replace(small, disk_free_bytes=GB // 2), **settings)


def test_a_size_is_a_choice_of_shards(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "group": "flat",
        "kind": "rows",
        "folder": str(tmp_path),
        "set_rows": 20,
        "shard_rows": 2,
    }
    small = Case(method="storm-direct", rows=4, **settings)
    make(small)
    assert len(list(tmp_path.glob("*.npy"))) == 10, "all of the set is made at once"
    large = replace(small, rows=10)
    assert set(shard_files(small)) < set(shard_files(large)) < set(shard_files(replace(small, rows=20)))
    for file, first, count in shard_files(large):
        assert np.load(file)[:, 0].tolist() == list(range(first, first + count))
    for wrong in (replace(small, rows=3), replace(small, rows=22)):
        with pytest.raises(ValueError, match="not whole shards of 20 rows"):
            shard_files(wrong)


@pytest.mark.parametrize(("rows", "epochs"), [(1000, 2), (250, 9), (90, 30)])
def test_slices_begin_and_end_with_whole_windows_and_never_overlap(rows: int, epochs: int) -> None:
    windows = Windows(rows=rows, window_rows=100, batch=16, epochs=epochs)
    slices = list(windows.slices())
    whole = {windows.batch_of(window) for window in range(windows.per_epoch * epochs) if windows.is_whole(window)}
    assert whole.issuperset(batch for pair in slices for batch in pair)
    per_window = min(rows, 100) / 16
    assert all(last - first > 3 * per_window for first, last in slices)
    assert all(before[1] + 2 * per_window < after[0] for before, after in pairwise(slices))
    assert len(slices) >= 1
    assert slices[-1][1] < epochs * -(-rows // 16)


def test_a_run_too_short_has_no_slice() -> None:
    assert not list(Windows(rows=650, window_rows=100, batch=16, epochs=1).slices())


def test_plain_reads_take_every_block_once_before_any_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [made.make_rows(tmp_path / f"{number}.npy", 20, drop=True) for number in range(2)]
    size, seen = files[0].stat().st_size, list[tuple[int, int]]()
    read = os.preadv

    def preadv(descriptor: int, buffers: list[memoryview], at: int) -> int:
        seen.append((descriptor, at))
        return read(descriptor, buffers, at)

    try:
        plain = PlainReads(files, threads=2, block=65536)
    except OSError:
        pytest.skip("no direct I/O here")
    monkeypatch.setattr(os, "preadv", preadv)
    with plain:
        for _ in range(2):
            seen.clear()
            assert plain.read(2 * -(-size // 65536) * 65536) > 0
            assert len(set(seen)) == len(seen) == 2 * -(-size // 65536)


@pytest.mark.parametrize("seconds", [0.1, 0.0], ids=["a_moment", "threads_that_start_late"])
def test_the_disk_is_read(seconds: float, tmp_path: Path) -> None:
    file = made.make_rows(tmp_path / "rows.npy", 900, drop=True)
    try:
        assert read_rate([file], threads=2, seconds=seconds) > 0
    except OSError:
        pytest.skip("no direct I/O here")


def test_the_table_compares_with_the_best_peer_and_the_smallest_size() -> None:
    def speed(method: str, rate: float) -> Result:
        case = Case(group="rows", method=method, kind="rows", rows=10, folder="")
        return Result(case=case, figures={"rate": rate, "epoch_rate": rate})

    def cost(rows: int, sample_s: float) -> Result:
        case = Case(group="flat", method="storm-direct", kind="rows", rows=rows, folder="")
        return Result(case=case, figures={"sample_s": sample_s, "ratio": 1.5})

    rows = [speed("storm", 300), speed("torch-items-0", 50), speed("hf-iter-0", 100)]
    rows.append(replace(speed("mosaic-items-0", 0), failed="a | b", figures={}))
    flat = [cost(10, 2e-6), cost(40, 2.1e-6), cost(10, 2e-6), cost(10, 9e-6), cost(80, 1.8e-6)]
    figures = [result.figures for result in completed([*rows, *flat])]
    assert [figure.get("of_best_peer") for figure in figures[:4]] == [3, 0.5, 1, None]
    assert figures[5]["of_smallest"] == pytest.approx(1.05), "of the median of the smallest"
    assert figures[5]["ratio_of_smallest"] == 1
    assert "a sample 0.90 to 1.05, STORM : plain 1.00 to 1.00" in spread(flat)
    lines = table(rows).splitlines()
    assert "| FAILED: a / b |" in lines[-1]
    assert len({line.count("|") for line in lines}) == 1


def test_every_method_belongs_to_a_package() -> None:
    assert {package_of(method) for method in TORCH + HF + MOSAIC} == set(PEERS)
    assert package_of("storm-direct") == package_of("train") == "storm"


@pytest.mark.parametrize("method", ["torch-items-0", "torch-batched-1", "torch-index-0"])
@pytest.mark.parametrize("kind", ["rows", "tokens"])
def test_every_form_of_torch_gives_every_row_once(tmp_path: Path, method: str, kind: str) -> None:
    case = Case(group=kind, method=method, kind=kind, rows=70, folder=str(tmp_path), batch=16, seconds=0, rounds=1)
    make(case)
    figures = timed_epochs(case, feed(case))
    assert figures["rounds"] == 1
    assert figures["rate"] > 0
