"""Law: a streamed weight that is handed to a ``torch.autograd.Function`` is a weight like any other.

Fused losses take ``lm_head.weight`` and never call ``lm_head``; ``Function.apply`` does not ask the classes of its
arguments, as all other functions of torch do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from stormtorch.core.errors import StormError
from stormtorch.streams.bridge.torch_private import FUNCTION_BASE
from stormtorch.streams.home.parameter import HomeParameter

from ..thinning import daily
from .models import (
    CHAIN,
    VOCABULARY,
    WIDTH,
    Batch,
    Case,
    ChainBlock,
    Pair,
    Side,
    adamw,
    frozen,
    on,
    one_thread,  # noqa: F401  # a fixture
    same,
    sgd,
    stream,
    tokens,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
STEPS = ["forward", "backward", "serial"]


class Projected(torch.autograd.Function):
    """``x @ weight.T + bias``, with everything that it is given saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = grads[0].flatten(0, -2)
        bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return grads[0] @ weight, rows.t() @ x.flatten(0, -2), bias


class Scaled(torch.autograd.Function):
    """``x * weight``, in the newer form of such functions, with a default."""

    @staticmethod
    def forward(x: torch.Tensor, weight: torch.Tensor, factor: float = 0.5) -> torch.Tensor:
        return x * weight * factor

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        ctx.save_for_backward(*inputs[:2])
        ctx.factor = inputs[2]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return grads[0] * weight * ctx.factor, (grads[0] * x * ctx.factor).flatten(0, -2).sum(0), None


project: Any = Projected.apply  # taken long before any session, as many do


class Fused(nn.Module):
    """Its norm and head are never called, only read."""

    def __init__(self, around: str = "nothing", *, tied: bool = False, frozen_head: bool = False) -> None:
        super().__init__()
        self.around = around
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(ChainBlock(WIDTH) for _ in range(6))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY).requires_grad_(not frozen_head)
        if tied:
            self.head.weight = self.embed.weight

    def finish(self, x: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = Scaled.apply(x, self.norm.weight)  # type: ignore[no-untyped-call]
        return torch.as_tensor(project(scaled, self.head.weight, self.head.bias))

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.hidden(x)
        if self.around == "nothing" or not torch.is_grad_enabled():
            return self.finish(x)
        return torch.as_tensor(checkpoint(self.finish, x, use_reentrant=self.around == "reentrant"))


class Scattered(Fused):
    """The last block's unit has parameters that checkpointing uses, outside of the block."""

    def __init__(self, around: str, *, again: bool) -> None:
        super().__init__(around)
        self.again = again
        last: Any = self.blocks[-1]
        last.after = self.norm
        del self.norm

    def finish(self, x: torch.Tensor) -> torch.Tensor:
        last: Any = self.blocks[-1]
        x = Scaled.apply(x, last.after.weight)  # type: ignore[no-untyped-call]
        return torch.as_tensor(project(last(x) if self.again else x, self.head.weight, self.head.bias))


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    logits = model(batch[0])
    return functional.cross_entropy(logits.flatten(0, -2), batch[1].to(logits.device).flatten())


def case(**settings: Any) -> Case:
    return Case("fused", lambda: Fused(**settings), tokens, loss)


def pair_on(device: str, made: Case, **settings: Any) -> Pair:
    """On a GPU with plain SGD: torch's AdamW there rounds in another way than ours."""
    return Pair(made, sgd if device == "cuda" else adamw, device=device, **settings)


def check(made: Case, *, device: str = "cpu", step: str = "forward", kept: int = 0, **settings: Any) -> None:
    with pair_on(device, made, step=step, kept=kept, **settings) as pair:
        pair.steps(3)
        pair.check(grads=step != "backward")
        with torch.no_grad():
            pair.both(lambda side: side.loss(3), "without gradients")
        with torch.inference_mode():
            pair.both(lambda side: side.loss(3), "in inference mode")
        pair.steps(daily(1, 2), start=3)
        pair.session.close()
        pair.check(grads=step != "backward")
        pair.streamed.model.to(device)  # it was left in RAM
        pair.steps(daily(1, 2), start=5)
        pair.check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("around", ["nothing", "checkpoint", "reentrant"])
@pytest.mark.parametrize("step", STEPS)
def test_the_numbers_of_a_plain_run(step: str, around: str, device: str) -> None:
    check(case(around=around), step=step, device=device)


@pytest.mark.parametrize("kept", [0, 99])
@pytest.mark.parametrize("around", ["nothing", "checkpoint", "reentrant"])
@pytest.mark.parametrize("step", STEPS)
def test_a_unit_whose_gradients_come_in_two_backward_passes(step: str, around: str, kept: int) -> None:
    """Reentrant checkpointing runs a pass inside of another: what updates units in backward must await the outer."""
    check(Case("scattered", lambda: Scattered(around, again=False), tokens, loss), step=step, kept=kept)


def test_the_same_parameters_in_two_backward_passes() -> None:
    """They add up, which step="backward" cannot have: it says so, before anything is wrong."""
    made = Case("scattered", lambda: Scattered("reentrant", again=True), tokens, loss)
    check(made)
    with Pair(made, adamw, step="backward") as pair, pytest.raises(StormError, match="there is more to add"):
        pair.streamed.step(0)


@pytest.mark.parametrize(
    "settings",
    [{"tied": True}, {"tied": True, "around": "checkpoint"}, {"frozen_head": True}],
    ids=["tied", "both", "frozen"],
)
@pytest.mark.parametrize("step", STEPS)
def test_tied_and_frozen(step: str, settings: dict[str, bool]) -> None:
    check(case(**settings), step=step)


@pytest.mark.parametrize("mode", ["offload", "recompute"])
def test_with_activations_that_leave(mode: str) -> None:
    check(case(), activations=mode, room=0)


def test_with_states_on_the_device() -> None:
    check(case(), kept=99)


@pytest.mark.parametrize("device", DEVICES)
def test_a_loss_outside_of_the_forward(device: str) -> None:
    """The hidden states come from a part of the model, and the loop itself has the head's weight."""

    def step(side: Side, number: int) -> torch.Tensor:
        model: Any = side.model
        batch = side.batch(number)
        side.optimizer.zero_grad()
        found = functional.cross_entropy(model.finish(model.hidden(batch[0])).flatten(0, -2), batch[1].flatten())
        found.backward()
        side.optimizer.step()
        return found.detach()

    with pair_on(device, case()) as pair:
        for number in range(3):
            pair.both(lambda side, number=number: step(side, number), f"loss {number}")  # type: ignore[misc]
        pair.check()


@pytest.mark.parametrize("device", DEVICES)
def test_accumulated_and_clipped(device: str) -> None:
    norms: dict[int, torch.Tensor] = {}  # the plain side's, which is the first

    def step(side: Side, number: int) -> None:
        side.optimizer.zero_grad()
        for part in range(3):
            (loss(side.model, on(tokens(3 * number + part), torch.device(device))) / 3).backward()
        norm = nn.utils.get_total_norm([p.grad for p in side.model.parameters() if p.grad is not None]).cpu()
        kept = norms.setdefault(number, norm)
        # Of a streamed model the gradients that user code sees are in RAM, where they are added up in another order.
        torch.testing.assert_close(norm, kept, rtol=1e-5 if device == "cuda" else 0.0, atol=0.0)
        nn.utils.clip_grads_with_norm_(side.model.parameters(), 0.05, kept)
        side.optimizer.step()

    with pair_on(device, case()) as pair:
        for number in range(3):
            pair.both(lambda side, number=number: step(side, number), f"step {number}")  # type: ignore[misc]
            assert float(norms[number]) > 0.05, "nothing is clipped"
        pair.check()


def test_the_parameters_stay_what_they_are() -> None:
    """Inside of the forward and out of it, the same objects have the same names."""
    seen: list[bool] = []
    known: dict[str, nn.Parameter] = {}

    class Looking(Fused):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if known and next(self.parameters()) is known["embed.weight"]:  # not the plain one
                seen.append(self.head.weight is known["head.weight"])
                seen.append(all(p is known[name] for name, p in self.named_parameters()))
            return super().forward(x)

    made = Case("fused", Looking, tokens, loss)
    with Pair(made, adamw) as pair:
        model: Any = pair.streamed.model
        known.update(model.named_parameters())
        names = list(pair.plain.model.state_dict())
        pair.steps(3)
        assert seen
        assert all(seen)
        assert model.head.weight is known["head.weight"]
        assert type(model.head.weight) is HomeParameter
        assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in known.items()}
        assert list(model.state_dict()) == names
        held = {id(p) for group in pair.streamed.optimizer.param_groups for p in group["params"]}
        assert held == {id(p) for p in known.values()}
        pair.session.close()
        assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in known.items()}
        assert all(type(p) is nn.Parameter for p in model.parameters())
        assert list(model.state_dict()) == names
        twin = copy.deepcopy(model)
        same(twin.state_dict(), pair.plain.model.state_dict(), "copy")
        same(loss(twin, tokens(9)), loss(pair.plain.model, tokens(9)), "loss of the copy")


def test_looking_at_a_weight_brings_nothing_to_the_device() -> None:
    """Fused losses ask ``weight.device`` and ``weight.dtype`` first."""

    class Asking(Fused):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embed(x)
            for block in self.blocks:
                assert self.head.weight.dtype == torch.float32
                x = block(x.to(self.head.weight.device, self.head.weight.dtype))
            return self.finish(x)

    counts = []
    for kind in (Fused, Asking):
        with Pair(Case("fused", kind, tokens, loss), adamw, step="serial") as pair:
            pair.steps(3)
            counts.append(pair.session.report().loads)
    assert counts[0] == counts[1]


def test_torch_is_as_it_was_when_the_last_session_has_ended() -> None:
    before = dict(vars(torch.autograd.Function)), dict(vars(FUNCTION_BASE))
    torch.manual_seed(0)
    first, second = Pair(case(), adamw), Pair(CHAIN, adamw)
    with second:
        with first:
            first.steps(1)
            second.steps(1)
        second.steps(1, start=1)
        first.steps(2, start=1)
        first.check()
        second.check()
    assert (dict(vars(torch.autograd.Function)), dict(vars(FUNCTION_BASE))) == before
    with pytest.raises(ValueError, match="tight"):
        stream(Fused(), vram="tight?")
    assert (dict(vars(torch.autograd.Function)), dict(vars(FUNCTION_BASE))) == before


def test_functional_call_inside_of_a_forward() -> None:
    """Code that swaps parameters finds the real ones to put back."""

    class SwappingHead(Fused):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.hidden(x)
            doubled = {"weight": self.head.weight * 2}
            return self.finish(hidden) + torch.as_tensor(torch.func.functional_call(self.head, doubled, (hidden,)))

    with Pair(Case("fused", SwappingHead, tokens, loss), adamw) as pair:
        known = {name: id(p) for name, p in pair.streamed.model.named_parameters()}
        pair.steps(3)
        pair.check()
        assert {name: id(p) for name, p in pair.streamed.model.named_parameters()} == known


class Swapping(ChainBlock):
    """Calls a part of itself with other weights and with its own, also after a call that failed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        doubled = {name: parameter * 2 for name, parameter in self.norm.named_parameters()}
        borrowed = torch.as_tensor(torch.func.functional_call(self.norm, doubled, (x,)))
        with pytest.raises(RuntimeError, match="shape"):
            torch.func.functional_call(self.norm, {"weight": x.new_ones(3)}, (x,))
        return super().forward(x) + borrowed * self.norm.weight


@pytest.mark.parametrize("activations", ["keep", "offload", "recompute"])
@pytest.mark.parametrize("device", DEVICES)
def test_functional_call_of_a_part_of_a_block(device: str, activations: str) -> None:
    """The block's own weights are on the device, and stand before the registered ones."""

    def build() -> nn.Module:
        model = Fused()
        model.blocks = nn.ModuleList(Swapping(WIDTH) for _ in range(4))
        return model

    with pair_on(device, Case("fused", build, tokens, loss), activations=activations) as pair:
        pair.steps(3)
        pair.check()
        copied = copy.deepcopy(pair.streamed.model)
    for model in (copied, pair.streamed.model):
        assert {type(module._parameters) for module in model.modules()} == {dict}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")  # torch.compile's own
@pytest.mark.parametrize("whole", [False, True], ids=["with_breaks", "whole"])
def test_in_a_compiled_block(whole: bool) -> None:
    """Dynamo looks into functions of its own accord; where it gives up, they are called as ever."""

    class Block(ChainBlock):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = Scaled.apply(super().forward(x), self.norm.weight, 0.5)  # type: ignore[no-untyped-call]
            if not whole:
                torch._dynamo.graph_break()
            return torch.as_tensor(project(y, self.down.weight.t(), None)[..., :WIDTH])

    def build() -> nn.Module:
        model = Fused()
        model.blocks = nn.ModuleList(Block(WIDTH) for _ in range(4))
        model.blocks[1].compile(backend="aot_eager", dynamic=False, fullgraph=whole)
        return model

    torch._dynamo.reset()
    with Pair(Case("fused", build, tokens, loss), adamw) as pair:
        pair.steps(3)
        pair.check()
    torch._dynamo.reset()


def test_a_function_that_keeps_the_weight_itself() -> None:
    """As an attribute of its context, where no saved-tensor hook sees it."""

    class Keeping(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.x, ctx.weight = x, weight
            return x @ weight.t()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return grads[0] @ ctx.weight, grads[0].flatten(0, -2).t() @ ctx.x.flatten(0, -2)

    class Model(Fused):
        def finish(self, x: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(Keeping.apply(x, self.head.weight))  # type: ignore[no-untyped-call]

    check(Case("fused", Model, tokens, loss))


def test_hooks_on_the_weight_are_called() -> None:
    calls: dict[int, list[torch.Tensor]] = {}

    def listen(side: Side) -> None:
        kept = calls.setdefault(id(side), [])
        side.named("head.weight").register_hook(lambda grad: kept.append(frozen(grad)))

    with Pair(case(), adamw) as pair:
        pair.both(listen)
        pair.steps(3)
        pair.check()
        same(calls[id(pair.streamed)], calls[id(pair.plain)], "what hooks saw")
        assert len(calls[id(pair.plain)]) == 3
