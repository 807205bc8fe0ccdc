"""What is done with the device's memory: room for weights first, then for states, never more than the budget has."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import stormtorch as storm
from stormtorch.core.errors import OutOfBudget, SettingError
from stormtorch.core.plan import Origin, Placement
from stormtorch.core.sizes import GiB, MiB, parse_bytes
from stormtorch.core.tags import Tag, Tier
from stormtorch.memory.host.arena import PAGE
from stormtorch.session.api import Session
from stormtorch.streams.settings import Settings
from stormtorch.streams.units.partition import partition
from stormtorch.streams.units.placement import Growth, growth

from ..thinning import daily

WHOLE = 6 * GiB
STATES = {0: 3 * GiB, 1: 2 * GiB, 2: 2 * GiB}


def grown(*, pool: int, limit: int, peak: int, free: int = 100 * GiB, lost: int = 0) -> Growth:
    placement = Placement(
        pool_bytes=pool, least_bytes=GiB, whole_bytes=WHOLE, fixed_bytes=0, reason="", origin=Origin.PLANNED
    )
    return growth(
        placement,
        pool_bytes=pool,
        limit_bytes=limit,
        peak_bytes=peak,
        free_bytes=free,
        lost_bytes=lost,
        step_bytes=GiB // 2,
        state_bytes=STATES,
    )


def test_nothing_to_spare() -> None:
    assert grown(pool=2 * GiB, limit=8 * GiB, peak=8 * GiB - MiB) == Growth(pool_bytes=0, keep=[])
    assert grown(pool=2 * GiB, limit=8 * GiB, peak=9 * GiB) == Growth(pool_bytes=0, keep=[])


def test_what_the_device_lacks_counts_once() -> None:
    """6 of 8 GiB are there, 2 of them taken: ``lost`` and ``free`` both know that."""
    some = grown(pool=GiB, limit=8 * GiB, peak=2 * GiB, free=4 * GiB, lost=2 * GiB)
    assert some.pool_bytes == 4 * GiB - 256 * MiB


def test_weights_come_first() -> None:
    some = grown(pool=2 * GiB, limit=8 * GiB, peak=5 * GiB)
    assert 2.5 * GiB < some.pool_bytes < 3 * GiB
    assert some.keep == []


def test_what_is_left_then_goes_to_states() -> None:
    assert grown(pool=2 * GiB, limit=16 * GiB, peak=6 * GiB) == Growth(pool_bytes=9 * GiB, keep=[0, 1])
    assert grown(pool=WHOLE, limit=16 * GiB, peak=13 * GiB) == Growth(pool_bytes=2 * GiB, keep=[1])
    assert grown(pool=WHOLE, limit=64 * GiB, peak=13 * GiB) == Growth(pool_bytes=7 * GiB, keep=[0, 1, 2])


def test_no_more_than_the_device_has() -> None:
    assert grown(pool=WHOLE, limit=64 * GiB, peak=13 * GiB, free=4 * GiB) == Growth(pool_bytes=3 * GiB, keep=[0])


@pytest.mark.parametrize(
    ("vram", "words"), [(8, "vram=8. Did you mean '8GiB'? Raise it"), ("8KiB", "'8KiB'. Raise it"), (0, "=0. Raise it")]
)
def test_a_number_without_a_unit_is_asked_about(vram: object, words: str) -> None:
    with pytest.raises(OutOfBudget) as caught:
        Session(nn.Linear(64, 64), None, Settings(vram=vram, device="cpu"))
    assert words in str(caught.value)


def test_a_pool_that_is_too_small_is_enlarged_within_the_budget() -> None:
    """User code that holds more of the device than planned, in views, say, gets what the budget has left."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    with Session(model, None, Settings(vram=MiB, device="cpu")) as session:
        pool, limit = session._parts.ground.pool, session.ledger.budgets[Tier.DEVICE].limit_bytes
        assert pool.capacity_bytes < MiB // 2
        lane = session._parts.ground.lanes.compute
        held = session._parts.parameters.residency.room(MiB // 2, lane, Tag.GRADIENTS)
        assert session.ledger.used_bytes(Tier.DEVICE) <= limit
        with pytest.raises(OutOfBudget, match="vram"):
            session._parts.parameters.residency.room(MiB // 2, lane, Tag.GRADIENTS)
        session._parts.parameters.residency.give(held, lane.record())
        assert torch.isfinite(model(torch.randn(2, 64))).all()


def blocks(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(96, 96) for _ in range(6))).to(dtype)


def half_frozen() -> nn.Module:
    model = blocks()
    for parameter in model[:3].parameters():
        parameter.requires_grad_(False)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "fp32": blocks,
    "bf16": lambda: blocks(torch.bfloat16),
    "fp16": lambda: blocks(torch.float16),
    "frozen in part": half_frozen,
    "frozen": lambda: blocks().requires_grad_(False),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer] | None] = {
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "none": None,
}


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("model", list(MODELS))
@pytest.mark.parametrize("step", ["forward", "backward"])
def test_ram_is_refused_as_a_whole_and_the_sum_is_enough(model: str, optimizer: str, step: str) -> None:
    """The number that a refusal names is exact: so much works, for training too, and a page less does not."""

    def opened(ram: object) -> tuple[nn.Module, torch.optim.Optimizer | None, Session]:
        made, make = MODELS[model](), OPTIMIZERS[optimizer]
        updater = None if make is None else make(made.parameters(), lr=0.01)
        return made, updater, Session(made, updater, Settings(vram=MiB, ram=ram, device="cpu", step=step))

    with pytest.raises(
        OutOfBudget, match=r"^Cannot hold this model in 1\.0 KiB of RAM .*ram='1KiB'\. Raise it"
    ) as told:
        opened("1KiB")
    total = int(re.findall(r"are needed, (\d+) bytes", told.value.numbers)[0])
    assert ("GRADIENTS" in told.value.numbers) == (optimizer != "none" and model != "frozen")
    assert ("OPTIMIZER" in told.value.numbers) == (optimizer == "adamw" and model != "frozen")
    with pytest.raises(OutOfBudget, match=f"{total} bytes"):
        opened(total - PAGE)
    made, updater, session = opened(total)
    with session:
        assert session.ledger.used_bytes(Tier.HOST) == total
        for tag, size in session._parts.ground.homes.needed.items():
            assert session.ledger.used_bytes(Tier.HOST, tag) == size
        given = torch.randn(4, 96).to(next(made.parameters()).dtype)
        if updater is None or model == "frozen":
            with torch.no_grad():
                made(given)
            return
        for _ in range(3):
            made(given).float().square().mean().backward()
            updater.step()
            updater.zero_grad()
        assert session.ledger.peak_bytes(Tier.HOST) == total


def test_a_refusal_for_want_of_ram_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def reserve(*_: object) -> None:
        raise AssertionError("nothing is to be charged")

    monkeypatch.setattr("stormtorch.memory.books.ledger.Ledger.reserve", reserve)
    model = blocks()
    before = [parameter.data_ptr() for parameter in model.parameters()]
    with pytest.raises(OutOfBudget, match=r"PARAMETERS .*, GRADIENTS .*, OPTIMIZER .*, STAGING "):
        Session(model, torch.optim.AdamW(model.parameters()), Settings(ram="300KiB", device="cpu"))
    assert [parameter.data_ptr() for parameter in model.parameters()] == before
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


def test_a_large_vocabulary_needs_no_more_than_its_table_and_a_block() -> None:
    """Not four times the table's weights, and not eight to accumulate: its gradients go home part by part."""
    width, vocabulary = 64, 4096
    layer = 2 * width * vocabulary

    def model() -> nn.Module:
        blocks = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(4)]
        return nn.Sequential(nn.Embedding(vocabulary, width), *blocks, nn.Linear(width, vocabulary)).bfloat16()

    def trained(vram: int, passes: int) -> None:
        made = model()
        optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
        with Session(made, optimizer, Settings(vram=vram, device="cpu")):
            for _ in range(passes):
                made(torch.randint(0, vocabulary, (8,))).float().square().mean().backward()
            optimizer.step()

    budgets = range(3 * layer // 2, 16 * layer, layer // 2)
    for vram in (*budgets[:5], *budgets[5 :: daily(6, 1)]):  # a larger budget can do no less
        trained(vram, 1)
        trained(vram, 3)
    with pytest.raises(OutOfBudget, match="PARAMETERS"):
        trained(layer, 1)


def _network(adapter: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(700, 24), *(nn.Linear(24, 24) for _ in range(6)), nn.Linear(24, 700))
    for parameter in list(model.parameters())[1:] if adapter else ():
        parameter.requires_grad_(False)
    return model


@pytest.mark.parametrize("optimizer", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("limit", ["1KiB", "40KiB", "60KiB"])
def test_the_vram_that_an_error_names_is_enough(optimizer: bool, limit: str) -> None:
    """And not much more than that: with one in sixteen less it is refused again."""
    model = _network()
    if not optimizer:
        model.requires_grad_(False)
    taken = torch.optim.AdamW(model.parameters()) if optimizer else None
    with pytest.raises(OutOfBudget) as caught:
        storm.stream(model, taken, vram=limit, device="cpu")
    advised = re.search(r"Raise it to at least (\d+KiB); activations come on top\.", caught.value.remedy)
    assert advised is not None
    with pytest.raises(OutOfBudget):
        storm.stream(model, taken, vram=parse_bytes(advised[1]) * 15 // 16, device="cpu")
    with storm.stream(model, taken, vram=advised[1], device="cpu"):
        model(torch.arange(8)).sum()


@pytest.mark.parametrize("optimizer", [True, False], ids=["training", "inference"])
def test_an_error_says_that_an_adapter_needs_less_where_it_does(optimizer: bool) -> None:
    model = nn.Sequential(*(nn.Linear(96, 96) for _ in range(6))).requires_grad_(optimizer)
    taken = torch.optim.AdamW(model.parameters()) if optimizer else None
    with pytest.raises(OutOfBudget) as caught:
        storm.stream(model, taken, vram="40KiB", device="cpu")
    assert ("LoRA" in caught.value.remedy) == optimizer


def test_the_ram_that_an_error_names_is_enough() -> None:
    model = _network()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(OutOfBudget) as caught:
        storm.stream(model, optimizer, ram="100KiB", device="cpu", activations="keep")
    advised = re.search(r"Raise it to at least (\d+KiB), or give disk= a directory", caught.value.remedy)
    assert advised is not None
    storm.stream(model, optimizer, ram=advised[1], device="cpu", activations="keep").close()


@pytest.mark.parametrize("device", [["cuda:0", "cuda:1"], ("cpu",), "cuda:0,cuda:1", [0, 1]], ids=str)
def test_a_list_of_devices_is_refused_in_one_line(device: object) -> None:
    model: Any = _network()
    opened: list[Callable[[Any], object]] = [
        lambda given: storm.stream(model, device=given),
        lambda given: storm.offload_activations(model, device=given),
        lambda given: storm.DataLoader(TensorDataset(torch.zeros(4)), device=given),
    ]
    for each in opened:
        with pytest.raises(SettingError, match="is a list, and STORM streams to one device"):
            each(device)


def test_what_counts_as_larger_than_the_blocks() -> None:
    def large(*sizes: int) -> list[int]:
        model = nn.Sequential(*(nn.Linear(size, 64, bias=False) for size in sizes))
        found = partition(model, unit_limit_bytes=1 << 12, only=None, leave=(), small=True)
        return [unit.image_bytes // 256 for unit in found.large]

    assert large(900, 100, 100, 100, 900) == [900, 900]
    assert large(900, 100, 100, 900) == []  # two are no repetition
    assert large(100, 100, 100, 100) == []
    assert large(1, 1, 1, 200, 300, 400, 500) == []  # what repeats is next to nothing


class _Pair(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)


class _Wide(nn.Module):
    """A table, and blocks that can be cut in two."""

    def __init__(self, rows: int = 2048, width: int = 8, inner: int = 256, blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, width)
        self.blocks = nn.ModuleList(_Pair(width, inner) for _ in range(blocks))
        self.head = nn.Linear(width, rows)


def _fits(model: nn.Module, vram: str) -> str | None:
    """The limit that the error names, or None."""
    try:
        storm.stream(model, torch.optim.SGD(model.parameters(), lr=0.1), vram=vram, device="cpu").close()
    except OutOfBudget as error:
        found = re.search(r"at least (\d+KiB)", error.remedy)
        assert found is not None
        return found[1]
    return None


def test_more_is_never_too_little() -> None:
    """Larger budgets make larger units, which need more, until larger units do not fit."""
    fits = [_fits(_Wide(), f"{limit}KiB") is None for limit in range(96, 130)]
    assert not fits[0]
    assert fits[-1]
    assert fits == sorted(fits)


@pytest.mark.parametrize("sizes", [(2048, 8, 256, 4), (64, 24, 8, 2), (300, 16, 64, 3), (4096, 8, 16, 9)], ids=str)
def test_the_limit_that_an_error_names_is_enough(sizes: tuple[int, ...]) -> None:
    named = _fits(_Wide(*sizes), "4KiB")
    assert named is not None
    assert _fits(_Wide(*sizes), named) is None
