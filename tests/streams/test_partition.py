"""Units come from the model's own structure, and cover every parameter once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from stormtorch.core.errors import SettingError
from stormtorch.streams.units.partition import Partition, partition
from stormtorch.streams.units.unit import ALIGNMENT, Unit


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(16, 64), nn.Linear(64, 16), nn.LayerNorm(16)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 64, bias=False)
        self.scale = nn.Parameter(torch.ones(1))


def cut(
    model: nn.Module, limit: int = 1 << 30, only: list[str] | None = None, leave: list[str] | None = None
) -> Partition:
    return partition(model, unit_limit_bytes=limit, only=only, leave=leave or [])


def names(found: Partition) -> list[list[str]]:
    return [[place.name for place in unit.places] for unit in found.units]


def test_blocks_are_units_and_everything_is_covered_once() -> None:
    model = Model()
    found = cut(model, 6 * 4096)
    flat = [name for unit in names(found) for name in unit]
    assert sorted(flat) == sorted(name for name, _ in model.named_parameters())
    for number in range(3):
        inside = {f"blocks.{number}.{name}" for name, _ in model.blocks[number].named_parameters()}
        assert any(inside <= set(unit) for unit in names(found))


def test_what_is_too_large_is_taken_apart() -> None:
    assert len(cut(Model(), 4096).units) > len(cut(Model(), 1 << 20).units)


def test_a_shared_parameter_belongs_to_one_unit_and_is_used_by_two_entries() -> None:
    model = Model()
    model.head.weight = model.embed.weight
    found = cut(model, 6 * 4096)
    owners = [unit for unit in found.units if any(p.parameter is model.embed.weight for p in unit.places)]
    assert len(owners) == 1
    users = [entry for entry in found.entries if any(use.parameter is model.embed.weight for use in entry.uses)]
    assert len(users) == 2
    assert all(owners[0] in entry.units for entry in users)


def test_modules_can_be_chosen_and_left() -> None:
    model = Model()
    found = cut(model, only=["blocks"])
    assert all(name.startswith("blocks.") for unit in names(found) for name in unit)
    assert {id(p) for p in found.left} == {id(p) for n, p in model.named_parameters() if not n.startswith("blocks.")}
    found = cut(model, leave=["embed", "blocks.1"])
    assert not any(name.startswith(("embed", "blocks.1.")) for unit in names(found) for name in unit)
    with pytest.raises(SettingError, match=r"no module 'block'.*blocks"):
        cut(model, leave=["block"])


@pytest.mark.parametrize(
    "part", [lambda w: w[:2], lambda w: w[:, 0], lambda w: w[3, 2:4]], ids=["rows", "column", "few"]
)
def test_a_buffer_over_the_memory_of_a_parameter_is_refused(part: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model = Model()
    model.register_buffer("one", torch.zeros(8))
    model.register_buffer("two", model.get_buffer("one")[2:6])  # buffers may share memory
    cut(model)
    model.register_buffer("part", part(model.get_parameter("blocks.1.up.weight").data))
    with pytest.raises(SettingError, match=r"buffer 'part' shares memory with the parameter 'blocks.1.up.weight'"):
        cut(model)


def test_parameters_over_the_same_memory_are_refused() -> None:
    """Also where one lies within the other, with a third in between."""
    model = Model()
    memory = torch.zeros(64)
    for name, (start, end) in {"a": (0, 64), "b": (8, 16), "c": (32, 40)}.items():
        model.register_parameter(name, nn.Parameter(memory[start:end]) if name != "b" else nn.Parameter(torch.ones(8)))
    with pytest.raises(SettingError, match=r"parameters 'a' and 'c' share memory"):
        cut(model)


def test_trained_parameters_come_first_and_every_one_is_aligned() -> None:
    block = Block()
    block.up.weight.requires_grad_(False)
    unit = Unit(0, "block", list(block.named_parameters()))
    trained = [place.trained for place in unit.places]
    assert trained == sorted(trained, reverse=True)
    assert all(place.at % ALIGNMENT == 0 and place.grad_at % ALIGNMENT == 0 for place in unit.places)
    for place in unit.places:
        assert unit.place_at(place.at) is place
        assert unit.place_at(place.at + place.count * 4 - 1) is place


def test_strides_are_kept() -> None:
    convolution = nn.Conv2d(3, 8, 3)
    convolution.weight.data = convolution.weight.data.contiguous(memory_format=torch.channels_last)
    unit = Unit(0, "convolution", list(convolution.named_parameters()))
    image = torch.zeros(unit.image_bytes, dtype=torch.uint8)
    for place in unit.places:
        assert place.in_image(image).stride() == place.parameter.stride()
