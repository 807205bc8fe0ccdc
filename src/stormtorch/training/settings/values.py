"""Kinds of settings: convert a value from a flag or a YAML file, or refuse it with the accepted values.

A flag gives strings; YAML also gives numbers, booleans and lists (and ``1e-5`` as a string). Both give equal settings.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ...core.errors import SettingError
from ...core.sizes import parse_bytes


@dataclass(frozen=True)
class Kind:
    """``convert`` raises ValueError or TypeError for other values than ``accepted``; ``many``: a flag takes several."""

    convert: Callable[[Any], Any]
    accepted: str
    metavar: str | None = None
    many: bool = False


def accept(name: str, kind: Kind, value: object) -> Any:
    """Convert ``value`` for the setting ``name``; raises SettingError with the accepted values."""
    if value is None:
        return None
    try:
        return kind.convert(value)
    except SettingError:
        raise
    except UnicodeError:
        raise SettingError(
            f"{name}={value!r} holds bytes that are not UTF-8, or a NUL, and cannot be written to files. Accepted: "
            f"{kind.accepted}, as UTF-8."
        ) from None
    except (ValueError, TypeError):
        raise SettingError(f"{name}={value!r} is not accepted. Accepted: {kind.accepted}.") from None


def one_of(*words: str) -> Kind:
    return Kind(lambda value: words[words.index(value)], ", ".join(words), metavar=f"{{{','.join(words)}}}")


def count(least: int, most: int = (1 << 63) - 1) -> Kind:
    at_most = f" and at most {most}" if most < (1 << 63) - 1 else ""
    accepted = f"a whole number of at least {least}{at_most}"
    return Kind(lambda value: _within(_whole(value), least, most), accepted, metavar="N")


def number(*, above: bool = False, most: float = math.inf) -> Kind:
    """A finite number of at least 0, or ``above`` it."""
    least = math.ulp(0.0) if above else 0.0
    accepted = (
        f"a number {'above 0' if above else 'of at least 0'}{f' and at most {most:g}' if most < math.inf else ''}"
    )
    return Kind(lambda value: _within(_number(value), least, most), accepted, metavar="X")


def text(accepted: str, metavar: str | None = None, *, written: bool = False) -> Kind:
    """``written``: the run writes it to files, as UTF-8."""
    return Kind(functools.partial(_text, written=written), accepted, metavar=metavar)


def path(accepted: str = "a path", metavar: str = "PATH", *, written: bool = False) -> Kind:
    """A path or another word; ``~`` is the home directory, in a file too."""
    return Kind(
        lambda value: os.path.expanduser(_text(value, written=written)),  # noqa: PTH111  # a Path would drop a leading ./
        accepted,
        metavar=metavar,
    )


def several(one: Kind) -> Kind:
    """One or more of a kind, as a list or as words after a flag."""
    accepted = f"{one.accepted}, or several"
    return Kind(lambda value: tuple(map(one.convert, _items(value))), accepted, metavar=one.metavar, many=True)


def size(name: str) -> Kind:
    """A byte size as the user wrote it, or "auto"."""

    def convert(value: object) -> str:
        if value != "auto":
            parse_bytes(value, setting=name)
        return str(value)

    return Kind(convert, "auto or a byte size such as 8GiB", metavar="SIZE")


def _pair(value: object) -> tuple[float, ...]:
    found = tuple(map(_number, _items(value)))
    if len(found) != 2 or not all(0 <= item < 1 for item in found):
        raise ValueError
    return found


def _switch(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


PAIR = Kind(_pair, "two numbers from 0 to below 1, such as 0.9 0.95", metavar="X", many=True)
SWITCH = Kind(_switch, "true or false")

_Number = TypeVar("_Number", int, float)


def _within(number: _Number, least: float, most: float) -> _Number:
    if not least <= number <= most:
        raise ValueError
    return number


def _items(value: object) -> list[object] | tuple[object, ...]:
    return value if isinstance(value, list | tuple) else [value]


def _text(value: object, *, written: bool) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float) or value == "":
        raise ValueError
    if "\0" in str(value):
        raise UnicodeError
    if written:
        str(value).encode()
    return str(value)


def _whole(value: object) -> int:
    """An exact int, also beyond the precision of floats."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lstrip("+-").isdigit():
        return int(value)
    number = _number(value)
    if number != int(number):
        raise ValueError
    return int(number)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, str | int | float) or not math.isfinite(float(value)):
        raise ValueError
    return float(value)
