"""What becomes of activations, decided from numbers: VRAM first, then the link, then computing again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stormtorch.core.sizes import GiB, MiB
from stormtorch.streams.activation_plan import (
    KEEP,
    OFFLOAD,
    ActivationPlan,
    BlockPlan,
    BlockProfile,
    Means,
    choose,
    cost_s,
    gain_of,
    leanest,
    recompute,
)
from stormtorch.streams.levels import Rises

PRODUCT, ATTENTION, NARROW = ("aten.mm.default", 0), ("aten.attention.default", 0), ("aten.mm.default", 1)
# 10 ms a block; of its results, the product is the one that saves most time per byte.
BLOCK = BlockProfile(
    forward_s=0.010,
    input_bytes=100 * MiB,
    saved_bytes=1500 * MiB,
    operations={PRODUCT: (100 * MiB, 0.004), ATTENTION: (100 * MiB, 0.001), NARROW: (400 * MiB, 0.003)},
)
BLOCKS = [BLOCK] * 10
WAY = 200 * MiB


def means(
    spare: int | list[int], link: float, profiles: list[BlockProfile] = BLOCKS, *, way: int = 0, rise: int = 0
) -> Means:
    """``spare``: beside the last block, if it is kept, and beside what backward takes for itself."""
    rooms = [spare] * (len(profiles) + 1) if isinstance(spare, int) else list(spare)
    rises = [Rises(keep=rise, whole=rise, parts=rise - gain_of(profile.parts)) for profile in profiles]
    rooms = [room + rise for room in rooms]
    rooms[-2:] = [room + profiles[-1].saved_bytes for room in rooms[-2:]]
    return Means(rooms=rooms, rises=rises, out_bytes_per_s=link, in_bytes_per_s=link, way_bytes=way)


def held_by(block: BlockPlan) -> int:
    return block.held_bytes(input_bytes=BLOCK.input_bytes, saved_bytes=BLOCK.saved_bytes, operations=BLOCK.operations)


def held(plan: ActivationPlan) -> int:
    return sum(held_by(block) for block in plan.blocks[:-1])


def fits(plan: ActivationPlan, rooms: list[int]) -> bool:
    """Whether all blocks have room, beside what backward takes for itself: a recomputed block's own inputs are in
    that, wherever they come from."""
    sizes = [held_by(block) for block in plan.blocks]
    own = [BLOCK.input_bytes * (block.kind == "recompute" and not block.inputs_away) for block in plan.blocks]
    inside = [sum(sizes[: index + 1]) - own[index] for index in range(len(sizes))]
    return all(held_then <= max(0, room) for held_then, room in zip([*inside, sum(sizes)], rooms, strict=True))


def test_everything_fits() -> None:
    plan = choose(BLOCKS, means(9 * BLOCK.saved_bytes, 0.0))
    assert plan.blocks == [KEEP] * 10
    assert held(plan) == 9 * BLOCK.saved_bytes
    assert "fit" in plan.reason


def test_the_link_hides_everything() -> None:
    plan = choose(BLOCKS, means(0, 200 * GiB))
    assert plan.blocks == [OFFLOAD] * 9 + [KEEP]
    assert held(plan) == 0


def sent_by(block: BlockPlan) -> int:
    results = [BLOCK.operations[name][0] for name, away in block.results_away.items() if away]
    return sum(results) + (BLOCK.input_bytes if block.inputs_away else 0)


def test_the_best_results_survive_as_far_as_the_link_hides_them() -> None:
    """9.5 ms at 21 GiB/s are 204 MiB a block: the inputs, and one result."""
    plan = choose(BLOCKS, means(WAY, 21 * GiB, way=150 * MiB))
    for block in plan.blocks[:-1]:
        assert (block.kind, block.inputs_away, block.results_away) == ("recompute", True, {PRODUCT: True})
    assert plan.blocks[-1] == KEEP
    assert "36.0 of 72.0 ms" in plan.reason


def test_what_one_block_cannot_send_in_its_own_time_leaves_in_the_next_ones() -> None:
    """9.5 ms at 25 GiB/s are 243 MiB a block: a third result in every other block."""
    way = 300 * MiB
    plan = choose(BLOCKS, means(way, 25 * GiB, way=way))
    sent = [sent_by(block) for block in plan.blocks[:-1]]
    hidden, behind = 0.95 * 0.010 * 25 * GiB, 0.0
    for size in sent:
        behind = max(0.0, behind + size - hidden)
        assert behind <= way / 2
    assert sent.count(300 * MiB) >= 4
    assert min(sent) == 200 * MiB
    assert cost_s(BLOCKS, plan, means(way, 25 * GiB, way=way)) == pytest.approx(
        sum(0.006 - (0.001 if size == 300 * MiB else 0) for size in sent)
    )


def test_what_a_block_wants_at_once_comes_early_or_is_worth_waiting_for() -> None:
    """Inputs of 100 MiB and room for as much again on its way: the first result comes early. The next would take
    4 ms to wait for and saves 1; but one that saves 8 is waited for."""
    plenty = means(WAY, 25 * GiB, way=WAY)
    assert {sent_by(block) for block in choose(BLOCKS, plenty).blocks[:-1]} == {200 * MiB}
    dear = replace(BLOCK, operations={PRODUCT: (100 * MiB, 0.009), ATTENTION: (100 * MiB, 0.008)})
    plan = choose([dear] * 10, means(WAY, 40 * GiB, [dear] * 10, way=WAY))
    assert all(block.results_away == {PRODUCT: True, ATTENTION: True} for block in plan.blocks[:-1])
    assert cost_s([dear] * 10, plan, means(WAY, 40 * GiB, [dear] * 10, way=WAY)) == pytest.approx(9 * 100 / 40 / 1024)


def test_one_block_that_is_late_does_not_stop_the_others() -> None:
    late = replace(BLOCK, repeatable=False)
    blocks = [*BLOCKS[:4], late, *BLOCKS[5:]]
    plan = choose(blocks, means(WAY, 25 * GiB, blocks, way=WAY))
    assert plan.blocks[4] == OFFLOAD
    assert all(PRODUCT in plan.blocks[index].results_away for index in (0, 1, 2, 3))


def test_what_leaves_the_last_block_is_never_hidden() -> None:
    rooms = [5 * GiB] * 10 + [300 * MiB]
    slow = Means(rooms=rooms, rises=[Rises()] * 10, out_bytes_per_s=GiB, in_bytes_per_s=GiB, way_bytes=WAY)
    last = choose(BLOCKS, slow).blocks[-1]
    assert last.kind == "recompute"
    assert not last.inputs_away


def test_vram_that_is_left_holds_results_of_the_last_blocks() -> None:
    plan = choose(BLOCKS, means(WAY + 300 * MiB, 21 * GiB, way=150 * MiB))
    kept = [[name for name, away in block.results_away.items() if not away] for block in plan.blocks]
    assert kept == [[]] * 6 + [[ATTENTION]] * 3 + [[]]
    assert held(plan) == 300 * MiB


def test_without_a_link_everything_is_recomputed() -> None:
    plan = choose(BLOCKS, means(0, 0.0))
    assert all(block.kind == "recompute" and not block.results_away for block in plan.blocks[:-1])
    assert all(block.inputs_away for block in plan.blocks[:-2])  # where else


def test_never_more_vram_than_there_is() -> None:
    for spare in range(-GiB, 20 * GiB, 777 * MiB):
        for link in (0.0, 5 * GiB, 50 * GiB):
            given = means(spare, link)
            for plan in (choose(BLOCKS, given), recompute(BLOCKS, given)):
                assert fits(plan, list(given.rooms))
                assert len(plan.blocks) == 10


def test_what_must_not_run_twice_is_offloaded() -> None:
    once = BlockProfile(forward_s=0.01, input_bytes=MiB, saved_bytes=GiB, repeatable=False)
    assert leanest(repeatable=False, parts={}) == OFFLOAD
    assert choose([once] * 4, means(0, GiB, [once] * 4)).blocks == [OFFLOAD] * 3 + [KEEP]
    assert recompute([once] * 4, means(0, GiB, [once] * 4)).blocks == [OFFLOAD] * 3 + [KEEP]


def test_recomputing_keeps_the_inputs_that_fit() -> None:
    plan = recompute(BLOCKS, means(350 * MiB, 50 * GiB))
    assert [block.inputs_away for block in plan.blocks[:-1]] == [True] * 6 + [False] * 3
    assert held(plan) == 300 * MiB


def test_the_last_block_is_kept_if_it_has_room() -> None:
    for blocks in ([BLOCK], BLOCKS):
        hidden = means(WAY, 50 * GiB, blocks, way=WAY)
        for plan in (choose(blocks, hidden), recompute(blocks, hidden)):
            assert plan.blocks[-1] == KEEP
        for plan in (choose(blocks, means(-GiB, 0.0, blocks)), recompute(blocks, means(-GiB, 0.0, blocks))):
            assert plan.blocks[-1].kind == "recompute"
            assert held_by(plan.blocks[-1]) <= BLOCK.saved_bytes - GiB


def test_what_is_larger_than_the_way_does_not_travel() -> None:
    plan = choose(BLOCKS, means(WAY, 30 * GiB, way=WAY))
    assert all(plan.blocks[index].results_away for index in range(9))
    small = 60 * MiB
    plan = choose(BLOCKS, means(small, 30 * GiB, way=small))
    assert not any(any(block.results_away.values()) for block in plan.blocks)


def test_late_blocks_may_hold_what_early_ones_may_not() -> None:
    """Gradients that stay come while activations go: 100 MiB less room from each block to the one before it."""
    rooms = [index * 100 * MiB for index in range(11)]
    plan = choose(BLOCKS, means(rooms, 0.0, rise=GiB))
    sizes = [held_by(block) for block in plan.blocks[:-1]]
    assert fits(plan, list(means(rooms, 0.0).rooms))
    assert sum(sizes) >= 800 * MiB
    assert not plan.blocks[0].results_away


PARTED = replace(BLOCK, parts={"attention": 500 * MiB, "mlp": 900 * MiB})


def test_in_parts_where_a_whole_block_has_no_room() -> None:
    rooms = [-300 * MiB] * 3 + [GiB] * 8
    for plan in (
        choose([PARTED] * 10, means(rooms, 30 * GiB, [PARTED] * 10)),
        recompute([PARTED] * 10, means(rooms, 30 * GiB, [PARTED] * 10)),
    ):
        assert [bool(block.parts) for block in plan.blocks] == [True] * 3 + [False] * 7
    assert gain_of(PARTED.parts) == 500 * MiB


def test_what_travels_gives_way_before_a_block_is_cut_if_that_is_faster() -> None:
    """As a whole, with half of the way, the third block brings the result that saves most, and waits for some of it. In
    parts it would bring none. If in parts it brings one too, it is cut, and nobody waits."""
    rooms = [-60 * MiB, 40 * MiB, 150 * MiB, *([5 * GiB] * 8)]
    ways = means(rooms, 30 * GiB, [PARTED] * 10, way=250 * MiB)
    plan = choose([PARTED] * 10, ways)
    assert [bool(block.parts) for block in plan.blocks[:4]] == [True, True, False, False]
    assert plan.blocks[2].results_away == {PRODUCT: True}
    assert plan.way_bytes[2] <= 150 * MiB
    able = replace(PARTED, part_operations={"attention": {PRODUCT: (100 * MiB, 0.004)}})
    plan = choose([able] * 10, ways)
    assert [bool(block.parts) for block in plan.blocks[:4]] == [True, True, True, False]
    assert plan.blocks[2].results_away == {PRODUCT: True}


def test_results_survive_in_parts_too_in_ram() -> None:
    rooms = [-300 * MiB] * 3 + [GiB] * 8
    able = replace(PARTED, part_operations={"mlp": {NARROW: (100 * MiB, 0.003)}}, between_bytes=150 * MiB)
    plan = choose([able] * 10, means(rooms, 30 * GiB, [able] * 10, way=WAY))
    assert [block.results_away for block in plan.blocks[:3]] == [{NARROW: True}] * 3
    assert [block.sent_bytes(able) for block in plan.blocks[:3]] == [250 * MiB] * 3
    plan = choose([able] * 10, means(rooms, 0.0, [able] * 10, way=WAY))
    assert not any(block.results_away for block in plan.blocks[:3])


def test_what_is_on_its_way_has_room_too() -> None:
    rooms = [0, 100 * MiB, 200 * MiB, *([5 * GiB] * 8)]
    plan = choose(BLOCKS, means(rooms, 30 * GiB, way=150 * MiB))
    assert plan.way_bytes[:3] == [0, 100 * MiB, 150 * MiB]  # what the block before asks for is its own when it runs
    assert set(plan.way_bytes[3:]) == {150 * MiB}
    for index, room in enumerate(rooms):
        held_then = sum(held_by(block) for block in plan.blocks[: min(index + 1, 9)])
        assert held_then + plan.way_bytes[index] <= room


def test_the_largest_part_comes_back_piece_by_piece_where_even_it_has_no_room() -> None:
    rooms = [-600 * MiB, -300 * MiB, *([GiB] * 9)]
    plan = choose([PARTED] * 10, means(rooms, 30 * GiB, [PARTED] * 10))
    assert [block.parts for block in plan.blocks[:3]] == [("attention",), ("attention", "mlp"), ()]
    single = replace(BLOCK, parts={"mlp": 900 * MiB})
    plan = choose([single] * 10, means(rooms, 30 * GiB, [single] * 10))
    assert plan.blocks[:2] == [OFFLOAD, OFFLOAD]


def test_the_last_block_gives_way_where_the_loss_leaves_no_room_for_both() -> None:
    """Its activations, or the inputs of all others: where the link is late, those cost more."""
    rooms = [9 * BLOCK.saved_bytes] * 10 + [BLOCK.saved_bytes + WAY + 100 * MiB]
    tight = Means(rooms=rooms, rises=[Rises()] * 10, out_bytes_per_s=0.0, in_bytes_per_s=0.0)
    for plan in (choose(BLOCKS, tight), recompute(BLOCKS, tight)):
        assert not any(block.inputs_away for block in plan.blocks)
        assert {block.kind for block in plan.blocks} == {"recompute"}
        assert sum(held_by(block) for block in plan.blocks) <= rooms[-1]
    hidden = replace(tight, out_bytes_per_s=50 * GiB, in_bytes_per_s=50 * GiB, way_bytes=WAY)
    assert recompute(BLOCKS, hidden).blocks[-1] == KEEP
