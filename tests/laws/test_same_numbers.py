"""Law: a streamed model trains to the same numbers as plain PyTorch, bit for bit in fp32 on one kind of device.

Losses are not read inside the loop and gradients only at two of its steps: the host runs ahead as a user's would.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional

import stormtorch as storm
from stormtorch.native.split import split

from ..thinning import daily
from .models import (
    CHAIN,
    HUGGINGFACE,
    LLAMA,
    MAX_NORM,
    ODD,
    OTHERS,
    RECOMPUTED,
    TWO_KERNELS,
    VOCABULARY,
    WIDTH,
    Case,
    History,
    Pair,
    Side,
    adamw,
    closeness,
    cross_entropy,
    frozen,
    gradients,
    master,
    on,
    one_thread,  # noqa: F401  # a fixture
    parameter_bytes,
    room_for_weights,
    same,
    stream,
    tight,
    tokens,
    train,
)

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul")  # said once, by a CPU without bf16
STEPS = daily(6, 20)
BY_NAME = {case.name: case for case in (LLAMA, RECOMPUTED, ODD, *OTHERS)}
MODES = [
    *((step, accumulate, clip) for step in ("serial", "forward") for accumulate in (1, 4)
      for clip in ("off", "torch", "session")),
    ("backward", 1, "off"),
]  # fmt: skip
FEW_MODES = [("serial", 1, "session"), ("forward", 1, "torch"), ("forward", 4, "off"), ("backward", 1, "off")]


@pytest.fixture(autouse=True)
def _one_order_of_adding_up() -> Iterator[None]:
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, benchmark=False, allow_tf32=False):
        yield


def compile_block(model: nn.Module, backend: str) -> None:
    if backend:
        model.get_submodule("blocks.2").compile(backend=backend, dynamic=False)


@functools.cache
def plain(name: str, steps: int, accumulate: int, clip: str, fused: bool | None, compiled: str) -> History:
    """The plain run does not depend on how the other one streams."""
    case = BY_NAME[name]
    model = case.build()
    compile_block(model, compiled)
    look = (0, steps - 1)
    return train(case, model, adamw(model, fused=fused), steps=steps, accumulate=accumulate, clip=clip, look=look)


def check(
    case: Case,
    step: str,
    accumulate: int = 1,
    clip: str = "off",
    *,
    steps: int | None = None,
    fused: bool | None = True,
    compiled: str = "",
    vram: object = "tight",
    seed: int | None = None,
    kept: int = 0,
) -> None:
    if steps is None:
        steps = STEPS if step != "serial" and accumulate == 1 and clip != "session" else daily(4, 8) // accumulate + 2
    model = case.build()
    optimizer = adamw(model, fused=fused)
    compile_block(model, compiled)
    look = () if step == "backward" else (0, steps - 1)
    with stream(model, optimizer, vram=vram, step=step, seed=seed, kept=kept) as session:
        streamed = train(
            case, model, optimizer, steps=steps, accumulate=accumulate, clip=clip, session=session, look=look
        )
    if clip == "session":
        twin = case.build()
        reference = train(
            case, twin, adamw(twin, fused=fused), steps=steps, accumulate=accumulate, clip=clip, norms=streamed.norms,
            look=look,
        )  # fmt: skip
    else:
        reference = plain(case.name, steps, accumulate, clip, fused, compiled)
    if step == "backward":  # it has consumed them
        reference = History(**{**vars(reference), "gradients": {}})
    streamed.check(reference, within=closeness(optimizer))


@pytest.mark.parametrize("case", [LLAMA, RECOMPUTED], ids=lambda case: case.name)
@pytest.mark.parametrize(("step", "accumulate", "clip"), MODES)
def test_llama_in_every_mode(case: Case, step: str, accumulate: int, clip: str) -> None:
    check(case, step, accumulate, clip)


def test_the_tight_budget_is_one() -> None:
    """Else nothing would have to move, and these laws would say little."""
    for case in (LLAMA, RECOMPUTED, CHAIN, *OTHERS):
        if case.name != "bare":
            model = case.build()
            assert room_for_weights(model) < 0.75 * parameter_bytes(model), case.name


@pytest.mark.parametrize(("step", "accumulate", "clip"), FEW_MODES)
@pytest.mark.parametrize("case", OTHERS, ids=lambda case: case.name)
def test_every_kind_of_model(case: Case, step: str, accumulate: int, clip: str) -> None:
    check(case, step, accumulate, clip)


@pytest.mark.parametrize(("step", "accumulate", "clip"), [("forward", 2, "torch"), ("backward", 1, "off")])
@pytest.mark.parametrize(
    "case", [LLAMA, *(case for case in OTHERS if case.name in ("conv", "moe"))], ids=lambda c: c.name
)
def test_the_flags_that_torch_takes_by_default(case: Case, step: str, accumulate: int, clip: str) -> None:
    """Without ``fused=True`` torch's AdamW is another kernel with other roundings: then those are the right ones."""
    check(case, step, accumulate, clip, fused=None)


@pytest.mark.parametrize("step", ["serial", "forward", "backward"])
@pytest.mark.parametrize("name", ["llama-recomputed", "conv", "tied"])
@pytest.mark.parametrize("kept", [0, 99], ids=["", "kept"])
def test_all_of_it_fits(name: str, step: str, kept: int) -> None:
    check(BY_NAME[name], step, vram="auto", kept=kept)


@pytest.mark.parametrize("clip", ["off", "torch", "session"])
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("kept", [2, 99])
def test_states_kept_on_the_device(kept: int, accumulate: int, clip: str) -> None:
    check(LLAMA, "forward", accumulate, clip, kept=kept, seed=0)


@pytest.mark.parametrize("step", ["forward", "backward"])
@pytest.mark.parametrize(("fused", "exact"), [(None, True), (True, False)], ids=["default", "fused"])
def test_odd_sizes(step: str, fused: bool | None, exact: bool) -> None:
    """Sizes that no vector divides. torch's fused kernel has another rounding in their tails."""
    if exact:
        return check(ODD, step, fused=fused)
    model = ODD.build()
    optimizer = adamw(model, fused=fused)
    with stream(model, optimizer, step=step):
        streamed = train(ODD, model, optimizer, steps=STEPS)
    reference = plain("odd", STEPS, 1, "off", fused, "")
    same(streamed.losses, reference.losses, "losses", within=TWO_KERNELS)
    same(streamed.parameters, reference.parameters, "state_dict", within=TWO_KERNELS)
    return None


@pytest.mark.parametrize(
    ("case", "step", "accumulate", "clip", "backend"),
    [
        pytest.param(LLAMA, "forward", 4, "torch", "inductor", marks=pytest.mark.wide),
        (RECOMPUTED, "backward", 1, "off", "aot_eager"),
    ],
    ids=["inductor", "recomputed"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_one_compiled_block(case: Case, step: str, accumulate: int, clip: str, backend: str) -> None:
    torch._dynamo.reset()
    check(case, step, accumulate, clip, compiled=backend)
    torch._dynamo.reset()


@pytest.mark.parametrize(("step", "accumulate", "clip"), [*FEW_MODES, ("forward", 2, "session")])
@pytest.mark.parametrize("name", ["llama", "llama-recomputed", "conv", "tied", "moe", "lora"])
def test_no_race(name: str, step: str, accumulate: int, clip: str) -> None:
    """Every lane delayed at random, NaN in every freed slot and buffer."""
    check(BY_NAME[name], step, accumulate, clip, steps=daily(4, 5) if accumulate == 1 else daily(2, 3), seed=0)


@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize("step", ["serial", "forward", "backward"])
def test_no_race_with_other_delays(step: str, seed: int) -> None:
    check(LLAMA, step, steps=5, seed=seed)


# ------------------------------------------------------------------------------------------- one weight, several uses


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.as_tensor(self.inner(torch.tanh(self.inner(x))))


class Looped(nn.Module):
    """All blocks again and again, each with a weight that it uses twice: four uses, of which no two come together."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Twice() for _ in range(8))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return torch.as_tensor(x @ self.embed.weight.t())


class Shared(nn.Module):
    """One table for encoder, decoder and head, as in BART; blocks in between make it leave the device."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.ModuleList(Twice() for _ in range(6))
        self.decoder = nn.ModuleList(Twice() for _ in range(6))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, later = self.table(tokens), self.table(tokens.flip(-1))
        for block in self.encoder:
            x = block(x)
        x = x + later
        for block in self.decoder:
            x = block(x)
        return torch.as_tensor(self.head(x))


class Lender(nn.Module):
    """Keeps its weight, or a view of it, for the blocks behind it, after its own call has ended."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.inner = form, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, lent: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + torch.as_tensor(self.inner(x))
        if lent is not None:
            x = x + torch.tanh(x @ lent)
        weight = self.inner.weight
        return x, weight if self.form == "itself" else weight.t()


class Lending(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(Lender(form) for _ in range(8))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, lent = self.embed(tokens), None
        for index, block in enumerate((*self.blocks, *self.blocks)):
            x, weight = block(x, lent)
            lent = weight if index % 4 == 0 else lent
        return torch.as_tensor(x @ self.embed.weight.t())


SEVERAL_USES = [
    Case("looped", Looped, tokens, cross_entropy),
    Case("shared", Shared, tokens, cross_entropy),
    Case("lent", lambda: Lending("itself"), tokens, cross_entropy),
    Case("lent-view", lambda: Lending("view"), tokens, cross_entropy),
]
BY_NAME |= {case.name: case for case in SEVERAL_USES}


@pytest.mark.parametrize("room", [1.0, 1.1, 100.0])
@pytest.mark.parametrize(("step", "accumulate", "clip"), [("forward", 1, "off"), ("forward", 2, "torch")])
@pytest.mark.parametrize("name", ["looped", "shared"])
def test_sums_do_not_depend_on_the_budget(name: str, step: str, accumulate: int, clip: str, room: float) -> None:
    """Contributions to one weight are added up one by one, also where it left the device between its uses."""
    case = BY_NAME[name]
    check(case, step, accumulate, clip, steps=4, vram=int(room * tight(case.build())), seed=0)


@pytest.mark.parametrize("step", ["serial", "forward", "backward"])
@pytest.mark.parametrize("name", ["lent", "lent-view"])
def test_weights_that_outlive_the_call_of_their_module(name: str, step: str) -> None:
    """What the forward holds keeps its values when the unit leaves the device, and comes back elsewhere."""
    case = BY_NAME[name]
    check(case, step, steps=4, vram=int(1.1 * tight(case.build())), seed=0)


@pytest.mark.parametrize("activations", ["recompute", "offload", "auto"])
@pytest.mark.parametrize("name", ["looped", "shared"])
def test_sums_do_not_depend_on_what_is_recomputed(name: str, activations: str) -> None:
    case = BY_NAME[name]
    with Pair(case, functools.partial(adamw, fused=True), activations=activations) as pair:
        pair.steps(4)
        pair.check()


def test_sums_under_autocast() -> None:
    def run(side: Side) -> object:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            loss = side.loss(0)
        loss.backward()
        return loss, gradients(side.model)

    with Pair(BY_NAME["looped"]) as pair:
        pair.both(run)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_sums_with_a_compiled_block() -> None:
    torch._dynamo.reset()
    check(BY_NAME["looped"], "forward", steps=3, compiled="aot_eager", seed=0)
    torch._dynamo.reset()


def penalty(side: Side) -> torch.Tensor:
    return torch.stack([parameter.pow(2).sum() for parameter in side.model.parameters()]).sum()


def regularised_first(side: Side, step: int) -> None:
    (side.loss(step) + 1e-2 * penalty(side)).backward()
    side.loss(step + 1).backward()
    side.loss(step + 2).backward()


def hooked_on_the_way(side: Side, step: int) -> None:
    side.loss(step).backward()
    handles = [parameter.register_hook(lambda gradient: gradient * 0.7) for parameter in side.model.parameters()]
    side.loss(step + 1).backward()
    side.loss(step + 2).backward()
    for handle in handles:
        handle.remove()
    side.loss(step + 3).backward()


@pytest.mark.parametrize("accumulated", [regularised_first, hooked_on_the_way], ids=lambda way: way.__name__)
def test_backward_passes_are_added_in_their_order(accumulated: Callable[[Side, int], None]) -> None:
    """Also where torch itself has delivered the gradients of some of them."""
    with Pair(CHAIN, functools.partial(adamw, fused=True)) as pair:
        for step in range(2):
            pair.both(lambda side: side.optimizer.zero_grad(), "zero_grad")
            pair.both(lambda side, step=step: accumulated(side, step), "backward")  # type: ignore[misc]
            pair.both(lambda side: gradients(side.model), f"gradients of step {step}")
            pair.both(lambda side: side.optimizer.step(), "step")
        pair.check()


# ---------------------------------------------------------------------------------- gradients of gradients, and p.grad


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.parametrize("before", [0, 1], ids=["", "accumulated"])
@pytest.mark.parametrize("step", ["serial", "forward"])
@pytest.mark.parametrize("case", [LLAMA, BY_NAME["looped"], BY_NAME["bare"]], ids=lambda case: case.name)
def test_a_backward_that_can_be_differentiated(case: Case, step: str, before: int) -> None:
    """As AdaHessian and SophiaH do: ``p.grad`` has a graph, and the step takes its values."""

    def run(side: Side, number: int) -> object:
        side.optimizer.zero_grad()
        if before:
            side.loss(number + 10).backward()
        side.loss(number).backward(create_graph=True)
        parameters = list(side.model.parameters())
        norm = torch.stack([torch.as_tensor(p.grad).pow(2).sum() for p in parameters if p.grad is not None]).sum()
        second = torch.autograd.grad(norm, parameters, allow_unused=True)
        nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        seen = gradients(side.model)
        side.optimizer.step()
        return second, seen

    with Pair(case, functools.partial(adamw, fused=True), step=step, vram="auto") as pair:
        for number in range(2):
            pair.both(functools.partial(run, number=number), f"step {number}")
        pair.steps(2)
        pair.check()


@pytest.mark.parametrize("wide", [False, True], ids=["", "accumulated"])
def test_a_gradient_put_back_where_it_was(wide: bool) -> None:
    """``p.grad *= 0.5`` assigns what ``p.grad`` gave: code that took it before still sees it, and what it becomes."""

    def run(side: Side, number: int) -> object:
        side.optimizer.zero_grad()
        for part in range(1 + wide):
            side.loss(number + part).backward()
        parameters: list[Any] = list(side.model.parameters())
        held = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = parameter.grad
            parameter.grad *= 0.5
        for gradient in held[::2]:
            gradient.add_(1.0)
        seen = [frozen(held), gradients(side.model)]
        parameters[0].grad = parameters[0].grad[:]  # another tensor of the same memory is nothing new either
        parameters[1].grad = parameters[1].grad.flip(0)
        side.optimizer.step()
        return [*seen, gradients(side.model)]

    with Pair(CHAIN, functools.partial(adamw, fused=True)) as pair:
        for number in range(3):
            pair.both(functools.partial(run, number=number), f"step {number}")
        pair.check()


# ------------------------------------------------------------------------------------------- torch.func, forward mode


def rows() -> torch.Tensor:
    return torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(0))


def two_blocks(side: Side) -> Callable[[torch.Tensor], torch.Tensor]:
    first, second = side.model.get_submodule("blocks.2"), side.model.get_submodule("blocks.3")
    return lambda x: torch.as_tensor(second(first(x)))


def functional_loss(side: Side, values: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    logits = torch.func.functional_call(side.model, values, (x,))
    return functional.cross_entropy(logits.flatten(0, 1), y.flatten())


def copies(side: Side) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in side.model.named_parameters()}


def functional_gradients(side: Side) -> object:
    return torch.func.grad(lambda values: functional_loss(side, values, *side.batch(0)))(copies(side))


def functional_gradients_of_the_parameters(side: Side) -> object:
    values = dict(side.model.named_parameters())
    return torch.func.grad(lambda values: functional_loss(side, values, *side.batch(0)))(values)


def gradients_of_each_sample(side: Side) -> object:
    def one(values: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional_loss(side, values, x[None], y[None])

    return torch.func.vmap(torch.func.grad(one), (None, 0, 0))(copies(side), *side.batch(0))


def mapped(side: Side) -> object:
    result = torch.func.vmap(lambda x: side.model(x[None])[0])(side.batch(0)[0])
    result.square().mean().backward()
    return result, gradients(side.model)


def slope_of_the_input(side: Side) -> object:
    slope = torch.func.grad(lambda x: two_blocks(side)(x).square().sum())(rows())
    slope.square().sum().backward()
    return slope, gradients(side.model)


def jacobians(side: Side) -> object:
    block = two_blocks(side)
    return [transform(block)(rows()[:1, :1]) for transform in (torch.func.jacrev, torch.func.jacfwd)]


def hessian(side: Side) -> object:
    return torch.func.hessian(lambda x: two_blocks(side)(x).square().sum())(rows()[:1, :1])


def products(side: Side) -> object:
    result, pull, *_ = torch.func.vjp(two_blocks(side), rows())
    return result, pull(result), torch.func.jvp(two_blocks(side), (rows(),), (rows(),))


def forward_mode(side: Side) -> object:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(two_blocks(side)(forward_ad.make_dual(rows(), rows()))).tangent.clone()


TRANSFORMED = [
    functional_gradients,
    functional_gradients_of_the_parameters,
    gradients_of_each_sample,
    mapped,
    slope_of_the_input,
    jacobians,
    hessian,
    products,
    forward_mode,
]


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch's own, on the way to forward mode
@pytest.mark.parametrize("vram", ["tight", "auto"])
@pytest.mark.parametrize("transformed", TRANSFORMED, ids=lambda function: function.__name__)
def test_transformations(transformed: Callable[[Side], object], vram: str) -> None:
    """A streamed model is a function like another, and an ordinary step follows."""
    with Pair(CHAIN, functools.partial(adamw, fused=True), vram=vram) as pair:
        pair.steps(1)
        pair.both(lambda side: side.optimizer.zero_grad(), "zero_grad")
        pair.both(transformed)
        pair.steps(1, start=1)
        pair.check()


# -------------------------------------------------------------------------------------------- bf16 with fp32 masters


def with_masters(
    case: Case, device: torch.device, *, steps: int, accumulate: int, clip: str, norms: list[Any]
) -> tuple[Any, ...]:
    """(losses, weights, masters) of a plain loop that keeps fp32 masters: what everybody writes by hand."""
    model = case.build(torch.bfloat16).to(device)
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    masters = [nn.Parameter(weight.detach().float().cpu()) for weight in weights]
    optimizer = torch.optim.AdamW(masters, lr=1e-2, weight_decay=0.1, fused=True)
    losses = []
    for step in range(steps):
        for part in range(accumulate):
            number = step * accumulate + part
            torch.manual_seed(number)
            loss = case.loss(model, on(case.batch(number), device))
            (loss / accumulate).backward()
            losses.append(loss.detach())
            for weight, high in zip(weights, masters, strict=True):
                if weight.grad is not None:
                    grad = weight.grad.float().cpu()
                    high.grad = grad if high.grad is None else high.grad.add_(grad)
                    weight.grad = None
        if clip == "session":
            total = nn.utils.get_total_norm([high.grad for high in masters if high.grad is not None])
            torch.testing.assert_close(norms[step].detach().cpu().float(), total, rtol=1e-5, atol=0.0)
            nn.utils.clip_grads_with_norm_(masters, MAX_NORM, norms[step].detach().cpu().float())
        optimizer.step()
        optimizer.zero_grad()
        for weight, high in zip(weights, masters, strict=True):
            weight.data.copy_(split(high.detach())[0])
    return losses, weights, masters


@pytest.mark.parametrize(
    ("name", "step", "accumulate", "clip"),
    [
        ("llama", "serial", 1, "off"),
        ("llama", "forward", 3, "session"),
        pytest.param("llama", "forward", 1, "session", marks=pytest.mark.wide),
        ("llama", "backward", 1, "off"),
        pytest.param("llama-recomputed", "forward", 2, "off", marks=pytest.mark.wide),
        ("llama-recomputed", "backward", 1, "off"),
        ("moe", "forward", 2, "off"),
        ("lora", "forward", 1, "session"),
        ("huggingface", "forward", 1, "off"),
    ],
)
@pytest.mark.daily("llama-serial", "llama-forward-3", "llama-recomputed-backward", "moe", "lora")
def test_bf16_keeps_fp32_masters(device: torch.device, name: str, step: str, accumulate: int, clip: str) -> None:
    case, steps = BY_NAME[name], daily(4, 7) if accumulate == 1 else daily(2, 3)
    model = case.build(torch.bfloat16)
    optimizer = adamw(model, fused=True)
    with stream(model, optimizer, device=device, step=step, seed=0) as session:
        streamed = train(
            case, model, optimizer, steps=steps, accumulate=accumulate, clip=clip, device=device, session=session
        )
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        high = [master(optimizer, parameter) if optimizer.state[parameter] else None for parameter in trained]
        weights = frozen(trained)
    losses, plain_weights, masters = with_masters(
        case, device, steps=steps, accumulate=accumulate, clip=clip, norms=streamed.norms
    )
    same(streamed.losses, losses, "losses")
    same(weights, plain_weights, "weights")
    for index, (ours, theirs) in enumerate(zip(high, masters, strict=True)):
        if ours is None:  # never had a gradient
            assert torch.equal(theirs.detach().bfloat16(), weights[index])
        else:
            same(ours, theirs, f"master {index}")
    same(trained, plain_weights, "weights after close()")


@pytest.mark.parametrize("step", ["forward", "backward"])
def test_bf16_without_masters_updates_in_its_own_dtype(step: str) -> None:
    plain_model, model = LLAMA.build(torch.bfloat16), LLAMA.build(torch.bfloat16)
    reference = train(LLAMA, plain_model, adamw(plain_model), steps=6)
    optimizer = adamw(model)
    with storm.stream(model, optimizer, vram=tight(model), device="cpu", step=step, master_dtype=None):
        train(LLAMA, model, optimizer, steps=6).check(reference)


# ---------------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:RNN module weights")  # cuDNN would like them in one piece
@pytest.mark.parametrize("step", ["serial", "forward"])
@pytest.mark.parametrize("case", [LLAMA, RECOMPUTED, *OTHERS], ids=lambda case: case.name)
def test_cuda_step_by_step(case: Case, step: str) -> None:
    """From equal weights: losses and gradients bit for bit those of a plain CUDA model, the update within rounding."""
    device = torch.device("cuda", 0)
    model, twin = case.build(), case.build().to(device)
    optimizer, plain_optimizer = adamw(model), adamw(twin, fused=True)
    with stream(model, optimizer, device=device, step=step, seed=0):
        for number in range(STEPS):
            twin.load_state_dict(model.state_dict())
            losses = []
            for side in (model, twin):
                torch.manual_seed(number)
                loss = case.loss(side, on(case.batch(number), device))
                loss.backward()
                losses.append(loss)
            same(losses[0], losses[1], f"loss of step {number}")
            same(gradients(model), gradients(twin), f"gradients of step {number}")
            optimizer.step()
            plain_optimizer.step()
            same(frozen(model.state_dict()), frozen(twin.state_dict()), f"weights of step {number}", within=TWO_KERNELS)
            optimizer.zero_grad()
            plain_optimizer.zero_grad()
        same(optimizer.state_dict()["state"], plain_optimizer.state_dict()["state"], "optimizer", within=TWO_KERNELS)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:RNN module weights")
@pytest.mark.parametrize("seed", [0, 1], ids=["", "half_of_it_there"])
@pytest.mark.parametrize(("step", "accumulate", "clip"), [*FEW_MODES, ("forward", 4, "session")])
@pytest.mark.parametrize("case", [LLAMA, RECOMPUTED, *OTHERS], ids=lambda case: case.name)
def test_cuda_running_free(case: Case, step: str, accumulate: int, clip: str, seed: int) -> None:
    """Nothing is read on the way: bit for bit a plain CUDA model whose weights are updated by torch on the CPU."""
    device = torch.device("cuda", 0)
    model, steps = case.build(), STEPS // accumulate
    optimizer = adamw(model, fused=True)
    with stream(model, optimizer, device=device, step=step, seed=seed) as session:
        streamed = train(
            case, model, optimizer, steps=steps, accumulate=accumulate, clip=clip, device=device, session=session
        )
    twin, home = case.build().to(device), case.build()
    pairs = [pair for pair in zip(twin.parameters(), home.parameters(), strict=True) if pair[0].requires_grad]
    home_optimizer = adamw(home, fused=True)
    losses = []
    for number in range(steps):
        for part in range(accumulate):
            torch.manual_seed(number * accumulate + part)
            loss = case.loss(twin, on(case.batch(number * accumulate + part), device))
            (loss / accumulate).backward()
            losses.append(loss.detach())
        for there, here in pairs:
            here.grad, there.grad = None if there.grad is None else there.grad.cpu(), None
        if clip != "off":
            total = nn.utils.get_total_norm([here.grad for _, here in pairs if here.grad is not None])
            torch.testing.assert_close(streamed.norms[number].cpu(), total, rtol=1e-5, atol=0.0)
            nn.utils.clip_grads_with_norm_((here for _, here in pairs), MAX_NORM, streamed.norms[number].cpu())
        home_optimizer.step()
        with torch.no_grad():
            for there, here in pairs:
                there.copy_(here)
    same(streamed.losses, losses, "losses")
    same(streamed.parameters, frozen(twin.state_dict()), "state_dict")
    same(streamed.states["state"], home_optimizer.state_dict()["state"], "optimizer")


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_autocast(where: str) -> None:
    """Autograd then saves bf16 casts of the weights, not the weights."""
    device, results = torch.device(where), []
    for streamed in (False, True):
        model = HUGGINGFACE.build() if streamed else HUGGINGFACE.build().to(device)
        optimizer = adamw(model, fused=True)
        session = stream(model, optimizer, device=device, seed=0) if streamed else None
        losses = []
        for number in range(1 if where == "cuda" else 6):
            with torch.autocast(where, torch.bfloat16):
                loss = HUGGINGFACE.loss(model, on(HUGGINGFACE.batch(number), device))
            loss.backward()
            losses.append(loss.detach())
            if number == 0:
                losses.extend(frozen(list(gradients(model).values())))
            optimizer.step()
            optimizer.zero_grad()
        results.append(losses if where == "cuda" else [losses, frozen(model.state_dict())])
        if session is not None:
            session.close()
    same(results[1], results[0], "losses, gradients and weights")
