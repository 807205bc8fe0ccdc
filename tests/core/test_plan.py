"""A plan survives JSON, refuses damaged JSON in one line, and prints as one page."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stormtorch.core.errors import SettingError
from stormtorch.core.plan import (
    VERSION,
    Activations,
    Block,
    DiskUse,
    Division,
    GradientRing,
    Limit,
    OptimizerShare,
    Origin,
    Part,
    Placement,
    Plan,
    StepMode,
    UnitPlan,
)
from stormtorch.core.sizes import GiB, MiB
from stormtorch.core.tags import Tier

SIZES, TEXTS, TRUTHS = st.integers(0, (1 << 63) - 1), st.text(max_size=20), st.booleans()
KINDS, ORIGINS = st.sampled_from(["keep", "offload", "recompute"]), st.sampled_from(Origin)
PARTS = st.builds(Part, bytes=SIZES, home=st.sampled_from(Tier), resident=TRUTHS)
UNITS = st.builds(UnitPlan, name=TEXTS, weights=PARTS, gradients=st.none() | PARTS, states=st.none() | PARTS)
BLOCKS = st.builds(Block, kind=KINDS, inputs_away=TRUTHS, device_bytes=SIZES, host_bytes=SIZES)
WHY: dict[str, st.SearchStrategy[Any]] = {"reason": TEXTS, "origin": ORIGINS}
LIMITS = st.builds(Limit, limit_bytes=SIZES, **WHY)
POOL_SIZES = {field.name: SIZES for field in dataclasses.fields(Placement) if field.name.endswith("_bytes")}
PLANS = st.builds(
    Plan,
    vram=LIMITS,
    ram=LIMITS,
    disk=st.none() | st.builds(DiskUse, limit_bytes=SIZES, states_bytes=SIZES, ram_bytes=SIZES, **WHY),
    pool=st.builds(Placement, **POOL_SIZES, **WHY),
    division=st.builds(Division, unit_bytes=SIZES, left_bytes=SIZES, **WHY),
    units=st.lists(UNITS, max_size=12).map(tuple),
    gradients=st.none() | st.builds(GradientRing, ring_bytes=SIZES, **WHY),
    step=st.none() | st.builds(StepMode, mode=st.sampled_from(["backward", "forward", "serial"]), **WHY),
    optimizer=st.none() | st.builds(OptimizerShare, device_share=st.floats(0, 1), **WHY),
    activations=st.builds(
        Activations,
        mode=KINDS | st.just("auto"),
        blocks=st.lists(BLOCKS, max_size=5).map(tuple),
        outside=st.sampled_from(["keep", "offload"]),
        **WHY,
    ),
)


def part(size: int, *, resident: bool = False) -> Part:
    return Part(bytes=size, home=Tier.HOST, resident=resident)


def unit(name: str, size: int, *, kept: bool = False) -> UnitPlan:
    return UnitPlan(
        name=name,
        weights=part(size, resident=kept),
        gradients=part(size, resident=kept),
        states=part(6 * size, resident=kept),
    )


def plan(*units: UnitPlan) -> Plan:
    forced, planned, measured = Origin.FORCED, Origin.PLANNED, Origin.MEASURED
    return Plan(
        vram=Limit(limit_bytes=8 * GiB, reason="vram='8GiB'", origin=forced),
        ram=Limit(limit_bytes=64 * GiB, reason="ram='auto': 70 free", origin=planned),
        disk=DiskUse(limit_bytes=200 * GiB, states_bytes=6 * GiB, ram_bytes=GiB, reason="3 of 3 units", origin=planned),
        pool=Placement(
            pool_bytes=6 * GiB,
            least_bytes=GiB,
            whole_bytes=5 * GiB,
            fixed_bytes=GiB // 2,
            adding_bytes=MiB,
            kept_bytes=GiB,
            reason="all of it fits",
            origin=measured,
        ),
        division=Division(unit_bytes=GiB, left_bytes=MiB, reason="a sixth", origin=planned),
        units=units or (unit("embedding", 500 * MiB), unit("layers.0", 100 * MiB), unit("layers.1", 100 * MiB)),
        gradients=GradientRing(ring_bytes=200 * MiB, reason="step='backward'", origin=forced),
        step=StepMode(mode="backward", reason="step='backward'", origin=forced),
        optimizer=OptimizerShare(device_share=0.1, reason="10% on the device", origin=measured),
        activations=Activations(
            mode="auto",
            blocks=(Block(kind="keep", inputs_away=False, device_bytes=3 * MiB, host_bytes=0),) * 2,
            outside="keep",
            reason="kept",
            origin=measured,
        ),
    )


@settings(max_examples=50)
@given(PLANS)
def test_json_and_back_is_the_same_plan(made: Plan) -> None:
    again = Plan.from_json(made.to_json())
    assert again == made
    assert hash(again) == hash(made)
    assert again.to_json() == made.to_json()


@settings(max_examples=50)
@given(PLANS)
def test_any_plan_is_a_page(made: Plan) -> None:
    assert len(str(made).split("\n")) <= 20


def test_the_page() -> None:
    layers = [unit(f"layers.{number}", 100 * MiB, kept=number < 2) for number in range(30)]
    assert str(plan(unit("embedding", 500 * MiB), *layers)).splitlines() == [
        "vram        at most 8.0 GiB: vram='8GiB' (forced)",
        "ram         at most 64.0 GiB: ram='auto': 70 free (planned)",
        "disk        6.0 GiB of optimizer states, through 1.0 GiB of RAM; at most 200.0 GiB: 3 of 3 units (planned)",
        "pool        6.0 GiB on the device, 512.0 MiB of it for gradients, 1.0 GiB of it for states kept: "
        "all of it fits (measured)",
        "units       31, blocks above 1.0 GiB are split: a sixth (planned); 1.0 MiB not streamed, on the device",
        "            28 like layers.2: weights 100.0 MiB, gradients 100.0 MiB, states 600.0 MiB; home: host",
        "            embedding: weights 500.0 MiB, gradients 500.0 MiB, states 2.9 GiB; home: host",
        "            2 like layers.0: weights 100.0 MiB, gradients 100.0 MiB, states 600.0 MiB; home: host; "
        "stay on the device: weights and gradients and states",
        "gradients   through a ring of 200.0 MiB in RAM: step='backward' (forced)",
        "step        backward: step='backward' (forced)",
        "optimizer   10% on the device (measured)",
        "activations auto: kept (measured); 6.0 MiB on the device, 0 B in RAM",
    ]


def test_units_of_many_sizes_are_counted() -> None:
    assert (
        "            and 14 of other sizes" in str(plan(*(unit(f"odd.{n}", n * MiB) for n in range(20)))).splitlines()
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it is not JSON"),
        ("{", "it is not JSON"),
        ("[" * 100_000, "it is not JSON"),
        ("[1]", "its version is None"),
        ("null", "its version is None"),
        ("{}", "its version is None"),
        ('{"version": true}', "its version is True"),
        ('{"version": 1}', "its version is 1, and this STORM reads version 3"),
        ('{"version": "2"}', "its version is '2'"),
        ('{"version": 3}', "plan lacks activations"),
        (None, "it is not JSON"),
        (b"\xff", "it is not JSON"),
    ],
)
def test_what_is_no_plan_is_refused_in_one_line(text: Any, words: str) -> None:
    refused(text, words)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("vram",), None, "plan.vram is None, not an object"),
        (("vram", "limit_bytes"), "8GiB", "plan.vram.limit_bytes is '8GiB', not a whole number of bytes"),
        (("vram", "limit_bytes"), -1, "plan.vram.limit_bytes is -1, not"),
        (("vram", "limit_bytes"), 1.0, "plan.vram.limit_bytes is 1.0, not"),
        (("vram", "limit_bytes"), True, "plan.vram.limit_bytes is True, not"),
        (("vram", "limit_bytes"), 1 << 63, "plan.vram.limit_bytes is 9223372036854775808, not"),
        (("vram", "reason"), 3, "plan.vram.reason is 3, not a text"),
        (("vram", "origin"), "guessed\n", r"plan.vram.origin is 'guessed\n', not one of planned, measured, forced"),
        (("vram", "more"), 1, "plan.vram has an unknown 'more'"),
        (("units",), {}, "plan.units is {}, not a list"),
        (("units", 1), [], "plan.units[1] is [], not an object"),
        (("units", 1, "weights", "home"), "cloud", "plan.units[1].weights.home is 'cloud', not one of device, host"),
        (("units", 1, "weights", "resident"), 1, "plan.units[1].weights.resident is 1, not true or false"),
        (("units", 1, "weights"), None, "plan.units[1].weights is None, not an object"),
        (("step", "mode"), "auto", "plan.step.mode is 'auto', not one of forward, backward, serial"),
        (("step", "mode"), [], "plan.step.mode is [], not"),
        (("optimizer", "device_share"), 1.5, "plan.optimizer.device_share is 1.5, not a share"),
        (("optimizer", "device_share"), float("nan"), "plan.optimizer.device_share is nan, not a share"),
        (("activations", "blocks", 0, "kind"), "drop", "plan.activations.blocks[0].kind is 'drop', not one of keep"),
    ],
)
def test_a_wrong_value_is_named_in_one_line(path: tuple[Any, ...], value: Any, words: str) -> None:
    data = json.loads(plan().to_json())
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    refused(json.dumps(data), words)


def refused(text: Any, words: str) -> None:
    with pytest.raises(SettingError) as told:
        Plan.from_json(text)
    message = str(told.value)
    assert words in message
    assert "\n" not in message
    assert len(message) < 300


def test_every_field_is_needed() -> None:
    def without_each(inner: Any) -> list[str]:
        """The text of the plan without each field of ``inner`` in turn, and of what is in it."""
        items = list(inner.items() if isinstance(inner, dict) else enumerate(inner) if isinstance(inner, list) else ())
        texts = []
        for key, value in items:
            texts += without_each(value)
            if isinstance(inner, dict):
                del inner[key]
                texts.append(json.dumps(whole))
                inner[key] = value
        return texts

    whole = json.loads(plan().to_json())
    texts = without_each(whole)
    assert len(texts) > 60
    for text in texts:
        refused(text, "lacks" if json.loads(text).get("version") == VERSION else "version")


def test_a_whole_number_is_a_share_too() -> None:
    data = json.loads(plan().to_json())
    data["optimizer"]["device_share"] = 1
    share = Plan.from_json(json.dumps(data)).optimizer
    assert share is not None
    assert type(share.device_share) is float


def test_a_pool_is_whole_when_weights_have_room_beside_states() -> None:
    pool = plan().pool
    assert pool.is_whole
    assert dataclasses.replace(pool, whole_bytes=pool.whole_bytes + 511).is_whole, "pools grow by whole grains"
    assert not dataclasses.replace(pool, kept_bytes=pool.kept_bytes + 1).is_whole
    assert not dataclasses.replace(pool, passing_bytes=1).is_whole
