"""What of a block must be computed again, and what is idle, when some results are at hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from stormtorch.core.errors import StaleGraph
from stormtorch.memory.stopwatch import Reading
from stormtorch.streams.activations import ActivationStream
from stormtorch.streams.replay import Measuring, Recording, Replaying
from stormtorch.streams.tape import Tape

Block = Callable[[torch.Tensor], torch.Tensor]
WEIGHT = torch.randn(8, 8)
SINE, EXP, NEG, MM, MUL = (
    "aten.sin.default",
    "aten.exp.default",
    "aten.neg.default",
    "aten.mm.default",
    "aten.mul.Tensor",
)


class Stream:
    """Nothing leaves; memory that nobody should look at is poisoned."""

    poison = True


def as_stream() -> ActivationStream:
    return Stream()  # type: ignore[return-value]


def measured(block: Block, x: torch.Tensor, *, seconds: dict[str, float] | None = None) -> Tape:
    """The tape of a run. An operation takes a millisecond, or what ``seconds`` says."""
    tape = Tape()

    def save(tensor: torch.Tensor) -> torch.Tensor:
        tape.save(tensor)
        return tensor

    class Timing(Measuring):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self._time = lambda call: (call(), _always((seconds or {}).get(str(func), 1e-3)))
            return super().__torch_dispatch__(func, types, args, kwargs)

    with (
        torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor),
        Timing(tape, lambda call: (call(), _always(1e-3))),
    ):
        block(x)
    tape.close()
    return tape


def _always(seconds: float) -> Reading:
    return lambda: seconds


def rotated(x: torch.Tensor) -> torch.Tensor:
    """A product, then a chain of which only the last link is saved; and one more operation that nobody needs again."""
    return torch.neg(torch.sin(torch.mul(torch.mm(x, WEIGHT), 2.0)).exp())


def given() -> torch.Tensor:
    return torch.randn(4, 8, requires_grad=True)


def test_what_leads_to_a_result_is_idle_with_it() -> None:
    """Sine saves its argument (the product, doubled), exp its result; nothing saves what neg is given or gives."""
    tape = measured(rotated, given())
    assert tape.idle(set()) == {(NEG, 0)}
    assert tape.idle({(MUL, 0)}) == {(NEG, 0), (MM, 0)}
    assert tape.idle({(EXP, 0)}) == {(NEG, 0), (SINE, 0)}
    assert tape.idle({(EXP, 0), (MUL, 0)}) == {(NEG, 0), (SINE, 0), (MM, 0)}


def test_ranked_by_what_each_saves_given_those_before() -> None:
    """The doubled product stands for the product too, which is then worth nothing."""
    ranking = measured(rotated, given(), seconds={MM: 5e-3}).ranking()
    assert ranking is not None
    assert {name: round(seconds * 1e3) for name, (_, seconds) in ranking.items()} == {(MUL, 0): 6, (EXP, 0): 2}
    assert list(ranking) == [(MUL, 0), (EXP, 0)]


def test_nothing_is_known_while_the_device_is_at_it() -> None:
    tape = measured(rotated, given())
    tape.add(("late", 0), [], [], kind="fixed", heavy=False, seconds=lambda: None)
    assert tape.ranking() is None


def saved_by(block: Block, x: torch.Tensor) -> list[torch.Tensor]:
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(x)
    return saved


@pytest.mark.parametrize("aside", [{}, {(MUL, 0): False}, {(EXP, 0): False, (MUL, 0): False}])
def test_replayed_bit_for_bit(aside: dict[tuple[str, int], bool]) -> None:
    """Idle operations are not run, and what stands in for their results, NaN, is not looked at."""
    x = given()
    tape = measured(rotated, x)
    recording = Recording(aside, as_stream(), tape, nn.Identity())
    with recording:
        expected = rotated(x)
    assert recording.idle() == tape.idle(aside.keys())
    with Replaying(recording, as_stream()):
        saved = saved_by(rotated, x)
    plain = saved_by(rotated, x)
    assert torch.equal(rotated(x), expected)
    assert len(saved) == len(plain)
    for one, other in zip(saved, plain, strict=True):
        assert torch.equal(one, other)


def in_place(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(torch.cos(x).mul_(2.0))


def random(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(torch.rand_like(x) * x)


def by_number(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x * x.detach().sum().item())


def test_parts_have_tapes_of_their_own() -> None:
    """Named as in the block; what others saved is not theirs. None for what runs twice, or inside of another."""
    tape, x = Tape(), given()

    def part(name: str, block: Block, x: torch.Tensor) -> torch.Tensor:
        tape.begin(name)
        try:
            return block(x)
        finally:
            tape.end()

    def block(x: torch.Tensor) -> torch.Tensor:
        y = part("one", rotated, torch.sin(x))
        z = part("other", lambda y: part("inner", torch.sin, rotated(y)), y)
        return part("twice", torch.cos, part("twice", torch.cos, z * x))

    def save(tensor: torch.Tensor) -> torch.Tensor:
        tape.save(tensor)
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor),
        Measuring(tape, lambda call: (call(), _always(1e-3))),
    ):
        block(x)
    assert {name: part is not None for name, part in tape.parts.items()} == {
        "one": True,
        "inner": False,
        "other": True,
        "twice": False,
    }
    one, other = tape.parts["one"], tape.parts["other"]
    assert one is not None
    assert other is not None
    assert one.operations == [(MM, 0), (MUL, 0), (SINE, 1), (EXP, 0), (NEG, 0)]
    assert other.operations == [(MM, 1), (MUL, 1), (SINE, 2), (EXP, 1), (NEG, 1), (SINE, 3)]
    assert one.idle({(MUL, 0)}) == {(MM, 0), (NEG, 0)}  # what neg gives is saved by the next part, not by this one
    assert other.idle({(MUL, 1)}) == {(MM, 1), (SINE, 3)}  # here the last sine saves it, inside
    assert one.ranking() is not None


@pytest.mark.parametrize("block", [in_place, random, by_number])
def test_never_idle(block: Block) -> None:
    """Writes, random numbers, and numbers that come out of tensors."""
    tape = measured(block, given())
    everything = {step.operation for step in tape.steps if step.size}
    idle = tape.idle(everything)
    assert all(step.operation not in idle for step in tape.steps if step.must_run)
    assert any(step.must_run for step in tape.steps)


def test_another_way_forward_leaves_nothing_idle() -> None:
    x = given()
    recording = Recording({(MUL, 0): False}, as_stream(), measured(rotated, x), nn.Identity())
    with recording:
        rotated(torch.exp(x))
    assert not recording.idle()


def test_another_way_in_backward() -> None:
    """Before anything stood in for a result, all is computed from there on; after that, it is an error."""
    x = given()
    recording = Recording({(MUL, 0): False}, as_stream(), measured(rotated, x), nn.Identity())
    with recording:
        expected = rotated(x)
    with Replaying(recording, as_stream()):
        torch.cos(x)
        assert torch.equal(rotated(x), expected)
    recording = Recording({(MUL, 0): False}, as_stream(), measured(rotated, x), nn.Identity())
    with recording:
        rotated(x)
    with (
        pytest.raises(StaleGraph, match=r"ran aten\.cos\.default where forward ran aten\.mul\.Tensor"),
        Replaying(recording, as_stream()),
    ):
        torch.mul(torch.cos(torch.mm(x, WEIGHT)), 2.0)


def test_unsure_tapes_know_of_products_only() -> None:
    tape = measured(rotated, given())
    tape.is_sure = False
    assert not tape.idle({(MUL, 0)})
    for step in list(tape.steps):
        if step.operation[0] == MM:
            assert step.heavy
    ranking = tape.ranking()
    assert ranking is not None
    assert list(ranking) == [(MM, 0)]
