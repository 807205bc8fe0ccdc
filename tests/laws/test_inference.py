"""Without an optimizer the device holds as many weights as ``vram`` allows, and a call loads the others, once each.

On a device that counts (counting.py), unless a case says otherwise. The plain model has the right numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from stormtorch.core.tags import Tag
from stormtorch.session.api import Session
from stormtorch.streams.settings import Settings, Trial
from stormtorch.streams.units import placement

from .counting import Counting
from .models import one_thread  # noqa: F401  # a fixture

WIDTH, BLOCKS, VOCABULARY = 32, 16, 96
BLOCK_BYTES = 4 * (4 * WIDTH * WIDTH)  # four square matrices


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.past: list[list[torch.Tensor]] = [[], []]

    def forward(self, x: torch.Tensor, *, caching: bool) -> torch.Tensor:
        keys, values = self.k(x), self.v(x)
        if caching:
            keys, values = (torch.cat([*old, new], 1) for old, new in zip(self.past, (keys, values), strict=True))
            self.past = [[keys], [values]]
        mixed = (self.q(x) @ keys.transpose(1, 2) / 8).softmax(-1) @ values
        return x + torch.as_tensor(self.o(mixed))


class Net(nn.Module):
    """Units of three sizes, and a cache of what earlier calls were given."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.inside: Callable[[torch.Tensor], torch.Tensor] = lambda x: x

    def forward(self, tokens: torch.Tensor, *, caching: bool = False) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, caching=caching)
        return torch.as_tensor(self.head(self.inside(x)))


@pytest.fixture(autouse=True)
def _small_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left alone of a budget has a least size that is more than all of ours."""
    monkeypatch.setattr(placement, "headroom", lambda limit: limit // 50)


def made() -> Net:
    torch.manual_seed(0)
    return Net()


def tokens(number: int, length: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(number))


Action = Callable[[Net], torch.Tensor | list[torch.Tensor]]


def call(number: int, length: int, *, caching: bool = False) -> Action:
    @torch.no_grad()
    def run(model: Net) -> torch.Tensor:
        return torch.as_tensor(model(tokens(number, length), caching=caching))

    return run


def gradients(number: int, length: int) -> Action:
    def run(model: Net) -> list[torch.Tensor]:
        model.zero_grad()
        loss = functional.cross_entropy(model(tokens(number, length)).flatten(0, 1), tokens(number, length).flatten())
        loss.backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    return run


def forget(model: Any) -> torch.Tensor:
    for block in model.blocks:
        block.past = [[], []]
    return torch.zeros(())


class Highest(Counting):
    """Has a peak of the test's own, which the session does not forget."""

    _highest = 0

    def forget_peak(self) -> None:
        self._highest = max(self._highest, self._peak)
        super().forget_peak()

    def take_highest(self) -> int:
        """The peak since the last time."""
        self.forget_peak()
        highest, self._highest = self._highest, 0
        return highest


class Watched:
    """Runs actions on a streamed model; each gives what the plain model gives, within ``vram``."""

    def __init__(
        self,
        vram: int,
        actions: list[Action],
        *,
        counts: bool = True,
        make: Callable[[], Any] = made,
        **settings: Any,
    ) -> None:
        plain, self.model = make(), make()
        expected = [action(plain) for action in actions]
        self.peaks: list[int] = []
        self.loaded: list[int] = []
        self.kept: list[int] = []
        self.ahead: list[bool] = []
        before = 0
        with Highest() as meter:
            given = Settings(vram=vram, device="cpu", **settings)
            trial = Trial(meter=meter if counts else None, poison=True, small_bytes=512)
            with Session(self.model, None, given, trial=trial) as session:
                parts = session._parts
                self.images = [unit.image_bytes for unit in session.units]
                for number, (action, right) in enumerate(zip(actions, expected, strict=True)):
                    meter.take_highest()
                    result = action(self.model)
                    self.peaks.append(meter.take_highest())
                    pairs = zip(
                        *((given if isinstance(given, list) else [given]) for given in (result, right)), strict=True
                    )
                    assert all(torch.equal(*pair) for pair in pairs), f"action {number}"
                    del result, pairs
                    residency = parts.parameters.residency
                    passing = [r for r in residency.residences if r.unit.index not in residency.kept]
                    self.ahead.append(not passing or passing[0].stay is not None)
                    session.synchronize()
                    totals = parts.ground.recorder.snapshot()
                    now = totals.bytes.get(("load", Tag.PARAMETERS), 0)
                    self.loaded.append(now - before)
                    before = now
                    self.kept.append(sum(self.images[index] for index in parts.parameters.residency.kept))
                self.report = str(session.report())
                parts.ground.pool.check()
        self.vram, self.total = vram, sum(self.images)
        self.shown = ", ".join(f"{peak / vram:.3f}" for peak in self.peaks)


def test_calls_load_what_does_not_stay_and_the_budget_is_used() -> None:
    seen = Watched(12 * BLOCK_BYTES, [call(number, 8) for number in range(6)])
    assert max(seen.peaks) <= seen.vram, seen.shown
    assert 0.5 * seen.vram < seen.kept[-1] < seen.total
    assert seen.loaded[3:] == [seen.total - seen.kept[-1]] * 3
    assert min(seen.peaks[3:]) >= 0.9 * seen.vram, seen.shown
    assert all(seen.ahead), "the next call's first loads are not on their way when a call ends"
    assert "units are resident" in seen.report


def test_where_nothing_counts_the_pool_has_the_budget_from_the_start() -> None:
    seen = Watched(12 * BLOCK_BYTES, [call(number, 8) for number in range(6)], counts=False)
    assert seen.kept[-1] > 0.7 * seen.vram
    assert seen.loaded[3:] == [seen.total - seen.kept[-1]] * 3


def test_all_stay_where_all_have_room() -> None:
    seen = Watched(32 * BLOCK_BYTES, [call(number, 8) for number in range(5)])
    assert seen.kept[-1] == seen.total
    assert seen.loaded[3:] == [0, 0]
    assert max(seen.peaks) <= seen.vram, seen.shown


def test_a_cache_that_grows_takes_room_back_before_the_budget_is_exceeded() -> None:
    """A long prompt, then token by token, until the cache has taken half of the budget; then a new sequence."""
    actions = [call(0, 6, caching=True), *(call(number, 1, caching=True) for number in range(1, 20)), forget]
    seen = Watched(14 * BLOCK_BYTES, [*actions, *actions[:8]])
    assert max(seen.peaks) <= seen.vram, seen.shown
    assert seen.kept[6] > 1.5 * seen.kept[19] > 0
    assert seen.kept[-1] > seen.kept[19], "what a cache had taken stays unused"
    assert min(seen.peaks[6:20]) >= 0.9 * seen.vram, seen.shown


def test_larger_inputs_than_any_before_find_room() -> None:
    lengths = [4] * 4 + [36] + [4] * 6 + [36, 40, 4, 56, 4, 4]
    seen = Watched(13 * BLOCK_BYTES, [call(number, length) for number, length in enumerate(lengths)])
    assert max(seen.peaks) <= seen.vram, seen.shown
    assert seen.kept[3] > 0.5 * seen.vram
    assert seen.kept[10] == seen.kept[3], "room for inputs that do not come stays unused"


def test_inputs_of_changing_sizes_find_weights_there() -> None:
    """As in an evaluation: no two calls are alike, and the largest came early."""
    seen = Watched(13 * BLOCK_BYTES, [call(number, 40 - 3 * (number * 5 % 12)) for number in range(12)])
    assert max(seen.peaks) <= seen.vram, seen.shown
    assert min(seen.kept[3:]) > 0.5 * seen.vram


@pytest.mark.parametrize("activations", ["auto", pytest.param("keep", marks=pytest.mark.wide)])
def test_gradients_without_an_optimizer_between_calls_without(activations: str) -> None:
    actions = [
        *(call(number, 8) for number in range(4)),
        *(gradients(number, 8) for number in range(3)),
        *(call(number, 8) for number in range(4)),
        gradients(9, 8),
    ]
    seen = Watched(15 * BLOCK_BYTES, actions, activations=activations)
    assert max(seen.peaks) <= seen.vram * 1.01, seen.shown
    assert seen.kept[3] > 0
    assert seen.kept[4:7] == [0, 0, 0]
    assert seen.kept[10] > 0


def test_gradients_inside_of_a_call_without() -> None:
    """A forward that follows the gradient of its own head, as guided sampling does."""

    @torch.no_grad()
    def guided(model: Any) -> torch.Tensor:
        def inside(x: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                y = model.blocks[3](x, caching=False)
                return x.detach() - torch.autograd.grad(y.square().sum(), x)[0]

        model.inside = inside
        try:
            return torch.as_tensor(model(tokens(5, 8)))
        finally:
            model.inside = lambda x: x

    actions = [*(call(number, 8) for number in range(4)), guided, guided, *(call(number, 8) for number in range(4))]
    seen = Watched(15 * BLOCK_BYTES, actions)
    assert seen.kept[-1] > 0


def test_weights_that_user_code_writes_or_holds() -> None:
    @torch.no_grad()
    def write(model: Any) -> torch.Tensor:
        for block in model.blocks[::3]:
            block.q.weight.mul_(1.5)
        return torch.zeros(())

    held: dict[nn.Module, torch.Tensor] = {}
    hooks: list[Any] = []

    def hold(model: Any) -> torch.Tensor:
        """Hooks of the modules see what stands in for their weights on the device."""
        held.clear()
        for block in model.blocks[1::6]:
            hook = lambda module, _: held.update({module: module.weight.view(-1)})  # noqa: E731
            hooks.append(block.q.register_forward_pre_hook(hook))
        return torch.zeros(())

    def let_go(_: Net) -> torch.Tensor:
        for hook in hooks:
            hook.remove()
        held.clear()
        return torch.zeros(())

    def calls(count: int) -> list[Action]:
        return [call(number, 8) for number in range(count)]

    seen = Watched(14 * BLOCK_BYTES, [*calls(4), write, *calls(4), hold, *calls(8), let_go, *calls(20)])
    assert max(seen.peaks) <= seen.vram, seen.shown
    assert seen.loaded[8] == seen.total - seen.kept[8]
    assert seen.loaded[-1] == seen.total - seen.kept[-1]
    assert seen.kept[-1] == seen.kept[8] > 0


def test_generate_of_transformers_with_its_cache() -> None:
    transformers = pytest.importorskip("transformers")

    def tiny() -> Any:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=14, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config).eval()

    def generate(number: int, prompt: int, new: int) -> Action:
        def run(model: Any) -> torch.Tensor:
            settings = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
            return torch.as_tensor(model.generate(tokens(number, prompt), **settings))

        return run

    actions = [generate(0, 12, 6), generate(1, 20, 2), generate(2, 12, 6), generate(3, 12, 9)]
    seen = Watched(420_000, actions, make=tiny)
    assert max(seen.peaks) <= seen.vram, seen.shown
    assert seen.kept[-1] > 0.6 * seen.vram
    assert min(seen.peaks[0], *seen.peaks[2:]) >= 0.9 * seen.vram, seen.shown
    assert seen.loaded[3] == 9 * (seen.total - seen.kept[-1]), "a token loads what stays"
