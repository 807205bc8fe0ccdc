"""What becomes of activations, decided from numbers: VRAM first, then the link and RAM, then computing again."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from stormtorch.core.sizes import GiB, MiB
from stormtorch.streams.activations.plans.comparison import TURN, Comparison
from stormtorch.streams.activations.plans.levels import Rises
from stormtorch.streams.activations.plans.plan import (
    KEEP,
    OFFLOAD,
    RECOMPUTE,
    RECOMPUTE_FROM_RAM,
    ActivationPlan,
    BlockProfile,
    Means,
    choose,
    cost_s,
    recompute,
)

BLOCK = BlockProfile(forward_s=0.010, input_bytes=100 * MiB, saved_bytes=1500 * MiB)
BLOCKS = [BLOCK] * 10
WAY = 400 * MiB


def means(
    spare: int | list[int],
    link: float = 0.0,
    *,
    count: int = 10,
    way: int = 0,
    keep: int = 0,
    whole: int = 0,
    ram: int = 1000 * GiB,
) -> Means:
    """``spare``: beside what one block takes for itself when it is recomputed. ``way`` is beside that, too."""
    rooms = [spare] * (count + 1) if isinstance(spare, int) else list(spare)
    rooms = [room + whole + way for room in rooms]
    rises = [Rises(keep=keep, whole=whole) for _ in range(count)]
    return Means(rooms=rooms, rises=rises, out_bytes_per_s=link, in_bytes_per_s=link, way_bytes=way, ram_bytes=ram)


def held(plan: ActivationPlan) -> int:
    return sum(b.held_bytes(input_bytes=BLOCK.input_bytes, saved_bytes=BLOCK.saved_bytes) for b in plan.blocks)


def test_everything_fits() -> None:
    plan = choose(BLOCKS, means(10 * BLOCK.saved_bytes))
    assert plan.blocks == [KEEP] * 10
    assert "fit" in plan.reason
    assert cost_s(BLOCKS, plan) == 0


def test_recomputing_is_what_checkpoints_do() -> None:
    """Every block runs again; its inputs stay where there is room, those of the last blocks first."""
    assert recompute(BLOCKS, means(10 * BLOCK.input_bytes)).blocks == [RECOMPUTE] * 10
    plan = recompute(BLOCKS, means(5 * BLOCK.input_bytes))
    assert plan.blocks == [RECOMPUTE_FROM_RAM] * 5 + [RECOMPUTE] * 5
    assert cost_s(BLOCKS, plan) == pytest.approx(0.1)
    assert "5 of 10" in plan.reason


def test_the_last_blocks_are_kept_as_far_as_there_is_room() -> None:
    """Beside the inputs of the others: 3 of 10 blocks, and not a byte more than there is."""
    room = 3 * BLOCK.saved_bytes + 7 * BLOCK.input_bytes
    plan = choose(BLOCKS, means(room))
    assert plan.blocks == [RECOMPUTE] * 7 + [KEEP] * 3
    assert held(plan) <= room
    assert choose(BLOCKS, means(room - MiB)).blocks.count(KEEP) == 2


def test_more_room_never_recomputes_more() -> None:
    costs = [cost_s(BLOCKS, choose(BLOCKS, means(room * 100 * MiB, 20 * GiB, way=WAY))) for room in range(0, 200, 3)]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] > costs[-1] == 0


def test_a_block_that_is_kept_is_not_made_a_second_time() -> None:
    """What it takes when it is recomputed is more than what it takes when it is kept."""
    room = [0] * 10 + [BLOCK.saved_bytes]
    plan = choose(BLOCKS, means(room, keep=100 * MiB, whole=1600 * MiB))
    assert plan.blocks[-1] == KEEP
    assert plan.blocks[:-1] == [RECOMPUTE_FROM_RAM] * 9


def test_the_link_hides_everything() -> None:
    plan = choose(BLOCKS, means(0, 400 * GiB, way=2 * BLOCK.saved_bytes))
    assert plan.blocks[:-1] == [OFFLOAD] * 9
    assert cost_s(BLOCKS, plan) <= 0.010


@pytest.mark.parametrize("rate", [20, 60, 100, 160])
def test_what_is_offloaded_is_hidden(rate: int) -> None:
    """What is behind at any time has room on its way."""
    way = 2 * BLOCK.saved_bytes
    plan = choose(BLOCKS, means(10 * BLOCK.input_bytes, rate * GiB, way=way))
    behind = 0.0
    for block in plan.blocks:
        behind = max(0.0, behind + block.sent_bytes(BLOCK) - 0.9 * 0.010 * rate * GiB)
        assert behind <= way / 2
    assert plan.blocks.count(OFFLOAD) >= rate // 20 - 1


def test_ram_bounds_what_is_offloaded() -> None:
    plenty = means(10 * BLOCK.input_bytes, 400 * GiB, way=2 * BLOCK.saved_bytes)
    for blocks in (0, 3):
        plan = choose(BLOCKS, replace(plenty, ram_bytes=blocks * BLOCK.saved_bytes + 200 * MiB))
        assert plan.blocks.count(OFFLOAD) == blocks
        assert sum(block.sent_bytes(BLOCK) for block in plan.blocks) <= blocks * BLOCK.saved_bytes + 200 * MiB


def test_blocks_that_may_not_be_run_again_are_kept_or_offloaded() -> None:
    fixed = replace(BLOCK, repeatable=False)
    for plan_of in (recompute, choose):
        plan = plan_of([fixed] * 10, means(3 * BLOCK.saved_bytes))
        assert plan.blocks == [OFFLOAD] * 7 + [KEEP] * 3
        assert "7 offloaded" in plan.reason


def test_what_travels_has_room_at_every_block() -> None:
    rooms = [200 * MiB, *[1000 * MiB] * 9, 0]
    plan = recompute(BLOCKS, replace(means(rooms), way_bytes=WAY))
    assert len(plan.way_bytes) == 11
    assert all(0 <= way <= max(0, room) + BLOCK.input_bytes for way, room in zip(plan.way_bytes, rooms, strict=True))


# --- which plan is faster


def compared(first_s: list[float], second_s: list[float], sizes: list[int], *, does_less: bool = False) -> Comparison:
    """Steps take these times in turn, by the plan that is asked for, for each byte of input."""
    comparison, step = Comparison(does_less=does_less), 0
    while not comparison.is_over:
        times = second_s if comparison.second else first_s
        size = sizes[step % len(sizes)]
        comparison.end_step(times[step % len(times)] * size, size)
        step += 1
        assert step < 100
    return comparison


def test_a_plan_that_is_clearly_slower_gets_one_turn() -> None:
    assert compared([1.0], [1.1], [1])._steps == 2 * TURN
    assert compared([1.0], [0.8], [1])._steps == compared([1.0], [0.97], [1])._steps == 4 * TURN


def test_a_machine_that_gets_faster_favours_neither() -> None:
    comparison, step = Comparison(), 0
    while not comparison.is_over:
        comparison.end_step(1.0 - 0.02 * step, 1)
        step += 1
    assert not comparison.second_wins


def wins(second_s: float, *, does_less: bool = False) -> float:
    """How often the second plan wins, with steps that differ by a tenth, as where the host is the limit."""
    chance, verdicts = random.Random(0), []
    for _ in range(600):
        comparison = Comparison(does_less=does_less)
        while not comparison.is_over:
            collecting = 2.0 if chance.random() < 1 / 30 else 1.0
            comparison.end_step((second_s if comparison.second else 1.0) * chance.gauss(1.0, 0.1) * collecting, 1)
        verdicts.append(comparison.second_wins)
    return sum(verdicts) / len(verdicts)


def test_noise_makes_no_plan_win() -> None:
    assert wins(1.0) < 0.25
    assert wins(1.05) < 0.12
    assert wins(0.8) > 0.8


def test_a_plan_that_leaves_work_out_wins_by_little() -> None:
    """Beside the noise one step in thirty takes twice the time: Python's garbage collection."""
    assert wins(0.96, does_less=True) > 0.65
    assert wins(0.96) < 0.4
    assert wins(0.9, does_less=True) > 0.9
    assert wins(1.05, does_less=True) < 0.3  # it should never be slower, but the steps decide
    assert wins(1.2, does_less=True) < 0.03


def test_only_a_plan_that_keeps_more_does_less() -> None:
    room = means(3 * BLOCK.saved_bytes)
    simple, kept = recompute(BLOCKS, room), choose(BLOCKS, room, offload=False)
    assert kept.does_less_than(simple)
    assert not simple.does_less_than(kept)
    assert not replace(kept, blocks=[OFFLOAD, *kept.blocks[1:]]).does_less_than(simple)


def test_the_faster_plan_wins() -> None:
    assert compared([1.0], [0.9], [1]).second_wins
    assert not compared([1.0], [1.1], [1]).second_wins
    assert not compared([1.0], [1.0], [1]).second_wins  # the simple one stays


def test_a_single_slow_step_decides_nothing() -> None:
    slow = Comparison()
    step = 0
    while not slow.is_over:
        is_hit = step == 3 * TURN + 1  # in a turn of the first plan
        slow.end_step(5.0 if is_hit else 1.0 if slow.second else 0.98, 1)
        step += 1
    assert not slow.second_wins


def test_inputs_of_many_sizes_take_more_turns() -> None:
    even, uneven = compared([1.0], [0.95], [100]), compared([1.0], [0.95], [100, 220, 160, 70])
    assert even.second_wins
    assert uneven.second_wins
    assert uneven._steps > even._steps
