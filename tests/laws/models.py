"""What the laws are tried on: small models of every kind, a loop that records, and a plain twin beside each.

A law never knows what a number should be. It knows that the streamed side and the plain side must have the same one.
Sizes are multiples of 8 per parameter, because the last ``numel % 8`` elements go through another loop in torch's fused
kernel (tests/native/test_adamw_torch.py); one case keeps odd sizes on purpose.
"""

from __future__ import annotations

import copy
import functools
import random
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from stormtorch.core.sizes import round_up
from stormtorch.memory.lanes.lane import Delay
from stormtorch.native.library import library
from stormtorch.session.api import Session
from stormtorch.streams.settings import Settings, Trial

Batch = tuple[torch.Tensor, ...]
Optimizers = Callable[[nn.Module], torch.optim.Optimizer]
T = TypeVar("T")

WIDTH, VOCABULARY, ROWS, LENGTH = 32, 32, 4, 8
MAX_NORM = 0.5  # below the norms of these models, so that clipping changes every number


# ---------------------------------------------------------------------------------------------------------- models


class LlamaBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        q, k, v = (part(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        # written out: the fused kernels add up in no fixed order on a GPU
        masked = scores + torch.full(scores.shape[-2:], float("-inf"), dtype=x.dtype, device=x.device).triu(1)
        x = x + self.o((masked.softmax(-1) @ v).transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + torch.as_tensor(self.down(functional.silu(self.gate(h)) * self.up(h)))


class Llama(nn.Module):
    def __init__(self, *, blocks: int = 6, width: int = WIDTH, tied: bool = False, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, 4) for _ in range(blocks))
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute and self.training else block(x)
        return torch.as_tensor(self.head(self.norm(x)))


class ConvBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional.relu(self.norm(self.conv(x)))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.body = nn.Sequential(*(ConvBlock(16) for _ in range(8)))
        self.head = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.head(self.body(self.stem(x)).mean((2, 3))))


class MoeBlock(nn.Module):
    """Top-1 routing by the data. The last two experts are never chosen; of the others each batch leaves some out."""

    def __init__(self, width: int, experts: int = 8) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, chosen = self.router(x)[..., :-2].softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = chosen == number
            if bool(rows.any()):
                out[rows] = expert(x[rows]) * weight[rows].unsqueeze(-1)
        return x + out


class Moe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.blocks = nn.ModuleList(MoeBlock(16) for _ in range(8))
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens[:, :2])  # few tokens: experts stay unused
        for block in self.blocks:
            x = block(x)
        return torch.as_tensor(functional.pad(self.head(x), (0, 0, 0, tokens.shape[1] - 2)))


class Adapted(nn.Module):
    """A frozen layer with a trainable low-rank path beside it."""

    def __init__(self, base: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features, bias=False)
        nn.init.normal_(self.b.weight, std=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.base(x) + self.b(self.a(x)))


def adapt(model: nn.Module) -> nn.Module:
    """``model`` frozen, with adapters at q and v of every block."""
    model.requires_grad_(False)
    for block in model.modules():
        if isinstance(block, LlamaBlock):
            block.q, block.v = Adapted(block.q), Adapted(block.v)  # type: ignore[assignment]
    return model


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.ModuleList(nn.LSTM(16, 16, batch_first=True) for _ in range(8))
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, state = self.embed(tokens), None
        for layer in self.layers:
            x, state = layer(x, state)
        return torch.as_tensor(self.head(x))


class Dropping(nn.Module):
    """torch's own encoder layers: their attention reads ``out_proj.weight`` without ever calling ``out_proj``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True) for _ in range(8)
        )
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return torch.as_tensor(self.head(x))


class Bare(nn.Module):
    """Parameters and a buffer directly on the root, no child at all."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(VOCABULARY, 16))
        self.inner = nn.Parameter(torch.randn(16, 16) / 4)
        self.bias = nn.Parameter(torch.zeros(VOCABULARY))
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.table[tokens] @ self.inner) * self.scale
        return x @ self.table.t() + self.bias


class ChainBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.as_tensor(self.down(functional.gelu(self.up(self.norm(x)))))


class Chain(nn.Module):
    """Blocks in whatever order the caller wants."""

    def __init__(self, blocks: int = 8, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(ChainBlock(width) for _ in range(blocks))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor, order: Sequence[int] | None = None) -> torch.Tensor:
        x = self.embed(tokens)
        for index in range(len(self.blocks)) if order is None else order:
            x = self.blocks[index](x)
        return torch.as_tensor(self.head(x))


def huggingface(**changes: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attn_implementation="eager",
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
        **changes,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model.train()


# ----------------------------------------------------------------------------------------------------------- cases


@dataclass(frozen=True)
class Case:
    """A model, its data and its loss. ``build`` and ``batch`` give the same numbers at every call."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[[nn.Module, Batch], torch.Tensor]

    def build(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        torch.manual_seed(0)
        return self.make().to(dtype)


def tokens(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    x = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
    return x[:, :-1].contiguous(), x[:, 1:].contiguous()


def images(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, 3, 6, 6, generator=generator), torch.randint(8, (ROWS,), generator=generator)


def vectors(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, 13, generator=generator), torch.randint(5, (ROWS,), generator=generator)


def cross_entropy(model: nn.Module, batch: Batch) -> torch.Tensor:
    logits = model(batch[0]).float()
    return functional.cross_entropy(logits.flatten(0, -2), batch[1].to(logits.device).flatten())


def huggingface_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return torch.as_tensor(model(input_ids=batch[0], labels=batch[0]).loss)


LLAMA = Case("llama", Llama, tokens, cross_entropy)
RECOMPUTED = Case("llama-recomputed", lambda: Llama(recompute=True), tokens, cross_entropy)
CHAIN = Case("chain", Chain, tokens, cross_entropy)
HUGGINGFACE = Case("huggingface", huggingface, tokens, huggingface_loss)
OTHERS = [
    HUGGINGFACE,
    Case("conv", ConvNet, images, cross_entropy),
    Case("tied", lambda: Llama(tied=True), tokens, cross_entropy),
    Case("moe", Moe, tokens, cross_entropy),
    Case("lora", lambda: adapt(Llama()), tokens, cross_entropy),
    Case("lstm", Recurrent, tokens, cross_entropy),
    Case("dropout", Dropping, tokens, cross_entropy),
    Case("bare", Bare, tokens, cross_entropy),
]
ODD = Case(
    "odd",
    lambda: nn.Sequential(nn.Linear(13, 11), nn.Tanh(), nn.Linear(11, 7), nn.Tanh(), nn.Linear(7, 5)),
    vectors,
    cross_entropy,
)


def adamw(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trainable, **{"lr": 1e-2, "weight_decay": 0.1, "fused": True, **settings})


class StepsAtHome(torch.optim.AdamW):
    """Keeps its states on the CPU and steps there, wherever the parameters are: torch rounds otherwise in CUDA's kernel
    than in the CPU's, whose bits STORM gives on both."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        there = [(p, p.data, p.grad) for group in self.param_groups for p in group["params"]]
        for parameter, data, grad in there:
            parameter.grad = None  # it must be where the parameter is
            parameter.data = data.cpu()
            parameter.grad = None if grad is None else grad.cpu()
        super().step()
        for parameter, data, grad in there:
            data.copy_(parameter)
            parameter.grad = None
            parameter.data = data
            parameter.grad = grad

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state.update({name: value.cpu() for name, value in state.items()})


def at_home(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """For the plain side on a GPU: an AdamW with the same groups, which steps on the CPU. Others remain."""
    if type(optimizer) is not torch.optim.AdamW or optimizer.param_groups[0]["params"][0].device.type == "cpu":
        return optimizer
    assert optimizer.param_groups[0]["fused"]
    return StepsAtHome(optimizer.param_groups, fused=True)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Two roundings at most, the same on every device."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.SGD(trainable, lr=0.125, foreach=False)


@functools.cache
def roots_are_exact() -> bool:
    """Whether ``torch.sqrt`` rounds right here. With Intel's MKL it is off by one bit now and then, and so is every
    Adam of torch's that is built from it, in contrast to its fused one."""
    numbers = torch.rand(1 << 16, generator=torch.Generator().manual_seed(0))
    return torch.equal(numbers.sqrt(), numbers.double().sqrt().float())


def closeness(optimizer: torch.optim.Optimizer) -> tuple[float, float] | None:
    """How close we can come to what torch's own arithmetic gives for ``optimizer``; None: to the bit."""
    unfused = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and not optimizer.param_groups[0].get("fused")
    return ROUNDED_EACH_STEP if unfused and not roots_are_exact() else None


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Import this into a module of laws: models this small are ten times slower with two threads on a busy machine.

    Where the CPU has no bf16, torch's first such product fails inside oneDNN and switches it off for the whole process:
    that must not happen between a plain side and a streamed one.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        matrix = torch.ones(64, 32, dtype=torch.bfloat16)
        functional.linear(matrix, matrix)
        torch.mm(matrix.t(), matrix)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# --------------------------------------------------------------------------------------------------------- budgets


def blocks(module: nn.Module) -> Iterator[list[nn.Parameter]]:
    """The parameters that move together, as anybody would cut the model: the items of its lists, then what is left."""
    lists = (nn.ModuleList, nn.Sequential)
    if isinstance(module, lists):
        for child in module:
            yield list(child.parameters())
    elif any(isinstance(inner, lists) for inner in module.modules()):
        yield list(module.parameters(recurse=False))
        for child in module.children():
            yield from blocks(child)
    else:
        yield list(module.parameters())


def parameter_bytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def tight(model: nn.Module) -> int:
    """A budget of three and a half of the largest block, two gradient buckets and the buffers: the rest must move."""
    buffers = round_up(sum(round_up(buffer.nbytes, 64) for buffer in model.buffers()), 4096)
    return room_for_weights(model) + 2 * bucket_bytes(model) + buffers


def room_for_weights(model: nn.Module) -> int:
    return max(round_up(sum(round_up(p.nbytes, 64) for p in block), 4096) for block in blocks(model)) * 7 // 2


def bucket_bytes(model: nn.Module) -> int:
    return max(
        round_up(sum(round_up(4 * p.numel(), 64) for p in block if p.requires_grad), 4096) for block in blocks(model)
    )


def jitter(device: torch.device, seed: int) -> Delay:
    """Mostly nothing, now and then up to two milliseconds, in whatever lane asks."""
    chance = random.Random(seed)

    def delay() -> None:
        if chance.random() < 0.1:
            if device.type == "cpu":
                time.sleep(chance.random() * 2e-3)
            else:
                torch.cuda._sleep(int(chance.random() * 4e6))

    return delay


def stream(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    device: torch.device | str = "cpu",
    vram: object = "tight",
    step: str = "forward",
    seed: int | None = None,
    kept: int = 0,
    ahead: bool = False,
    room: int | None = None,
    **settings: Any,
) -> Session:
    """A session as the laws want it; with a ``seed``, delayed at random and poisoned, and every other unit updated on
    the device; with an even one, that is left to measurements where there are any, which is on a GPU.

    ``kept``: so many units have their optimizer states kept on the device. ``ahead``: all have memory for updates ahead
    of the step, and the CPU updates. ``room``: what activations find there.
    """
    device = torch.device(device)
    # On a GPU a quarter of the budget is planned for weights at first, and the plain twin is in the way of more.
    budget = tight(model) * (4 if device.type == "cuda" else 1) if vram == "tight" else vram
    if kept and isinstance(budget, int):
        budget += 32 * sum(p.numel() + 512 for p in model.parameters())
    trial = Trial(
        delay=None if seed is None else jitter(device, seed),
        poison=seed is not None,
        kept=kept,
        device_share=0.0 if ahead else 0.5 if seed is not None and (device.type == "cpu" or seed % 2) else None,
        ahead=ahead,
        activation_room=room,
        small_bytes=1,
    )
    return Session(model, optimizer, Settings(vram=budget, device=str(device), step=step, **settings), trial=trial)


# ------------------------------------------------------------------------------------------------------ comparison


def frozen(value: Any) -> Any:
    """``value`` as it is now, on the CPU: what a later step does to it is not seen."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: frozen(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [frozen(inner) for inner in value]
    return copy.deepcopy(value)


TWO_KERNELS = (2e-5, 1e-6)  # relative and absolute: how close two kernels of one formula are
ROUNDED_EACH_STEP = (1e-3, 1e-4)  # where each step adds a rounding of its own, which the next ones magnify


def same(streamed: Any, plain: Any, what: str, *, within: tuple[float, float] | None = None) -> None:
    """Bit for bit, or ``within`` these tolerances, whatever is nested in what."""
    if library() is None:
        within = ROUNDED_EACH_STEP  # torch's operations stand in for our kernels
    if isinstance(plain, torch.Tensor):
        assert isinstance(streamed, torch.Tensor), f"{what}: {streamed!r} where plain PyTorch has a tensor"
        ours, theirs = streamed.detach().cpu(), plain.detach().cpu()
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), f"{what}: {ours.dtype} {tuple(ours.shape)}"
        if within is not None:
            rtol, atol = within
            torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}")
        elif not torch.equal(ours.to_dense(), theirs.to_dense()):
            differing = ours.to_dense() != theirs.to_dense()
            far = (ours.to_dense().double() - theirs.to_dense().double()).abs().max()
            raise AssertionError(f"{what}: {int(differing.sum())} of {differing.numel()} differ, by up to {far:.3g}")
    elif isinstance(plain, Mapping):
        keys = list(streamed), list(plain)
        if all(isinstance(key, int) for key in keys[0] + keys[1]):  # numbers of parameters, in the order of updates
            keys = sorted(keys[0]), sorted(keys[1])
        assert keys[0] == keys[1], f"{what}: keys {keys[0]}, plain PyTorch has {keys[1]}"
        for key in plain:
            same(streamed[key], plain[key], f"{what}[{key!r}]", within=within)
    elif isinstance(plain, list | tuple):
        assert len(streamed) == len(plain), f"{what}: {len(streamed)} items, plain PyTorch has {len(plain)}"
        for index, (ours, theirs) in enumerate(zip(streamed, plain, strict=True)):
            same(ours, theirs, f"{what}[{index}]", within=within)
    else:
        assert streamed == plain, f"{what}: {streamed!r}, plain PyTorch has {plain!r}"


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: frozen(parameter.grad) for name, parameter in model.named_parameters()}


def master(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> torch.Tensor:
    """The fp32 master of a bf16 parameter, from its optimizer state: kept whole, or as a 16-bit remainder."""
    from stormtorch.native.split import join

    for name, value in optimizer.state[parameter].items():
        if isinstance(value, torch.Tensor) and value.numel() == parameter.numel():
            if value.dtype == torch.int16:
                return join(parameter.detach().cpu(), value.cpu().view_as(parameter))
            if "master" in str(name) and value.dtype == torch.float32:
                return value.cpu()
    raise AssertionError(f"no master among {list(optimizer.state[parameter])}")


# ------------------------------------------------------------------------------------------------------------ loops


@dataclass
class History:
    """What a run left behind."""

    losses: list[torch.Tensor] = field(default_factory=list)
    norms: list[torch.Tensor] = field(default_factory=list)
    gradients: dict[int, Any] = field(default_factory=dict)
    parameters: Any = None
    states: Any = None
    answer: torch.Tensor | None = None

    def check(self, plain: History, *, within: tuple[float, float] | None = None) -> None:
        for name in ("losses", "gradients", "parameters", "states", "answer", *(["norms"] if plain.norms else [])):
            same(getattr(self, name), getattr(plain, name), name, within=within)


def on(batch: Batch, device: torch.device) -> Batch:
    return tuple(tensor.to(device) for tensor in batch)


def train(
    case: Case,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    steps: int,
    accumulate: int = 1,
    clip: str = "off",
    device: torch.device | str = "cpu",
    session: Session | None = None,
    norms: Sequence[torch.Tensor] = (),
    look: Sequence[int] = (),
) -> History:
    """The loop of design.md, for either side. ``look``: steps whose gradients are read, and so waited for.

    With ``clip="session"`` the session adds up its norm in its own order; the plain side takes the ``norms`` that it
    found, after seeing that they are right within rounding, so that everything behind them can be equal in every bit.
    """
    history, device = History(), torch.device(device)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for step in range(steps):
        for part in range(accumulate):
            number = step * accumulate + part
            torch.manual_seed(number)
            loss = case.loss(model, on(case.batch(number), device))
            (loss / accumulate).backward()
            history.losses.append(loss.detach())
        if clip == "torch":
            history.norms.append(nn.utils.clip_grad_norm_(parameters, MAX_NORM))
        elif clip == "session" and session is not None:
            history.norms.append(session.clip_grad_norm_(MAX_NORM))
        elif clip == "session":
            total = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
            torch.testing.assert_close(norms[step].detach().cpu(), total.cpu(), rtol=1e-5, atol=0.0)
            nn.utils.clip_grads_with_norm_(parameters, MAX_NORM, norms[step].to(total.device))
        if step in look:
            history.gradients[step] = gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    history.parameters = frozen(model.state_dict())
    history.states = frozen(optimizer.state_dict())
    model.eval()
    with torch.no_grad():
        history.answer = case.loss(model, on(case.batch(steps), device)).cpu()
    model.train()
    return history


@dataclass
class Side:
    """One of two: the streamed side has a session, the plain one has none."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    case: Case
    device: torch.device
    session: Session | None = None

    def batch(self, step: int) -> Batch:
        return on(self.case.batch(step), self.device)

    def loss(self, step: int) -> torch.Tensor:
        return self.case.loss(self.model, self.batch(step))

    def step(self, step: int) -> torch.Tensor:
        """An ordinary step; its gradients can be read afterwards."""
        self.optimizer.zero_grad()
        loss = self.loss(step)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def named(self, name: str) -> nn.Parameter:
        return self.model.get_parameter(name)


class Pair:
    """A streamed model and its plain twin; whatever is done to both must have the same outcome."""

    def __init__(
        self,
        case: Case = CHAIN,
        optimizer: Optimizers = adamw,
        *,
        device: torch.device | str = "cpu",
        before: Callable[[Side], object] | None = None,
        **settings: Any,
    ) -> None:
        """``before`` is done to both sides before one of them is streamed; ``settings`` are those of ``stream``."""
        device = torch.device(device)
        model = case.build()
        twin = copy.deepcopy(model).to(device)
        self.plain = Side(twin, at_home(optimizer(twin)), case, device)
        self.streamed = Side(model, optimizer(model), case, device)
        if before is not None:
            before(self.plain)
            before(self.streamed)
        self.session = self.streamed.session = stream(
            model, self.streamed.optimizer, device=device, **{"seed": 0, **settings}
        )

    def both(self, action: Callable[[Side], T], what: str | None = None) -> T:
        """The streamed side's result, which is the plain one's too."""
        results = []
        for side in (self.plain, self.streamed):
            torch.manual_seed(1)
            results.append(action(side))
        what = what or str(getattr(action, "__name__", "result"))
        same(frozen(results[1]), frozen(results[0]), what, within=closeness(self.plain.optimizer))
        return results[1]

    def steps(self, count: int, start: int = 0) -> None:
        for step in range(start, start + count):
            self.both(lambda side, step=step: side.step(step), f"loss of step {step}")  # type: ignore[misc]

    def check(self, *, grads: bool = True) -> None:
        """Everything that can be read is equal."""
        if grads:
            self.both(lambda side: gradients(side.model), "gradients")
        self.both(lambda side: side.model.state_dict(), "state_dict")
        self.both(lambda side: side.optimizer.state_dict(), "optimizer")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.session.close()
