"""How full the device is, block by block: told by a device that is only numbers."""

from __future__ import annotations

from stormtorch.streams.activations.plans.levels import Levels, Rises

WEIGHTS, GRADIENT, SAVED, WORK, LOSS = 1000, 50, 200, 70, 30


class Device:
    def __init__(self) -> None:
        self.allocated = self.peak = WEIGHTS

    def take(self, size: int) -> None:
        self.allocated += size
        self.peak = max(self.peak, self.allocated)


def train(device: Device, levels: Levels, held: list[int], *, travelling: int = 0) -> None:
    """A pass in which the blocks hold ``held``; recomputing one takes what it has not."""
    levels.begin()
    for size in held:
        device.take(size)
        levels.hold("block", "keep" if size == SAVED else "recompute", size)
    device.take(travelling)
    levels.reach(len(held), travelling)
    device.take(LOSS)
    device.take(-LOSS - travelling)
    for position in reversed(range(len(held))):
        levels.reach(position, 0)
        device.take(SAVED - held[position] + WORK)
        device.take(-WORK - SAVED)
        device.take(GRADIENT)
    device.take(-len(held) * GRADIENT)


def test_rooms_are_what_others_leave() -> None:
    """And rises what a block takes in them, however many others have shown a higher peak."""
    device = Device()
    levels = Levels(lambda: device.allocated, lambda: device.peak)
    count, limit = 6, 5000
    for _ in range(3):
        train(device, levels, [10] * (count - 1) + [SAVED])
    levels.begin()
    rooms = levels.rooms(limit, count, [10] * count)
    for position in range(count):
        gradients = GRADIENT * (count - 1 - position)
        assert rooms[position] == limit - WEIGHTS - gradients
    assert rooms[count] == limit - WEIGHTS - LOSS
    rises = levels.rises("block", saved_bytes=SAVED)
    assert rises == Rises(keep=WORK, whole=SAVED + WORK)  # what they held themselves counts too


def test_a_block_that_held_results_tells_how_one_that_holds_none_rises() -> None:
    """Blocks rise alike only together with what they hold: the least that one has shown would not be enough for all."""
    device = Device()
    levels = Levels(lambda: device.allocated, lambda: device.peak)
    for _ in range(3):
        train(device, levels, [0, 90, 50, SAVED])
    levels.begin()
    assert levels.rises("block", saved_bytes=SAVED).whole == SAVED + WORK


def test_what_was_not_seen_follows_from_what_is_saved() -> None:
    levels = Levels(lambda: 0, lambda: 0)
    assert levels.rises("block", saved_bytes=200) == Rises(keep=0, whole=200)


def test_what_travels_is_not_everybody_elses() -> None:
    rooms = []
    for travelling in (0, 40):
        device = Device()
        levels = Levels(lambda: device.allocated, lambda: device.peak)  # noqa: B023
        train(device, levels, [10] * 4, travelling=travelling)
        levels.begin()
        rooms.append(levels.rooms(5000, 4, [10] * 4))
    assert rooms[0] == rooms[1]


def test_what_came_early_is_part_of_the_rise() -> None:
    """The last block of backward has all that it needs there already: its own rise would look smaller than others'."""
    device = Device()
    levels = Levels(lambda: device.allocated, lambda: device.peak)
    levels.begin()
    for _ in range(3):
        levels.hold("block", "recompute", 0)
    device.take(SAVED)  # of the first block, fetched ahead from the beginning on
    levels.reach(3, SAVED)
    for position in (2, 1, 0):
        levels.reach(position, SAVED)
        more = SAVED if position else 0
        device.take(more + WORK)
        device.take(-more - WORK)
    device.take(-SAVED)
    levels.begin()
    assert levels.rises("block", saved_bytes=2 * SAVED).whole == SAVED + WORK


def test_without_notes_the_peak_decides() -> None:
    device = Device()
    levels = Levels(lambda: device.allocated, lambda: device.peak)
    device.take(500)
    assert levels.rooms(5000, 3, [100, 100, 100]) == [5000 - 1500 + 300] * 4


def test_more_gradients_are_seen_in_the_next_pass() -> None:
    """Accumulation: what stays from one pass to the next takes room from then on."""
    device = Device()
    levels = Levels(lambda: device.allocated, lambda: device.peak)
    train(device, levels, [10] * 4)
    levels.begin()
    before = levels.rooms(5000, 4, [10] * 4)
    device.take(300)
    train(device, levels, [10] * 4)
    levels.begin()
    assert levels.rooms(5000, 4, [10] * 4) == [room - 300 for room in before]


def test_forgetting_in_the_middle_of_a_pass() -> None:
    """What was learned before is gone; this pass is noted as if nothing had happened."""
    device = Device()
    levels = Levels(lambda: device.allocated, lambda: device.peak)
    train(device, levels, [10] * 4)
    levels.begin()
    levels.hold("block", "recompute", 10)
    levels.forget(1.5)
    levels.hold("block", "recompute", 10)
    device.take(20)
    levels.reach(2, 0)
    levels.reach(1, 0)
    levels.begin()
    assert levels.bases == {2: WEIGHTS, 1: WEIGHTS}


def test_what_the_loss_took_of_smaller_inputs_is_a_guess() -> None:
    device = Device()
    levels = Levels(lambda: device.allocated, lambda: device.peak)
    assert not levels.knows_the_end
    train(device, levels, [10] * 4)
    levels.begin()
    assert levels.knows_the_end
    rise = levels.rise_at_the_end("another kind")
    levels.forget(1.5)
    levels.forget(2.0)
    assert levels.knows_the_end
    assert levels.rise_at_the_end("another kind") == 3 * rise > 0


def test_what_was_not_seen_of_a_kind_is_taken_from_others() -> None:
    """Backward takes memory of its own, beside what was saved."""
    device = Device()
    levels = Levels(lambda: device.allocated, lambda: device.peak)
    train(device, levels, [10, 10, SAVED])
    levels.begin()
    assert not levels.has_seen("other block")
    seen = levels.rises("block", saved_bytes=SAVED)
    assert levels.rises("other block", saved_bytes=90, others=[seen]) == Rises(keep=WORK, whole=90 + WORK)


def test_a_block_that_has_only_been_offloaded() -> None:
    """It rose by what came back, and by what it takes in any case: less is not known."""
    allocated, peak = [10], [10]
    levels = Levels(lambda: allocated[0], lambda: peak[0])
    levels.begin()
    levels.hold("kind", "offload", 0)
    levels.reach(0, 0)
    peak[0] = 40
    levels.begin()
    assert levels.has_seen("kind")
    assert levels.rises("kind", saved_bytes=5).keep == 30


def test_one_way_follows_from_another() -> None:
    whole = seen_once("recompute", SAVED + WORK)
    assert whole.rises("block", saved_bytes=SAVED).keep == WORK


def seen_once(way: str, rise: int) -> Levels:
    """Of a device with one block, which rises by so much."""
    device = Device()
    levels = Levels(lambda: device.allocated, lambda: device.peak)
    levels.begin()
    levels.hold("block", way, 0)
    levels.reach(0, 0)
    device.take(rise)
    device.take(-rise)
    levels.begin()
    return levels


def test_the_end_of_backward_is_noted_before_the_user_resets_the_peak() -> None:
    device = Device()
    levels = Levels(lambda: device.allocated, lambda: device.peak)
    levels.begin()
    levels.hold("the only one", "recompute", 0)
    levels.reach(1, 0)
    levels.reach(0, 0)
    device.take(SAVED)
    device.take(-SAVED)
    levels.end()
    device.peak = device.allocated
    levels.begin()
    assert levels.rises("the only one", saved_bytes=0).whole == SAVED


def test_a_peak_that_the_user_resets_tells_nothing() -> None:
    """As people do who print the peak of every step. The first block's rise would be negative, and least of all."""
    device = Device()
    levels = Levels(lambda: device.allocated, lambda: device.peak)
    for _ in range(3):
        train(device, levels, [10] * 4)
        device.peak = device.allocated
    levels.begin()
    rises = levels.rises("block", saved_bytes=SAVED)
    assert rises.whole == SAVED + WORK


def backward(
    device: Device, levels: Levels, rises: list[int], *, way: int = 0, arriving: int = 0, stays: int = 0
) -> None:
    """A pass whose blocks rise by so much, beside what arrives ahead of use and what stays for good."""
    levels.begin()
    for _ in rises:
        levels.hold("block", "recompute", 0)
    for position in reversed(range(len(rises))):
        levels.reach(position, 0, way)
        device.take(rises[position] + arriving + stays)
        device.take(-rises[position] - arriving)
    levels.begin()


def test_a_block_that_was_seen_to_rise_by_more_than_another() -> None:
    """Torch rounds up, tensor by tensor: the least of all would be too little the next time."""
    device = Device()
    levels = Levels(lambda: device.allocated, lambda: device.peak)
    backward(device, levels, [WORK, WORK + 3, WORK + 1, WORK])  # the peak goes up three times
    assert levels.rises("block", saved_bytes=SAVED).whole == WORK + 3
    device.peak += 1000
    backward(device, levels, [WORK] * 4)  # and tells nothing any more
    assert levels.rises("block", saved_bytes=SAVED).whole == WORK + 3


def test_what_is_not_the_blocks_own_is_not_its_rise() -> None:
    """What may arrive has its own room; what stays, as a library's workspace does, is in the next base."""
    device = Device()
    levels = Levels(lambda: device.allocated, lambda: device.peak)
    backward(device, levels, [WORK] * 4)
    backward(device, levels, [WORK] * 4, way=40, arriving=40)
    assert levels.rises("block", saved_bytes=SAVED).whole == WORK
    backward(device, levels, [WORK] * 4, stays=500)
    assert levels.rises("block", saved_bytes=SAVED).whole == WORK


def test_a_second_backward_of_a_pass_without_blocks_counts() -> None:
    device, loss = Device(), 7
    levels = Levels(lambda: device.allocated, lambda: device.peak)
    for _ in range(2):
        levels.begin()
        levels.reach(0, 0)
        for size in (loss, 3 * loss):  # a gradient of the user's own, then backward
            device.take(size)
            device.take(-size)
            levels.end()
        device.peak = device.allocated  # as users do
    levels.begin()
    assert levels.rooms(WEIGHTS + 100, 0, []) == [100 - 3 * loss]


def test_only_a_peak_that_a_pass_has_set_is_its_own() -> None:
    device = Device()
    levels = Levels(lambda: device.allocated, lambda: device.peak)

    def run(size: int) -> None:
        levels.begin()
        levels.reach(0, 0)
        device.take(size)
        device.take(-size)
        levels.end()

    run(5)
    levels.begin()
    assert levels.risen_top() == WEIGHTS + 5
    levels.begin_plan()
    device.take(50)  # the user's, between two passes
    device.take(-50)
    run(5)
    run(5)
    assert levels.risen_top() is None
    run(60)
    levels.begin()
    assert levels.risen_top() == WEIGHTS + 60


def test_what_is_taken_between_passes_leaves_less_room() -> None:
    """Also before a pass has shown it."""
    device, grown = Device(), [0]
    levels = Levels(lambda: device.allocated, lambda: device.peak, lambda: grown[0])
    train(device, levels, [SAVED] * 3)
    levels.begin()
    rooms = levels.rooms(5000, 3, [SAVED] * 3)
    device.take(300)
    grown[0] = 300
    levels.begin()
    assert levels.rooms(5000, 3, [SAVED] * 3) == [room - 300 for room in rooms]
    train(device, levels, [SAVED] * 3)
    levels.begin()
    assert levels.rooms(5000, 3, [SAVED] * 3) == [room - 300 for room in rooms]
