"""Byte sizes as people write them: ``"8GiB"``, ``"1.5 GB"`` or a plain number of bytes."""

from __future__ import annotations

import operator
import re
from decimal import Decimal

from .errors import SettingError

KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30

_UNITS = {"b": 1}
for _power, _letter in enumerate("kmgt", 1):
    _UNITS |= {f"{_letter}b": 1000**_power, f"{_letter}ib": 1024**_power}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([a-z]*)\s*", re.ASCII | re.IGNORECASE)
_ACCEPTED = (
    "Accepted: a whole number of bytes, or a number with one of B, KB, MB, GB, TB (powers of 1000) "
    "or KiB, MiB, GiB, TiB (powers of 1024), such as '8GiB' or '1.5 GB'."
)


def parse_bytes(value: object, *, setting: str = "size") -> int:
    """The number of bytes that ``value`` means; fractions of a byte are dropped.

    ``setting`` is the name of the value in the user's code; the error message begins with it.
    A bare suffix such as "8G" is refused, because half of all users read it as 10^9 and the other half as 2^30."""
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        unit = _UNITS.get((match[2] or "b").lower()) if match else None
        if match is None or unit is None or (not match[2] and "." in match[1]):
            raise SettingError(f"{setting}={value!r} is not a byte size. {_ACCEPTED}")
        return _in_range(int(Decimal(match[1]) * unit), value, setting)
    try:
        if isinstance(value, bool):
            raise TypeError
        count = operator.index(value)  # type: ignore[arg-type]  # the except clause handles everything else
    except TypeError:
        raise SettingError(f"{setting}={value!r} is not a byte size. {_ACCEPTED}") from None
    return _in_range(count, value, setting)


def _in_range(count: int, value: object, setting: str) -> int:
    if not 0 <= count < 1 << 63:
        shown = repr(value) if len(repr(value)) < 40 else f"{repr(value)[:20]}..."
        raise SettingError(f"{setting}={shown} is {'negative' if count < 0 else 'beyond 2^63 bytes'}. {_ACCEPTED}")
    return count


def format_bytes(count: int) -> str:
    """``count`` in the binary unit that reads best: 0 B, 512 B, 1.5 KiB, 20.0 GiB."""
    sign, size = ("-", -count) if count < 0 else ("", count)
    if size < KiB:
        return f"{sign}{size} B"
    scaled = float(size)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        scaled /= 1024
        if scaled < 1023.95 or unit == "TiB":
            break
    return f"{sign}{scaled:.1f} {unit}"


def as_setting(count: int) -> str:
    """``count`` rounded up, as a user may set it: 1500KiB, 3991MiB. `parse_bytes` of it is never less."""
    unit, name = (MiB, "MiB") if count > 8 * MiB else (KiB, "KiB")
    return f"{-(-count // unit)}{name}"


def round_up(count: int, alignment: int) -> int:
    """The smallest multiple of ``alignment`` that is at least ``count``."""
    return -(-count // alignment) * alignment


def round_down(count: int, alignment: int) -> int:
    """The largest multiple of ``alignment`` that is at most ``count``."""
    return count // alignment * alignment
