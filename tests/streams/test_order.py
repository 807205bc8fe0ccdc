"""The recorded order predicts, and never gets in the way."""

from __future__ import annotations

import math

from stormtorch.streams.units.order import Order


def play(order: Order, forward: list[int], backward: list[int], *, training: bool = True) -> None:
    order.begin(training)
    for unit in forward:
        order.visit(unit)
    for unit in backward:
        order.visit(unit, backward=True)


def upcoming(order: Order) -> list[int]:
    return [unit for unit, _, _ in order.upcoming()]


def test_before_the_first_pass_it_guesses() -> None:
    order = Order(4)
    order.begin(True)
    assert upcoming(order)[:4] == [0, 1, 2, 3]
    order.visit(0)
    order.visit(1)
    assert upcoming(order) == [2, 3, 1, 0]
    assert order.distance(3) == 2
    assert order.distance(0) == 6


def test_a_recorded_pass_is_replayed() -> None:
    order = Order(4)
    play(order, [2, 0, 3], [3, 0, 2])
    order.begin(True)
    assert upcoming(order) == [2, 0, 3]
    order.visit(2)
    assert order.distance(2) == 5
    assert order.distance(1) == math.inf


def test_the_turn_to_backward_is_a_use_of_its_own() -> None:
    order = Order(3)
    play(order, [0, 1, 2], [2, 1, 0])
    order.begin(True)
    for unit in (0, 1, 2, 2):
        order.visit(unit)
    assert order.distance(2) == 1
    order.visit(2, backward=True)
    assert order.distance(2) == 5  # in the next pass


def test_whether_a_unit_is_used_again_in_this_pass() -> None:
    order = Order(3)
    play(order, [0, 1, 2], [2, 1])
    order.begin(True)
    assert all(map(order.comes_again, range(3)))
    order.visit(0)
    order.visit(1)
    assert [order.comes_again(unit) for unit in range(4)] == [False, True, True, False]
    order.visit(2)
    order.visit(2, backward=True)
    assert [order.comes_again(unit) for unit in range(3)] == [False, True, False]


def test_what_comes_after_this_pass_is_marked() -> None:
    order = Order(2)
    play(order, [0, 1], [1])
    order.begin(True)
    order.visit(0)
    order.visit(1)
    order.visit(1, backward=True)
    assert list(order.upcoming()) == [(0, 1, False), (1, 2, False)]


def test_evaluation_does_not_spoil_training() -> None:
    order = Order(3)
    play(order, [0, 1, 2], [2, 1, 0])
    play(order, [0, 2], [], training=False)
    order.begin(True)
    for unit in (0, 1, 2):
        order.visit(unit)
    assert upcoming(order)[:2] == [2, 1]


def test_another_order_is_followed_from_where_it_leads() -> None:
    order = Order(5)
    play(order, [0, 1, 2, 3, 4], [4, 3, 2, 1, 0])
    order.begin(True)
    order.visit(0)
    order.visit(3)  # 1 and 2 were skipped
    assert upcoming(order)[0] == 4


def test_it_tells_uses_that_it_did_not_predict() -> None:
    order = Order(3)
    order.begin(True)
    before = order.jumps
    for unit in (0, 1, 1, 2):
        order.visit(unit)
    assert order.jumps == before
    order.visit(1, backward=True)
    assert order.jumps == before + 1
    order.begin(True)
    assert order.jumps == before + 2
