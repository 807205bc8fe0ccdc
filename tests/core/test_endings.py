"""Endings: in their order, every one of them, once."""

from __future__ import annotations

import pytest

from stormtorch.core.endings import Endings


def test_what_was_opened_last_ends_first() -> None:
    order: list[str] = []
    endings = Endings()
    endings.before_others(lambda: order.append("first"))
    endings.after_others(lambda: order.append("late"))
    endings.before_others(lambda: order.append("second"))
    endings.run()
    assert order == ["second", "first", "late"]
    endings.run()
    assert len(order) == 3


def test_what_comes_last_comes_after_what_is_opened_later() -> None:
    order: list[str] = []
    endings = Endings()
    endings.last(lambda: order.append("last"))
    endings.last(lambda: order.append("before that"))
    endings.after_others(lambda: order.append("late"))
    endings.before_others(lambda: order.append("usual"))
    endings.run()
    assert order == ["usual", "late", "before that", "last"]
    endings.run()
    assert len(order) == 4


@pytest.mark.parametrize("first", [ValueError, KeyboardInterrupt])
def test_an_error_keeps_no_other_from_ending(first: type[BaseException]) -> None:
    order: list[str] = []

    def fail(error: BaseException) -> None:
        raise error

    endings = Endings()
    endings.before_others(lambda: order.append("last"))
    endings.before_others(lambda: fail(OSError("second")))
    endings.before_others(lambda: fail(first("first")))
    with pytest.raises(first, match="first"):
        endings.run()
    assert order == ["last"]
