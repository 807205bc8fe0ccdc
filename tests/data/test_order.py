"""Every row exactly once, the same order for ever, and a shuffle that deserves the name."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stormtorch.core.errors import SettingError
from stormtorch.core.sizes import MiB
from stormtorch.data.readers.order import Order, OrderSettings, Shuffle
from stormtorch.data.readers.permutations import Rows, permutation, scatter

SHUFFLES = st.sampled_from([True, False, "full"])


def whole(order: Order, epoch: int = 0) -> Rows:
    return order.rows(epoch, 0, order.rows_per_epoch)


@settings(max_examples=150)
@given(
    shards=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    row_bytes=st.integers(1, 5 * MiB),
    shuffle=SHUFFLES,
    world=st.integers(1, 5),
    drop_last=st.booleans(),
    window=st.integers(0, 40 * MiB),
    batch=st.integers(1, 50),
    epoch=st.integers(0, 3),
    whole_shards=st.booleans(),
)
def test_every_row_exactly_once_and_ranks_alike(
    shards: list[int],
    row_bytes: int,
    shuffle: Shuffle,
    world: int,
    drop_last: bool,
    window: int,
    batch: int,
    epoch: int,
    whole_shards: bool,
) -> None:
    total = sum(shards)
    ranks = []
    for rank in range(world):
        order = Order(
            shards,
            row_bytes,
            OrderSettings(shuffle=shuffle, seed=7, rank=rank, world=world, drop_last=drop_last, window_bytes=window),
            whole_shards=whole_shards,
        )
        batches = [
            order.rows(epoch, first, min(batch, order.rows_per_epoch - first))
            for first in range(0, order.rows_per_epoch, batch)
        ]
        rows = np.concatenate(batches) if batches else np.empty(0, np.int64)
        assert len(rows) == (total // world if drop_last else -(-total // world))
        assert np.array_equal(rows, whole(order, epoch)), "the same rows, however they are asked for"
        ranks.append(rows)
    seen, times = np.unique(np.concatenate(ranks), return_counts=True)
    if drop_last:
        assert len(seen) == total - total % world
        assert (times == 1).all(), "ranks are disjoint"
    else:
        assert len(seen) == total, "nothing is left out"
        assert times.sum() - total == -total % world, "only what makes ranks equal is repeated"


@settings(max_examples=80)
@given(
    shards=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    shuffle=st.booleans(),
    window=st.integers(1, 50),
    world=st.integers(1, 3),
)
def test_windows_tell_the_rows_that_come(shards: list[int], shuffle: bool, window: int, world: int) -> None:
    row_bytes = MiB
    made = OrderSettings(shuffle=shuffle, world=world, rank=world - 1, window_bytes=window * row_bytes)
    order = Order(shards, row_bytes, made)
    found = [order.window(2, number) for number in range(order.windows)]
    assert np.array_equal(np.concatenate([part.rows() for part in found]), whole(order, 2))
    ends = np.cumsum(shards)
    for part in found:
        assert len(part.firsts) <= order.most_runs()
        assert (part.counts > 0).all()
        last = part.firsts + part.counts - 1
        assert np.array_equal(
            np.searchsorted(ends, part.firsts, side="right"), np.searchsorted(ends, last, side="right")
        ), "a run lies in one shard"


def test_seeds_epochs_and_ways_differ() -> None:
    def order(shuffle: Shuffle, seed: int) -> Order:
        return Order([1000], 4096, OrderSettings(shuffle=shuffle, seed=seed))

    several = [whole(order(s, seed), epoch) for s in (True, "full") for seed in (0, 1) for epoch in (0, 1)]
    for number, one in enumerate(several):
        for other in several[:number]:
            assert (one == other).mean() < 0.02
    assert np.array_equal(whole(order(False, 5), 3), np.arange(1000))


def test_the_order_is_the_same_for_ever() -> None:
    """These numbers are a promise: a state that was saved years ago goes on with the same samples."""
    shuffled = Order([100, 50], MiB // 4, OrderSettings(shuffle=True, seed=3, window_bytes=20 * MiB))
    assert whole(shuffled, 1)[:12].tolist() == GOLDEN_SHUFFLED
    assert int((whole(shuffled, 1) * np.arange(150)).sum()) == GOLDEN_SUM
    full = Order([1000], 8, OrderSettings(shuffle="full", seed=3))
    assert whole(full, 1)[:12].tolist() == GOLDEN_FULL
    assert permutation(10, 42).tolist() == GOLDEN_PERMUTATION


GOLDEN_SHUFFLED = [19, 140, 46, 137, 22, 141, 2, 107, 70, 16, 0, 23]
GOLDEN_SUM = 821799
GOLDEN_FULL = [355, 430, 193, 506, 702, 136, 27, 947, 56, 872, 749, 6]
GOLDEN_PERMUTATION = [5, 2, 7, 3, 9, 4, 0, 1, 8, 6]


def displacement(rows: Rows) -> float:
    """Mean distance between a row's number and its place, in parts of the whole: 1/3 if places are uniform."""
    return float(np.abs(rows - np.arange(len(rows))).mean() / len(rows))


def met(rows: Rows, batch: int) -> float:
    """The share of neighbours in the file that come in one batch."""
    place = np.empty(len(rows), dtype=np.int64)
    place[rows] = np.arange(len(rows))
    return float((place[:-1] // batch == place[1:] // batch).mean())


def test_the_shuffle_is_close_to_uniform() -> None:
    rows, batch = 100_000, 100
    row_bytes = 20_000  # 2 GB of data: 953 blocks of 104 rows, 8 windows of 13,421
    order = Order([60_000, 40_000], row_bytes, OrderSettings(shuffle=True))
    window = order.window_rows
    assert 7 <= order.windows <= 8
    distances = [displacement(whole(order, epoch)) for epoch in range(8)]
    # Blocks, not rows, have places of their own: the mean over an epoch spreads as with 953 of them.
    assert np.mean(distances) == pytest.approx(1 / 3, abs=0.01)
    assert all(abs(value - 1 / 3) < 0.04 for value in distances)
    meetings = np.mean([met(whole(order, epoch), batch) for epoch in range(8)])
    assert meetings == pytest.approx((batch - 1) / (window - 1), rel=0.1)
    assert meetings < 0.01
    # Every part of an epoch sees every part of the file: 10 x 10 cells, each with a tenth of a tenth.
    found = np.histogram2d(np.arange(rows), whole(order), bins=10)[0] / (rows / 100)
    assert found.min() > 0.3
    assert found.max() < 1.9


@given(st.integers(1, 5000), st.integers(1, 300))
@settings(max_examples=60)
def test_windows_are_equal(rows: int, most: int) -> None:
    order = Order([rows], MiB, OrderSettings(shuffle=True, window_bytes=most * MiB))
    sizes = [len(order.window(0, number).rows()) for number in range(order.windows)]
    assert sum(sizes) == rows
    assert max(sizes) <= most
    assert len(sizes) <= -(-rows // most)
    assert max(sizes) - sizes[-1] < len(sizes)


def test_data_of_one_window_is_shuffled_fully() -> None:
    order = Order([30_000], 4096, OrderSettings(shuffle=True))
    assert order.windows == 1
    assert displacement(whole(order)) == pytest.approx(1 / 3, abs=0.01)
    assert met(whole(order), 100) == pytest.approx(99 / 29_999, rel=0.5)


def test_a_full_shuffle_is_uniform() -> None:
    order = Order([100_000], 20_000, OrderSettings(shuffle="full"))
    rows = whole(order)
    assert displacement(rows) == pytest.approx(1 / 3, abs=0.005)
    assert met(rows, 100) == pytest.approx(99 / 99_999, rel=0.5)
    assert abs(np.corrcoef(rows[:-1], rows[1:])[0, 1]) < 0.02


@given(st.integers(1, 5000), st.integers(0, 2**64 - 1))
@settings(max_examples=60)
def test_permutations_are_permutations(count: int, key: int) -> None:
    everything = np.arange(count)
    assert np.array_equal(np.sort(permutation(count, key)), everything)
    assert np.array_equal(np.sort(scatter(count, key, everything)), everything)


def test_a_scatter_needs_no_memory() -> None:
    found = scatter(10**15, 1, np.arange(10**14, 10**14 + 1000))
    assert len(set(found.tolist())) == 1000
    assert found.min() >= 0
    assert found.max() < 10**15


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shuffle": "fully"}, "Accepted: True, False, 'full'"),
        ({"rank": 2, "world": 2}, "rank=2, world=2"),
        ({"rank": -1}, "rank=-1"),
        ({"world": 0}, "world=0"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        OrderSettings(**settings)  # type: ignore[arg-type]


def test_groups_without_rows_are_in_no_window() -> None:
    for epoch in range(20):
        order = Order([10, 5, 0, 7, 0], 4, OrderSettings(shuffle=True), whole_shards=True)
        assert (order.window(epoch, 0).counts > 0).all()
        assert sorted(order.rows(epoch, 0, 22).tolist()) == list(range(22))
