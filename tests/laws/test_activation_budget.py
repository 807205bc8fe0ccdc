"""``vram`` holds for activations too, from the first pass on: what block checkpointing needs is enough for every mode.

Gradients are on the device here, so that the room shrinks while backward runs; and with accumulation they are there
from the second pass on, when nothing has been planned yet. On a GPU torch counts; on the CPU a device of our own does,
with a link as fast as a test wants it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import stormtorch as storm
from stormtorch.core.sizes import GiB
from stormtorch.core.tags import Tier
from stormtorch.memory.cuda.device_meter import CudaMeter, DeviceMeter
from stormtorch.memory.lanes.thread import CpuEvent
from stormtorch.session import offload
from stormtorch.session.offload import OffloadedActivations
from stormtorch.streams.activations.plans.plan import KEEP
from stormtorch.streams.settings import Trial

from .counting import Counting
from .models import one_thread  # noqa: F401  # a fixture

PASSES = 10  # two measure; plans are made before the third, the fourth and the eighth
NARROW = 1.01  # torch rounds sizes


class Half(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.narrow(torch.sigmoid(torch.tanh(self.wide(x))))
        return out


class Halves(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = Half(width), Half(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.first(x)
        out: torch.Tensor = x + self.second(x)
        return out


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        q = torch.cat((q[..., 1::2], q[..., ::2]), -1) * 0.5 + q  # as rotary embeddings do
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(x.shape))
        return out


class Gated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return out


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.attention = nn.LayerNorm(width), Attention(width)
        self.between, self.gated = nn.LayerNorm(width), Gated(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before(x))
        out: torch.Tensor = x + self.gated(self.between(x))
        return out


class Net(nn.Module):
    """Blocks of one kind; with a vocabulary, between an embedding and a loss that needs more than a block does."""

    def __init__(self, block: Callable[[int], nn.Module], width: int, count: int, vocabulary: int = 0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block(width) for _ in range(count))
        self.embed = nn.Embedding(vocabulary, width) if vocabulary else None
        self.head = nn.Linear(width, vocabulary, bias=False) if vocabulary else None
        self.checkpointed = False

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        x = given if self.embed is None else self.embed(given)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        if self.head is None:
            return x.square().mean()
        return functional.cross_entropy(self.head(x).flatten(0, 1), given.flatten())


def check(
    model: Net,
    given: torch.Tensor,
    meter: DeviceMeter,
    open_activations: Callable[[int], OffloadedActivations],
    *,
    accumulate: int,
    share: float = 1.0,
    checkpointed: bool = False,
) -> None:
    """Peaks of ten passes within ``share`` times what checkpointing needs; the gradients are plain PyTorch's.
    ``checkpointed``: the user's own goes on."""

    def run(loss_of: Callable[[], torch.Tensor]) -> int:
        """A step with its gradients; the peak, which is forgotten before, as users do."""
        model.zero_grad()
        meter.forget_peak()
        for _ in range(accumulate):
            loss_of().backward()
        return meter.peak()

    def expected() -> list[torch.Tensor]:
        run(lambda: model(given))
        found = [parameter.grad for parameter in model.parameters()]
        return [gradient.detach().clone().cpu() for gradient in found if gradient is not None]

    gradients = expected()
    model.checkpointed = True
    run(lambda: model(given))  # cuBLAS takes its workspace
    limit = round(run(lambda: model(given)) * share)
    model.checkpointed = checkpointed
    model.zero_grad()
    activations = open_activations(limit)

    def arranged() -> torch.Tensor:
        with activations:
            loss: torch.Tensor = model(given)
        return loss

    tops = []
    for step in range(PASSES // accumulate):
        tops.append(run(arranged))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            assert parameter.grad is not None
            assert torch.equal(parameter.grad.cpu(), gradient), f"step {step}"
    reason = activations.report().reason
    activations.close()
    shown = ", ".join(f"{top / limit:.3f}" for top in tops)
    assert max(tops) <= limit * NARROW, f"{shown} of {limit / GiB:.4f} GiB; {reason}"


@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("mode", ["auto", "recompute"])
def test_peak_is_within_vram(mode: str, accumulate: int) -> None:
    device, width, rows = torch.device("cuda", 0), 1024, 8192
    torch.manual_seed(0)
    model = Net(Halves, width, 12).to(device)
    check(
        model,
        torch.randn(rows, width, device=device),
        CudaMeter(device),
        lambda limit: storm.offload_activations(model, mode=mode, vram=limit),
        accumulate=accumulate,
    )


@pytest.mark.parametrize(
    ("rate", "share", "accumulate"),
    [(2e6, 1.0, 1), (2e8, 1.0, 2), (2e6, 1.3, 1)],
    ids=["slow", "fast_accumulated", "wide"],
)
@pytest.mark.parametrize(
    ("block", "vocabulary"), [(Halves, 0), (Layer, 64), (Layer, 2048)], ids=["halves", "layers", "vocabulary"]
)
@pytest.mark.parametrize("mode", ["auto", "recompute"])
def test_peak_is_within_vram_of_a_device_that_we_count(
    mode: str,
    block: Callable[[int], nn.Module],
    vocabulary: int,
    rate: float,
    share: float,
    accumulate: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(offload, "link_rates", lambda _totals: (rate, rate))
    torch.manual_seed(0)
    with Counting() as meter:
        width = 32
        model = Net(block, width, 5, vocabulary)
        given = torch.randint(0, vocabulary, (8, 32)) if vocabulary else torch.randn(256, width)
        trial = Trial(meter=meter, small_bytes=2048)
        check(
            model,
            given,
            meter,
            lambda limit: OffloadedActivations(model, mode, limit, "auto", "cpu", trial=trial),
            accumulate=accumulate,
            share=share,
        )


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("mode", ["auto", "recompute"])
@pytest.mark.daily("auto-1", "recompute-2")
def test_peak_is_within_vram_of_a_device_that_is_far_behind(
    mode: str, streams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host has launched all of backward before the first copy to RAM has ended: memory is returned all the same."""
    monkeypatch.setattr(offload, "link_rates", lambda _totals: (2e6, 2e6))
    monkeypatch.setattr(CpuEvent, "done", lambda _event: False)
    torch.manual_seed(0)
    with Counting() as meter:
        model = Net(Halves, 32, 12)
        trial = Trial(meter=meter, small_bytes=2048)

        def opened(limit: int) -> OffloadedActivations:
            activations = OffloadedActivations(model, mode, limit, "auto", "cpu", trial=trial)
            activations.saving._stream._places.update(range(streams - 1))  # streams of the user's that have memory
            return activations

        check(model, torch.randn(256, 32), meter, opened, accumulate=1)


@pytest.mark.parametrize("share", [3.5, 7.0])
@pytest.mark.daily("3.5")
def test_before_there_is_a_plan_auto_takes_what_recompute_takes(share: float) -> None:
    """Room for some blocks is no reason to keep these: the pool grows by the peak of the first steps, and would be
    smaller for good."""
    tops = []
    for mode in ("auto", "recompute"):
        torch.manual_seed(0)
        with Counting() as meter:
            model, given = Net(Layer, 32, 12, 64), torch.randint(0, 64, (8, 32))
            model.checkpointed = True
            model(given).backward()
            limit = round(meter.peak() * share)
            model.checkpointed = False
            model.zero_grad()
            trial = Trial(meter=meter, small_bytes=2048)
            activations = OffloadedActivations(model, mode, limit, GiB, "cpu", trial=trial)
            meter.forget_peak()
            for _ in range(2):
                with activations:
                    loss = model(given)
                loss.backward()
                del loss
                model.zero_grad()
            tops.append(meter.peak())
            activations.close()
    assert tops[0] <= tops[1] * NARROW, f"{tops[0] / tops[1]:.2f} of what recompute takes"


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.wide), 2])
@pytest.mark.parametrize("vocabulary", [64, 2048])
@pytest.mark.daily("2048")
def test_beside_checkpoints_of_the_users_own(vocabulary: int, accumulate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What those save may leave, never cost more."""
    monkeypatch.setattr(offload, "link_rates", lambda _totals: (2e8, 2e8))
    torch.manual_seed(0)
    with Counting() as meter:
        model = Net(Layer, 32, 5, vocabulary)
        trial = Trial(meter=meter, small_bytes=2048)
        check(
            model,
            torch.randint(0, vocabulary, (8, 32)),
            meter,
            lambda limit: OffloadedActivations(model, "auto", limit, "auto", "cpu", trial=trial),
            accumulate=accumulate,
            checkpointed=True,
        )


class Normed(nn.Module):
    """It changes its buffers, so it must not run again."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.norm = Half(width), nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(x + self.inner(x))
        return out


@pytest.mark.parametrize(("share", "kept"), [(0.4, 0), (0.85, 3)])
def test_blocks_that_may_not_be_run_again(share: float, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a link that hides little: kept as far as there is room, the others offloaded, within the budget from the
    first plan on."""
    monkeypatch.setattr(offload, "link_rates", lambda _totals: (2e6, 2e6))
    torch.manual_seed(0)
    with Counting() as meter:
        model, given = Net(Normed, 32, 5), torch.randn(256, 32)
        model(given).backward()
        limit = round(meter.peak() * share)
        model.zero_grad()
        trial = Trial(meter=meter, small_bytes=2048)
        activations = OffloadedActivations(model, "auto", limit, GiB, "cpu", trial=trial)
        meter.forget_peak()
        for _ in range(PASSES):
            with activations:
                loss = model(given)
            loss.backward()
            del loss
            model.zero_grad()
        plan = activations.saving.plan
        activations.close()
        assert meter.peak() <= limit * NARROW
        assert plan is not None
        assert plan.blocks.count(KEEP) == kept


def test_what_checkpoints_keep_stays_where_there_is_room() -> None:
    """Nothing leaves in the passes that measure either: RAM would be taken for good."""
    torch.manual_seed(0)
    with Counting() as meter:
        model = Net(Layer, 32, 5, 64)
        model.checkpointed = True
        given = torch.randint(0, 64, (8, 32))
        model(given).backward()
        limit = 4 * meter.peak()
        trial = Trial(meter=meter, small_bytes=2048)
        activations = OffloadedActivations(model, "auto", limit, GiB, "cpu", trial=trial)
        for _ in range(PASSES):
            with activations:
                loss = model(given)
            loss.backward()
        assert activations.ledger.peak_bytes(Tier.HOST) == 0
        activations.close()


class _Written(nn.Module):
    """A checkpoint's input is written over after it was saved, early or late."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = torch.empty(0)
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            first = x if number == 0 else first
            if number == 2:
                with torch.no_grad():
                    first.add_(1)
        return x.square().mean()


@pytest.mark.parametrize("part", [2, 100])
def test_what_was_written_over_while_it_stayed_is_noticed(part: int) -> None:
    """As plain PyTorch does, whether it has left since or not."""
    torch.manual_seed(0)
    with Counting() as meter:
        model = _Written()
        x = torch.randn(256, 64)
        model(x)
        limit = meter.peak() * 100 // part
        trial = Trial(meter=meter, small_bytes=2048)
        activations = OffloadedActivations(model, "auto", limit, GiB, "cpu", trial=trial)
        with activations:
            loss = model(x)
        with pytest.raises(RuntimeError, match="modified by an inplace"):
            loss.backward()
        activations.close()


class _Loose(nn.Module):
    """Saves more before its blocks than in them."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.ones(32))
        self.blocks = nn.ModuleList(Layer(32) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            x = (x * self.before).sin()
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize(("block", "vocabulary"), [(Halves, 0), (Layer, 2048)], ids=["halves", "vocabulary"])
@pytest.mark.daily("halves")
def test_inputs_that_grow_when_all_is_settled(
    block: Callable[[int], nn.Module], vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After any number of passes: STORM notes again how full the device is then."""
    monkeypatch.setattr(offload, "link_rates", lambda _totals: (2e8, 2e8))

    def given(length: int) -> torch.Tensor:
        return torch.randint(0, vocabulary, (8, length)) if vocabulary else torch.randn(8 * length, 32)

    torch.manual_seed(0)
    with Counting() as meter:
        model, small, large = Net(block, 32, 5, vocabulary), given(20), given(32)
        model.checkpointed = True
        model(large).backward()
        limit, model.checkpointed = meter.peak(), False
        model.zero_grad()
        assert _top(model, [small] * 11 + [large] * PASSES, meter, limit) <= limit * NARROW


@pytest.mark.parametrize(
    ("length", "passes"), [(12, 1), pytest.param(48, PASSES, marks=pytest.mark.wide)], ids=["from_little", "from_much"]
)
def test_what_is_outside_of_blocks_when_inputs_grow(length: int, passes: int) -> None:
    """STORM counts and plans for it again, too; where all of it stayed so far, it leaves in the pass that grows."""
    torch.manual_seed(0)
    with Counting() as meter:
        model = _Loose()
        small, large = torch.randn(4, length, 32), torch.randn(4, 52, 32)
        model(large).backward()
        limit = round(meter.peak() * 0.35)
        assert _top(model, [small] * 11 + [large] * passes, meter, limit) <= limit * NARROW


class _Shrinking(nn.Module):
    """Blocks of one shape, each with fewer tokens than the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Halves(16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            x = x[:, : x.shape[1] * 3 // 4]
        return x.square().mean()


def test_inputs_of_many_sizes_settle() -> None:
    """The largest counts: what a smaller one shows does not take its place."""
    lengths = [60, 64, 33, 47, *(random.Random(0).randint(32, 64) for _ in range(8))]
    for model, inputs in (
        (_Shrinking(), [torch.randn(2, 64, 16)] * 12),
        (Net(Halves, 16, 4), [torch.randn(2, length, 16) for length in lengths]),
    ):
        trial = Trial(small_bytes=0, activation_room=GiB)
        activations = OffloadedActivations(model, "auto", GiB, GiB, "cpu", trial=trial)
        planned = []
        for given in inputs:
            with activations:
                loss = model(given)
            loss.backward()
            planned.append(activations.saving.plan is not None)
        activations.close()
        assert all(planned[4:]), planned


def test_views_that_leave_later_leave_together() -> None:
    """As they do when they leave at once."""

    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64))

        def forward(self, x: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
            x = x * self.weight
            out = x.sin().sum() + x[:, :-1].sinh().sum()
            kept.append(torch.empty(4 * x.numel()))  # the device begins to fill
            return out + x.tanh().sum()

    with Counting() as meter:
        model = Views()
        x, kept = torch.randn(4, 256, 64), list[torch.Tensor]()
        trial = Trial(meter=meter, small_bytes=2048)
        activations = OffloadedActivations(model, "auto", 12 * x.nbytes, GiB, "cpu", trial=trial)
        with activations:
            loss = model(x, kept)
        assert activations.saving._stream._ride.sizes == [x.nbytes] * 3  # given, in the middle, tanh
        loss.backward()
        activations.close()


def _top(model: nn.Module, inputs: list[torch.Tensor], meter: Counting, limit: int) -> int:
    """The highest peak of passes within ``limit``."""
    trial = Trial(meter=meter, small_bytes=2048)
    activations = OffloadedActivations(model, "auto", limit, GiB, "cpu", trial=trial)
    model.zero_grad()
    meter.forget_peak()
    for given in inputs:
        with activations:
            loss = model(given)
        loss.backward()
        del loss
        model.zero_grad()
    activations.close()
    return meter.peak()
