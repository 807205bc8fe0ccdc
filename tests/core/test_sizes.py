from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stormtorch.core.errors import SettingError
from stormtorch.core.sizes import format_bytes, parse_bytes, round_down, round_up


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8GiB", 8 << 30),
        ("8 gib", 8 << 30),
        ("1.5 GB", 1_500_000_000),
        (" 512 MiB ", 512 << 20),
        ("0", 0),
        ("4096", 4096),
        ("10B", 10),
        (".5KiB", 512),
        ("0.1 B", 0),
        ("2TB", 2 * 10**12),
        (123, 123),
        (np.int64(7), 7),
    ],
)
def test_accepted_sizes(text: object, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "bad", ["", "GiB", "8G", "8 GiBB", "-1GiB", "1e9", "1.5", "nan", "8,5GiB", "1 2", -1, 1.5, True, None, [], "٣GiB"]
)
def test_bad_sizes_name_the_setting_and_list_what_is_accepted(bad: object) -> None:
    with pytest.raises(SettingError) as error:
        parse_bytes(bad, setting="vram")
    assert f"vram={bad!r}" in str(error.value)
    assert "GiB" in str(error.value)
    assert "Accepted" in str(error.value)


def test_large_fractions_are_exact() -> None:
    assert parse_bytes("9007199254.740993 GB") == 9007199254740993000


@given(st.integers(0, 1 << 50))
def test_formatted_sizes_parse_back_within_their_own_precision(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=0.06)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (20 << 30, "20.0 GiB"),
        ((1 << 20) - 1, "1.0 MiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_format(count: int, text: str) -> None:
    assert format_bytes(count) == text


@given(st.integers(0, 1 << 60), st.integers(1, 1 << 20))
def test_rounding(count: int, alignment: int) -> None:
    assert round_down(count, alignment) <= count <= round_up(count, alignment)
    assert round_up(count, alignment) % alignment == round_down(count, alignment) % alignment == 0
    assert round_up(count, alignment) - round_down(count, alignment) in (0, alignment)
