"""First touch makes pages exist; waiting for a word ends when it should; a word never runs backwards."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from typing import Any

import psutil
import pytest
import torch

from stormtorch.native import flag_words, touch
from stormtorch.native.touch import can_touch_beside_writers, first_touch

MiB = 1 << 20


@pytest.fixture(params=["native", "fallback"])
def _either(request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("native" if request.param == "native" else "no_library")


@pytest.mark.usefixtures("_either")
@pytest.mark.parametrize("threads", [1, 3])
def test_touch_brings_every_page(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(touch, "usable_count", lambda: threads)
    process = psutil.Process()
    with mmap.mmap(-1, 96 * MiB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as region:
        word = ctypes.c_char.from_buffer(region)
        before = process.memory_info().rss
        first_touch(ctypes.addressof(word) + 100, 64 * MiB - 50)
        grown = process.memory_info().rss - before
        del word
        assert 60 * MiB <= grown <= 80 * MiB


@pytest.mark.usefixtures("_either")
def test_touch_changes_nothing() -> None:
    """Others may have written there already."""
    data = torch.arange(3 * MiB, dtype=torch.int32)
    before = data.clone()
    first_touch(data.data_ptr(), data.nbytes)
    assert torch.equal(data, before)


def test_touch_changes_nothing_that_others_write_meanwhile(native: object) -> None:  # noqa: ARG001
    assert can_touch_beside_writers()
    data = torch.zeros(4 * MiB, dtype=torch.uint8)
    for value in range(1, 100):
        touching = threading.Thread(target=first_touch, args=(data.data_ptr(), data.nbytes))
        touching.start()
        data[::4096] = value
        data[-1] = value
        touching.join()
        assert data[::4096].eq(value).all()
        assert data[-1] == value
        data.zero_()


@pytest.mark.usefixtures("_either")
def test_wait_sees_a_word_written_later(words: Any) -> None:
    address = words.at(3).address
    assert not flag_words.wait(address, 7, 0.02)
    writer = threading.Timer(0.05, words.__setitem__, (3, 7))
    writer.start()
    start = time.monotonic()
    assert flag_words.wait(address, 7, 10.0)
    assert time.monotonic() - start < 9
    writer.join()


@pytest.mark.usefixtures("_either")
@pytest.mark.parametrize(
    ("word", "value", "reached"),
    [(5, 5, True), (4, 5, False), (2, 0xFFFFFFFE, True), (0xFFFFFFFE, 2, False), (0x80000000, 0x7FFFFFFF, True)],
)
def test_comparison_is_cyclic(word: int, value: int, reached: bool, words: Any) -> None:
    words[0] = word
    assert flag_words.wait(words.at(0).address, value, 0.0) is reached
    assert words.at(0, value).reached() is reached


@pytest.mark.usefixtures("_either")
@pytest.mark.parametrize(
    ("word", "value", "after"),
    [(0, 5, 5), (5, 5, 5), (7, 5, 7), (0xFFFFFFFE, 3, 3), (3, 0xFFFFFFFE, 3), (9, (1 << 32) + 10, 10)],
)
def test_a_word_only_moves_forward(word: int, value: int, after: int, words: Any) -> None:
    words[0] = word
    flag_words.store(words.at(0).address, value)
    assert flag_words.load(words.at(0).address) == after


@pytest.mark.usefixtures("_either")
def test_load_gives_all_32_bits(words: Any) -> None:
    words[0] = 0xFFFFFFFF
    assert flag_words.load(words.at(0).address) == 0xFFFFFFFF


@pytest.mark.usefixtures("_either")
def test_writers_out_of_order_leave_the_furthest_value(words: Any) -> None:
    address = words.at(0).address

    def write(first: int) -> None:
        for value in range(first, 4001, 4):
            flag_words.store(address, value)

    writers = [threading.Thread(target=write, args=(first,)) for first in (4, 3, 2, 1)]
    for writer in writers:
        writer.start()
    seen = 0
    while any(writer.is_alive() for writer in writers):
        now = flag_words.load(address)
        assert now >= seen
        seen = now
    assert flag_words.load(address) == 4000
