"""Law: blocks may be used in any order, any number of times, from anywhere, in any mode of autograd: same numbers.

Each scenario is what one training step does; it runs on a streamed model and on its plain twin, with another step
number each time, and an ordinary step follows to see that nothing was left behind.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from .models import (
    CHAIN,
    HUGGINGFACE,
    VOCABULARY,
    Chain,
    Pair,
    Side,
    frozen,
    gradients,
    one_thread,  # noqa: F401  # a fixture
    same,
    sgd,
    stream,
    tight,
)

Scenario = Callable[[Side, int], object]


def chain(side: Side) -> Chain:
    assert isinstance(side.model, Chain)
    return side.model


def entropy(side: Side, logits: torch.Tensor, step: int) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), side.batch(step)[1].flatten())


def ordered(side: Side, step: int, order: list[int]) -> torch.Tensor:
    loss = entropy(side, side.model(side.batch(step)[0], order), step)
    loss.backward()
    return loss


def skipped(side: Side, step: int) -> object:
    return ordered(side, step, [index for index in range(8) if random.Random(step * 8 + index).random() < 0.6])


def nothing_but_the_ends(side: Side, step: int) -> object:
    return ordered(side, step, [])


def repeated(side: Side, step: int) -> object:
    return ordered(side, step, [0, 1, 1, 2, 3, 0, 4, 5, 6, 6, 6, 7, 1])


def permuted(side: Side, step: int) -> object:
    return ordered(side, step, random.Random(step).sample(range(8), 8))


def early_exit(side: Side, step: int) -> object:
    return ordered(side, step, list(range(1 + step)))


def two_forwards(side: Side, step: int) -> object:
    losses = side.loss(step), side.loss(step + 100)
    (losses[0] + losses[1]).backward()
    return losses


def forwards_then_backwards(side: Side, step: int) -> object:
    losses = [side.loss(step + 100 * index) for index in range(3)]
    for index in (1, 0, 2):
        losses[index].backward()
    return losses


def no_backward(side: Side, step: int) -> object:
    forgotten = side.loss(step + 100)
    loss = side.loss(step)
    loss.backward()
    return forgotten, loss


def no_backward_and_dropped(side: Side, step: int) -> object:
    side.loss(step + 100)  # its graph is freed here
    loss = side.loss(step)
    loss.backward()
    return loss


def through(side: Side, first: int, last: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def run(x: torch.Tensor) -> torch.Tensor:
        for block in chain(side).blocks[first:last]:
            x = block(x)
        return x

    return run


def nested_checkpoint(side: Side, step: int) -> object:
    def outer(x: torch.Tensor) -> torch.Tensor:
        x = torch.as_tensor(checkpoint(through(side, 0, 2), x, use_reentrant=False))
        x = through(side, 2, 4)(x)
        return torch.as_tensor(checkpoint(through(side, 4, 6), x, use_reentrant=False))

    model = chain(side)
    x = checkpoint(outer, model.embed(side.batch(step)[0]), use_reentrant=False)
    loss = entropy(side, model.head(through(side, 6, 8)(x)), step)
    loss.backward()
    return loss


def checkpoint_of_sub_modules(side: Side, step: int) -> object:
    model = chain(side)
    x = model.embed(side.batch(step)[0])
    for block in model.blocks:
        x = x + checkpoint(
            block.down, functional.gelu(checkpoint(block.up, x, use_reentrant=False)), use_reentrant=False
        )
    loss = entropy(side, checkpoint(model.head, x, use_reentrant=False), step)
    loss.backward()
    return loss


def reentrant_checkpoint(side: Side, step: int) -> object:
    model = chain(side)
    x = model.embed(side.batch(step)[0])
    for first in range(0, 8, 2):
        x = checkpoint(through(side, first, first + 2), x, use_reentrant=True)
    loss = entropy(side, model.head(x), step)
    loss.backward()
    return loss


def backward_twice(side: Side, step: int) -> object:
    loss = side.loss(step)
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


def backward_much_later(side: Side, step: int) -> object:
    """By then everything that this forward had on the device has made room for others."""
    loss = side.loss(step)
    with torch.no_grad():
        others = [side.loss(step + 100 + index) for index in range(4)]
    loss.backward()
    return loss, others


def evaluated_in_between(side: Side, step: int) -> object:
    seen = []

    def evaluate() -> None:
        side.model.eval()
        with torch.no_grad():
            seen.append(side.loss(step + 200))
        side.model.train()

    evaluate()
    loss = side.loss(step)
    evaluate()
    loss.backward()
    evaluate()
    side.optimizer.step()
    evaluate()
    side.optimizer.zero_grad()
    side.loss(step + 1).backward()
    return seen


def evaluated_in_order_of_its_own(side: Side, step: int) -> object:
    loss = side.loss(step)
    with torch.no_grad():
        answer = side.model(side.batch(step)[0], [7, 6, 5, 0])
    loss.backward()
    return loss, answer


def inference_mode(side: Side, step: int) -> object:
    with torch.inference_mode():
        answer = side.loss(step + 200).clone()
    loss = side.loss(step)
    with torch.inference_mode():
        other = side.loss(step + 300).clone()
    loss.backward()
    return answer, other, loss


def sub_module_alone(side: Side, step: int) -> object:
    model = chain(side)
    x = torch.randn(3, 5, 32, device=side.device)
    whole = side.loss(step)
    loss = model.blocks[3](x).square().mean() + model.get_submodule("blocks.5.up")(x).square().mean()
    loss.backward()
    return loss, whole


def blocks_in_a_loop_of_the_user(side: Side, step: int) -> object:
    model = chain(side)
    x = model.embed(side.batch(step)[0])
    for block in reversed(model.blocks):
        x = block(x)
    loss = entropy(side, model.head(x), step)
    loss.backward()
    return loss


def generated(side: Side, step: int) -> torch.Tensor:
    sequence = side.batch(step)[0]
    with torch.no_grad():
        for _ in range(4):
            sequence = torch.cat([sequence, side.model(sequence)[:, -1:].argmax(-1)], dim=1)
    return sequence


def generating(side: Side, step: int) -> object:
    loss = side.loss(step)
    sequence = generated(side, step)
    loss.backward()
    return loss, sequence


def generating_before_the_step(side: Side, step: int) -> object:
    """With the weights as they were: updates in backward cannot promise that."""
    loss = side.loss(step)
    loss.backward()
    return loss, generated(side, step)


def weights_by_functional(side: Side, step: int) -> object:
    """The user takes a layer's weight himself, inside and outside of what streams it."""
    model = chain(side)
    x = functional.embedding(side.batch(step)[0], model.embed.weight)
    x = functional.linear(x, model.get_parameter("blocks.0.up.weight"))
    x = functional.linear(x, model.get_parameter("blocks.0.down.weight"), model.get_parameter("blocks.0.down.bias"))
    loss = entropy(side, model.head(model.blocks[1](x)), step)
    loss.backward()
    return loss


def gradient_with_respect_to_the_input(side: Side, step: int) -> object:
    x = torch.randn(2, 6, 32, device=side.device, requires_grad=True)
    (slope,) = torch.autograd.grad(through(side, 0, 8)(x).square().sum(), x)
    loss = side.loss(step)
    loss.backward()
    return slope, loss


def gradients_by_autograd_grad(side: Side, step: int) -> object:
    parameters = list(side.model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(side.loss(step), parameters), strict=True):
        parameter.grad = gradient.to(parameter.device)
    return gradients(side.model)


def inputs_of_the_backward(side: Side, step: int) -> object:
    """Only the head and one block are asked for; the others get no gradient."""
    wanted = [*chain(side).head.parameters(), *chain(side).blocks[2].parameters()]
    loss = side.loss(step)
    loss.backward(inputs=wanted)
    return loss


ONE_BACKWARD: list[Scenario] = [
    skipped,
    nothing_but_the_ends,
    repeated,
    permuted,
    early_exit,
    two_forwards,
    no_backward,
    no_backward_and_dropped,
    nested_checkpoint,
    checkpoint_of_sub_modules,
    reentrant_checkpoint,
    backward_much_later,
    evaluated_in_order_of_its_own,
    inference_mode,
    sub_module_alone,
    blocks_in_a_loop_of_the_user,
    generating,
]
MORE: list[Scenario] = [
    forwards_then_backwards,
    backward_twice,
    evaluated_in_between,
    generating_before_the_step,
    weights_by_functional,
    gradient_with_respect_to_the_input,
    gradients_by_autograd_grad,
    inputs_of_the_backward,
]


def play(scenario: Scenario, device: torch.device, *, look: bool, **settings: Any) -> None:
    with Pair(device=device, optimizer=sgd if device.type == "cuda" else fused, **settings) as pair:
        for step in range(3):

            def run(side: Side, step: int = step) -> object:
                side.optimizer.zero_grad()
                result = frozen(scenario(side, step))
                if look and step % 2:
                    result = [result, gradients(side.model)]
                side.optimizer.step()
                return result

            pair.both(run, f"step {step}")
        pair.steps(1, start=50)
        pair.check(grads=look)


def fused(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


@pytest.mark.parametrize("scenario", [*ONE_BACKWARD, *MORE], ids=lambda scenario: scenario.__name__)
def test_any_order(device: torch.device, scenario: Scenario) -> None:
    play(scenario, device, look=True)


@pytest.mark.wide
@pytest.mark.parametrize("scenario", [*ONE_BACKWARD, *MORE], ids=lambda scenario: scenario.__name__)
def test_any_order_where_all_fits(scenario: Scenario) -> None:
    play(scenario, torch.device("cpu"), look=True, vram="auto", step="auto", seed=None)


@pytest.mark.parametrize("scenario", ONE_BACKWARD, ids=lambda scenario: scenario.__name__)
@pytest.mark.daily(
    "skipped",
    "two_forwards",
    "nested_checkpoint",
    "generating",
)
def test_any_order_updated_in_backward(scenario: Scenario) -> None:
    play(scenario, torch.device("cpu"), look=False, step="backward")


def test_a_gradient_penalty() -> None:
    """Backward through backward. Its graph keeps the weights it used, so all of them must fit; and a weight's three
    contributions come from two passes, which are added up one after the other: plain PyTorch mixes them."""

    def run(side: Side) -> None:
        x = torch.randn(2, 6, 32, device=side.device, requires_grad=True)
        (slope,) = torch.autograd.grad(through(side, 0, 8)(x).square().sum(), x, create_graph=True)
        (side.loss(0) + slope.square().mean()).backward()

    with Pair(vram="auto") as pair:
        pair.both(run)
        ours, theirs = gradients(pair.streamed.model), gradients(pair.plain.model)
        for name, gradient in theirs.items():
            torch.testing.assert_close(ours[name], gradient, msg=name)


def test_a_change_of_scenario_at_every_step(device: torch.device) -> None:
    """What was recorded in one step says nothing about the next."""
    rounds = [*ONE_BACKWARD, *MORE]
    random.Random(0).shuffle(rounds)
    with Pair(device=device, optimizer=sgd if device.type == "cuda" else fused) as pair:
        for step, scenario in enumerate(rounds):

            def run(side: Side, step: int = step, scenario: Scenario = scenario) -> object:
                side.optimizer.zero_grad()
                result = frozen(scenario(side, step % 7))
                side.optimizer.step()
                return result

            pair.both(run, scenario.__name__)
        pair.check()


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("trained", [False, True], ids=["", "while-training"])
def test_huggingface_generate_with_its_cache(device: torch.device, sampled: bool, trained: bool) -> None:
    def generate(side: Side) -> torch.Tensor:
        side.model.eval()
        prompt = side.batch(0)[0][:, :4]
        answer = side.model.generate(  # type: ignore[operator]
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=sampled, use_cache=True
        )
        side.model.train()
        return torch.as_tensor(answer)

    with Pair(HUGGINGFACE, device=device, optimizer=sgd if device.type == "cuda" else fused) as pair:
        for step in range(2):
            if trained:
                pair.steps(1, start=step)
            assert pair.both(generate).shape[1] == 10
        pair.both(lambda side: side.model.device.type if side.session is None else device.type, "model.device")


def test_inference_needs_no_optimizer(device: torch.device) -> None:
    torch.manual_seed(0)
    model = Chain().eval()
    twin = Chain().to(device).eval()
    twin.load_state_dict(model.state_dict())
    question = torch.arange(VOCABULARY, device=device).view(4, -1)
    with stream(model, device=device, seed=0), torch.no_grad():
        for _ in range(3):
            same(model(question), twin(question), "answer")
        same(model(question.cpu()), twin(question), "answer to a question on the CPU")
    same(model(question.cpu()), twin.cpu()(question.cpu()), "answer after close()")


# ------------------------------------------------------------------------------------- modules that are not torch's own


def compiled_blocks(model: torch.nn.Module) -> torch.nn.Module:
    assert isinstance(model, Chain)
    for index in range(0, 8, 2):
        model.blocks[index] = torch.compile(model.blocks[index], backend="eager", dynamic=False)  # type: ignore[assignment]
        model.blocks[index + 1].compile(backend="aot_eager", dynamic=False)
    return model


def compiled_whole(model: torch.nn.Module) -> torch.nn.Module:
    model.compile(backend="eager", dynamic=False)
    return model


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")  # torch.compile's own
@pytest.mark.parametrize("build", [compiled_blocks, compiled_whole], ids=["blocks", "whole"])
@pytest.mark.parametrize("vram", ["tight", "tighter", "auto"])
def test_compiled_models(build: Callable[[torch.nn.Module], torch.nn.Module], vram: str) -> None:
    """With a budget that holds whole blocks, and one that holds only their parts: graphs end where weights come in."""
    case = dataclasses.replace(CHAIN, make=lambda: build(Chain()))
    torch._dynamo.reset()
    with Pair(case, fused, vram=tight(Chain()) // 2 if vram == "tighter" else vram) as pair:
        pair.steps(3)
        pair.check()
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")
def test_a_compiled_form_of_a_streamed_model() -> None:
    """Made before or after; it runs as if it were not compiled."""
    torch._dynamo.reset()
    with Pair() as pair:
        for side in (pair.plain, pair.streamed):
            compiled = torch.compile(side.model, backend="eager", dynamic=False)
            for step in range(2):
                side.optimizer.zero_grad()
                entropy(side, compiled(side.batch(step)[0]), step).backward()
                side.optimizer.step()
        pair.check()
    torch._dynamo.reset()


class Scripted(torch.nn.Module):
    def __init__(self, traced: bool) -> None:
        super().__init__()
        self.up = torch.nn.Linear(32, 32)
        inner = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32))
        self.inner: Any = torch.jit.trace(inner, torch.ones(2, 32)) if traced else torch.jit.script(inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.as_tensor(self.inner(torch.tanh(self.up(x))))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit's own
@pytest.mark.parametrize("activations", ["keep", "auto", "recompute"])
def test_scripted_modules_stay_on_the_device(activations: str) -> None:
    """TorchScript looks at its parameters itself: they are not streamed, and the numbers are right."""

    def build(seed: int) -> torch.nn.Sequential:
        torch.manual_seed(seed)
        embedding = torch.nn.Embedding(VOCABULARY, 32)
        layers: list[Any] = [
            Scripted(traced=bool(index % 2)) if index % 3 else torch.nn.Linear(32, 32) for index in range(8)
        ]
        layers[3] = torch.jit.script(layers[3])
        return torch.nn.Sequential(embedding, *layers)

    models = build(0), build(0)
    optimizers = [fused(model) for model in models]
    with stream(models[0], optimizers[0], vram="64KiB", activations=activations) as session:
        names = {name for name, _ in models[0].named_parameters()}
        streamed = {place.name for unit in session._parts.ground.units for place in unit.places}
        assert names - streamed == {name for name in names if ".inner." in name or name.startswith("4.")}
        for step in range(3):
            question, answer = CHAIN.batch(step)
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                functional.cross_entropy(model(question).flatten(0, 1), answer.flatten()).backward()
                optimizer.step()
            same(models[0].state_dict(), models[1].state_dict(), f"step {step}")
