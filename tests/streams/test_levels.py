"""How full the device is, block by block: told by a device that is only numbers."""

from __future__ import annotations

from stormtorch.streams.levels import Levels

WEIGHTS, GRADIENT, SAVED, WORK = 1000, 50, 200, 70


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
        levels.hold("block", size, 0)
    device.take(travelling)
    levels.reach(len(held), travelling)
    device.take(-travelling)
    for position in reversed(range(len(held))):
        levels.reach(position, 0)
        missing = SAVED - held[position]
        device.take(missing)
        device.take(WORK)
        device.take(-WORK - SAVED)
        device.take(GRADIENT)
    device.take(-len(held) * GRADIENT)


def test_rooms_leave_the_peak_at_the_limit() -> None:
    """If earlier blocks hold what the rooms say, the device is full to the byte while a block works."""
    device = Device()
    levels = Levels(lambda: device.allocated, lambda: device.peak)
    count, limit = 6, 5000
    for _ in range(3):
        train(device, levels, [10] * (count - 1) + [SAVED])
    levels.begin()
    rooms = levels.rooms(limit, ["block"] * count, [10] * count)
    for position in range(count):
        gradients = GRADIENT * (count - 1 - position)
        assert rooms[position] == limit - WEIGHTS - gradients - SAVED - WORK
    assert rooms[count] <= limit - WEIGHTS - SAVED  # the last block is kept


def test_what_travels_is_not_everybody_elses() -> None:
    rooms = []
    for travelling in (0, 40):
        device = Device()
        levels = Levels(lambda: device.allocated, lambda: device.peak)  # noqa: B023
        train(device, levels, [10] * 4, travelling=travelling)
        levels.begin()
        rooms.append(levels.rooms(5000, ["block"] * 4, [10] * 4))
    assert rooms[0] == rooms[1]


def test_without_notes_the_peak_decides() -> None:
    device = Device()
    levels = Levels(lambda: device.allocated, lambda: device.peak)
    device.take(500)
    assert levels.rooms(5000, ["block"] * 3, [100, 100, 100]) == [5000 - 1500 + 200] * 4


def test_more_gradients_are_seen_in_the_next_pass() -> None:
    """Accumulation: what stays from one pass to the next takes room from then on."""
    device = Device()
    levels = Levels(lambda: device.allocated, lambda: device.peak)
    train(device, levels, [10] * 4)
    levels.begin()
    before = levels.rooms(5000, ["block"] * 4, [10] * 4)
    device.take(300)
    train(device, levels, [10] * 4)
    levels.begin()
    after = levels.rooms(5000, ["block"] * 4, [10] * 4)
    assert all(now <= then - 300 for now, then in zip(after, before, strict=True))
