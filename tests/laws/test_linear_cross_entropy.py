"""Law: the loss in tiles is torch's own, in value and gradients, and never holds more logits than it was allowed."""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from stormtorch.core.errors import SettingError, StormError
from stormtorch.core.tags import Tier
from stormtorch.loss import linear_cross_entropy

from .models import (
    HUGGINGFACE,
    VOCABULARY,
    Batch,
    Case,
    Chain,
    Pair,
    Side,
    adamw,
    frozen,
    gradients,
    one_thread,  # noqa: F401  # a fixture
    sgd,
    stream,
    tight,
    tokens,
)

Result = dict[str, torch.Tensor | None]


def inputs(
    leading: tuple[int, ...],
    classes: int,
    width: int,
    *,
    dtype: torch.dtype = torch.float64,
    bias: bool = True,
    ignored: float = 0.2,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(classes, leading, generator=generator)
    target = target.masked_fill(torch.rand(leading, generator=generator) < ignored, -100)
    made: dict[str, Any] = {
        "hidden": torch.randn(*leading, width, generator=generator, dtype=torch.float64),
        "weight": torch.randn(classes, width, generator=generator, dtype=torch.float64),
        "bias": torch.randn(classes, generator=generator, dtype=torch.float64) if bias else None,
    }
    for name, tensor in made.items():
        if tensor is not None:
            made[name] = tensor.to(device, dtype).requires_grad_()
    return {**made, "target": target.to(device)}


def theirs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
    **rest: Any,
) -> torch.Tensor:
    logits = functional.linear(hidden, weight, bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    loss = functional.cross_entropy(logits.reshape(-1, weight.shape[0]), target.reshape(-1), **rest)
    return loss.reshape(target.shape) if rest.get("reduction") == "none" else loss


def result(loss: Callable[..., torch.Tensor], given: dict[str, Any], *, scale: float = 1.0, **rest: Any) -> Result:
    """The loss and all gradients, in fp64; the gradient of the loss differs from row to row where it may."""
    given = {k: v.detach().requires_grad_(v.requires_grad) if v is not None else None for k, v in given.items()}
    value = loss(**given, **rest)
    factor = scale * torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype, device=value.device)
    value.backward(factor.reshape(value.shape))
    found = {k: v.grad for k, v in given.items() if v is not None and v.is_floating_point()}
    for name, gradient in found.items():
        if gradient is not None:
            assert (gradient.dtype, gradient.shape) == (given[name].dtype, given[name].shape)
    return {"loss": value.detach().double(), **{k: g if g is None else g.double() for k, g in found.items()}}


def close(ours: Result, expected: Result, rtol: float = 1e-9, atol: float = 1e-11) -> None:
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        what = functools.partial("{}: {}".format, name)
        torch.testing.assert_close(ours[name], tensor, rtol=rtol, atol=atol, equal_nan=True, msg=what)


# ------------------------------------------------------------------------------------------------------ same numbers


@settings(max_examples=80)
@given(
    leading=st.lists(st.integers(0, 5), max_size=3).map(tuple),
    classes=st.integers(1, 90),
    width=st.integers(1, 6),
    bias=st.booleans(),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    ignored=st.sampled_from([0.0, 0.3, 1.0]),
    softcap=st.sampled_from([None, 0.5, 30.0]),
    chunk_bytes=st.integers(100, 4000),
    seed=st.integers(0, 1000),
)
def test_any_shape_and_setting(
    leading: tuple[int, ...],
    classes: int,
    width: int,
    bias: bool,
    reduction: str,
    smoothing: float,
    ignored: float,
    softcap: float | None,
    chunk_bytes: int,
    seed: int,
) -> None:
    made = inputs(leading, classes, width, bias=bias, ignored=ignored, seed=seed)
    rest: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing, "softcap": softcap}
    close(result(linear_cross_entropy, made, chunk_bytes=chunk_bytes, **rest), result(theirs, made, **rest))


def test_nothing_to_learn_from() -> None:
    """No rows, or none that counts: the mean is nan, and the gradients are what torch makes of that."""
    for made in (inputs((0,), 7, 3), inputs((4,), 7, 3, ignored=1.0)):
        for reduction in ("mean", "sum", "none"):
            ours = result(linear_cross_entropy, made, reduction=reduction)
            close(ours, result(theirs, made, reduction=reduction))
            assert reduction != "mean" or torch.as_tensor(ours["loss"]).isnan()
            assert not torch.as_tensor(ours["weight"]).any()


@pytest.mark.parametrize("ignore_index", [-1, 3, 1000])
def test_any_index_may_be_the_ignored_one(ignore_index: int) -> None:
    made = inputs((6, 5), 8, 4, ignored=0.0)
    made["target"][::2] = ignore_index
    close(
        result(linear_cross_entropy, made, ignore_index=ignore_index, chunk_bytes=300),
        result(theirs, made, ignore_index=ignore_index),
    )


@pytest.mark.parametrize("chunk_bytes", [100, 8 * 64, 8 * 64 * 5, "1MiB"])
def test_classes_masked_by_a_bias(chunk_bytes: int | str) -> None:
    """Whole tiles of -inf, as a padded vocabulary has, at either end and in the middle."""
    made = inputs((9,), 640, 3, ignored=0.0)
    with torch.no_grad():
        for masked in (slice(0, 130), slice(250, 400), slice(570, 640)):
            made["bias"][masked] = -torch.inf
    made["target"] = 130 + made["target"] % 100
    close(result(linear_cross_entropy, made, chunk_bytes=chunk_bytes), result(theirs, made))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_fp32(device: torch.device, reduction: str) -> None:
    made = inputs((4, 33), 1000, 48, dtype=torch.float32, device=device)
    for chunk_bytes in (40_000, "1GiB"):
        close(
            result(linear_cross_entropy, made, reduction=reduction, chunk_bytes=chunk_bytes),
            result(theirs, made, reduction=reduction),
            rtol=1e-4,
            atol=1e-5,
        )


def test_large_logits_stay_finite() -> None:
    made = inputs((5,), 200, 4, dtype=torch.float32)
    with torch.no_grad():
        made["hidden"] *= 1e4
    ours = result(linear_cross_entropy, made, chunk_bytes=1000)
    assert all(torch.as_tensor(tensor).isfinite().all() for tensor in ours.values())
    close(ours, result(theirs, made), rtol=1e-4, atol=1e-4)


def in_fp64(made: dict[str, Any]) -> dict[str, Any]:
    return {k: v if k == "target" else v.detach().double().requires_grad_() for k, v in made.items()}


def errors(found: Result, expected: Result) -> dict[str, float]:
    """How far each is from ``expected``, as a part of its size."""
    return {
        name: float((torch.as_tensor(found[name]) - tensor).norm() / tensor.norm())
        for name, tensor in expected.items()
        if tensor is not None
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("chunk_bytes", [40_000, "1GiB"], ids=["many-tiles", "one-tile"])
@pytest.mark.filterwarnings("ignore:mkldnn_matmul")  # said once, by a CPU without bf16
def test_16_bits_no_worse_than_torch(device: torch.device, dtype: torch.dtype, chunk_bytes: int | str) -> None:
    made = inputs((96,), 1000, 48, dtype=dtype, device=device)
    exact = result(theirs, in_fp64(made), reduction="none")
    ours = errors(result(linear_cross_entropy, made, reduction="none", chunk_bytes=chunk_bytes), exact)
    plain = errors(result(theirs, made, reduction="none"), exact)
    for name, error in plain.items():
        assert ours[name] <= 1.02 * error + 1e-6, f"{name}: off by {ours[name]:.2e}, torch by {error:.2e}"


def test_16_bits_give_a_wide_loss(device: torch.device) -> None:
    """A loss scale is beyond fp16, and it takes effect before gradients are rounded: nothing underflows."""
    made = inputs((2000,), 300, 8, dtype=torch.float16, device=device, ignored=0.0)
    with torch.no_grad():
        made["weight"] *= 2.0**-8
    loss = linear_cross_entropy(**made)
    assert loss.dtype == torch.float32
    exact = result(theirs, in_fp64(made))

    def error(scale: float) -> float:
        ours = result(linear_cross_entropy, made, scale=scale)
        return errors({name: torch.as_tensor(tensor) / scale for name, tensor in ours.items()}, exact)["hidden"]

    assert error(2.0**14) < 1e-3
    assert error(1.0) > 5e-3


@pytest.mark.parametrize("inside", [False, True], ids=["backward-outside", "backward-inside"])
@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
def test_autocast(device: torch.device, inside: bool) -> None:
    """As torch: a linear layer in bf16, a loss in fp32, gradients in the parameters' fp32."""
    made = inputs((6, 20), 500, 64, dtype=torch.float32, device=device)
    exact = result(theirs, in_fp64(made), reduction="none")

    def run(loss: Callable[..., torch.Tensor], **rest: Any) -> dict[str, float]:
        def cast(**given: Any) -> torch.Tensor:
            with torch.autocast(device.type, torch.bfloat16):
                value = loss(**given, **rest)
            assert value.dtype == torch.float32
            return value

        with torch.autocast(device.type, torch.bfloat16, enabled=inside):
            return errors(result(cast, made, reduction="none"), exact)

    plain = run(theirs)
    for chunk_bytes in (20_000, "1GiB"):
        for name, error in run(linear_cross_entropy, chunk_bytes=chunk_bytes).items():
            assert error <= 1.02 * plain[name] + 1e-6, f"{name}: off by {error:.2e}, torch by {plain[name]:.2e}"


def test_autocast_mixes_what_it_may() -> None:
    made = inputs((6,), 40, 8, dtype=torch.float32)
    mixed = {**made, "hidden": made["hidden"].detach().bfloat16().requires_grad_()}
    with pytest.raises(SettingError, match=r"differ in dtype: torch.bfloat16, torch.float32, torch.float32\. Cast"):
        linear_cross_entropy(**mixed)
    with torch.autocast("cpu", torch.bfloat16):
        close(result(linear_cross_entropy, mixed), result(theirs, made), rtol=0.05, atol=0.01)
        double = inputs((6,), 40, 8)
        close(result(linear_cross_entropy, double), result(theirs, double))


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.transpose(0, 1),
        lambda x: x[:, 1:-1],
        lambda x: x[..., ::2],
        lambda x: x[:1].expand(4, -1, -1),
        lambda x: x.flip(0).permute(1, 2, 0),
    ],
)
def test_hidden_in_any_layout(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    whole = torch.randn(5, 8, 6, dtype=torch.float64)
    results = []
    for loss in (linear_cross_entropy, theirs):
        leaf = whole.clone().requires_grad_()
        hidden = view(leaf)
        made = inputs(tuple(hidden.shape[:-1]), 30, hidden.shape[-1])
        weight = made["weight"].detach().t().contiguous().t().requires_grad_()
        rest: dict[str, Any] = {"chunk_bytes": 400} if loss is linear_cross_entropy else {}
        loss(hidden, weight, made["target"].t().contiguous().t(), **rest).backward()
        results.append({"hidden": leaf.grad, "weight": weight.grad})
    close(results[0], results[1])


def test_many_tiles_and_one(device: torch.device) -> None:
    made = inputs((40,), 300, 16, device=device)
    whole = result(linear_cross_entropy, made, chunk_bytes="1GiB", label_smoothing=0.1)
    for chunk_bytes in (8 * 10, 8 * 300, 8 * 40, 8 * 64 * 7, "64KiB"):
        close(result(linear_cross_entropy, made, chunk_bytes=chunk_bytes, label_smoothing=0.1), whole)


# ------------------------------------------------------------------------------------------------------------ memory


class Watch(TorchDispatchMode):
    """Sees every tensor that an operation makes: the largest, and the most bytes of them alive at one time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest = self.peak_bytes = self.live_bytes = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in (*args, *(kwargs or {}).values()) if isinstance(t, torch.Tensor)}
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in given:
                self.largest = max(self.largest, tensor.numel())
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known:
                    self._known.add(storage._cdata)
                    self.live_bytes += storage.nbytes()
                    self.peak_bytes = max(self.peak_bytes, self.live_bytes)
                    weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return out

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live_bytes -= size


@pytest.mark.parametrize(("rows", "classes"), [(256, 4096), (2048, 512), (1024, 1024)])
@pytest.mark.parametrize(("smoothing", "softcap"), [(0.0, None), (0.1, None), (0.0, 30.0)])
def test_one_tile_at_a_time(rows: int, classes: int, smoothing: float, softcap: float | None) -> None:
    """Peak by formula: a tile, some numbers for each row, the gradients and what of them is not complete yet."""
    width, chunk_bytes = 2, 256 << 10
    made = inputs((rows,), classes, width, dtype=torch.float32)
    with Watch() as seen:
        loss = linear_cross_entropy(**made, chunk_bytes=chunk_bytes, label_smoothing=smoothing, softcap=softcap)
        assert seen.largest <= chunk_bytes // 4 <= rows * classes // 16
        assert seen.peak_bytes <= chunk_bytes + 64 * rows
        loss.backward()
    assert seen.largest <= chunk_bytes // 4
    most = chunk_bytes + 64 * rows + 4 * width * (rows + 2 * classes) + 8 * classes
    assert seen.peak_bytes <= most < 2 * chunk_bytes
    with Watch() as plain:
        theirs(**made).backward()
    assert plain.largest == rows * classes  # it sees what there is to see
    assert plain.peak_bytes >= 2 * 4 * rows * classes


def test_no_work_for_gradients_that_nobody_wants() -> None:
    classes, rows, width = 200, 150, 50
    for wanted in ("hidden", "weight", "bias"):
        made = inputs((rows,), classes, width, dtype=torch.float32)
        full = result(linear_cross_entropy, made, chunk_bytes=4000)
        for name in ("hidden", "weight", "bias"):
            made[name].requires_grad_(name == wanted)
        with Watch() as seen:
            part = result(linear_cross_entropy, made, chunk_bytes=4000)
        assert {name for name in ("hidden", "weight", "bias") if part[name] is not None} == {wanted}
        assert torch.equal(torch.as_tensor(part[wanted]), torch.as_tensor(full[wanted]))
        most = {"hidden": rows * width, "weight": classes * width, "bias": rows * 10}[wanted]
        assert seen.largest <= most


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Callable[[], Any]) -> None:
    made = inputs((40,), 30, 6)
    expected = linear_cross_entropy(**made)
    with mode():
        loss = linear_cross_entropy(**made)
    assert loss.grad_fn is None
    assert not loss.requires_grad
    assert torch.equal(loss, expected)


# ---------------------------------------------------------------------------------------------------------- autograd


@pytest.mark.parametrize("name", ["hidden", "weight", "bias"])
def test_a_change_between_forward_and_backward_is_noticed(name: str) -> None:
    loss = linear_cross_entropy(**(made := inputs((4,), 9, 3)))
    with torch.no_grad():
        made[name].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_backward_twice() -> None:
    made = inputs((4,), 9, 3)
    loss = linear_cross_entropy(**made, chunk_bytes=100)
    loss.backward(retain_graph=True)
    once = made["weight"].grad.clone()
    loss.backward()
    assert torch.equal(made["weight"].grad, 2 * once)


def test_no_second_derivative() -> None:
    """Said at once: a gradient without a graph would be taken for a constant."""
    made = inputs((4,), 9, 3)
    with pytest.raises(StormError, match=r"Cannot build a graph .*create_graph=True.* Use F\.cross_entropy"):
        torch.autograd.grad(linear_cross_entropy(**made), made["hidden"], create_graph=True)


def test_under_checkpointing() -> None:
    made = inputs((12,), 19, 3)

    def recomputed(**given: Any) -> torch.Tensor:
        def run(hidden: torch.Tensor) -> torch.Tensor:
            return linear_cross_entropy(hidden * 2, given["weight"], given["target"], bias=given["bias"])

        return torch.as_tensor(checkpoint(run, given["hidden"], use_reentrant=False))

    doubled = {**made, "hidden": (2 * made["hidden"]).detach().requires_grad_()}
    ours, expected = result(recomputed, made), result(theirs, doubled)
    close({**ours, "hidden": torch.as_tensor(ours["hidden"]) / 2}, expected)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # it does not see all of them, it says
def test_the_host_waits_for_nothing() -> None:
    made = inputs((64,), 500, 16, dtype=torch.bfloat16, device="cuda")
    for mode in ("default", "error"):  # the first round loads libraries
        torch.cuda.set_sync_debug_mode(mode)
        try:
            linear_cross_entropy(**made, chunk_bytes=20_000, label_smoothing=0.1).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_what_cuda_allocates() -> None:
    """8192 rows over 65536 classes: 2 GiB of fp32 logits in 64 MiB, and the gradients."""
    rows, classes, width, chunk_bytes = 8192, 65536, 256, 64 << 20
    made = inputs((rows,), classes, width, dtype=torch.bfloat16, device="cuda", bias=False)
    result(linear_cross_entropy, inputs((8,), 8, 8, dtype=torch.bfloat16, device="cuda"))  # cuBLAS keeps a workspace
    torch.cuda.synchronize()
    baseline = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    linear_cross_entropy(**made, chunk_bytes=chunk_bytes).backward()
    torch.cuda.synchronize()
    gradients_bytes = 2 * width * (rows + classes) + 4 * width * rows
    slice_bytes = 4 * width * (chunk_bytes // 4 // 4096)
    assert torch.cuda.max_memory_allocated() - baseline <= 1.5 * chunk_bytes + gradients_bytes + slice_bytes + (4 << 20)


# ---------------------------------------------------------------------------------------------------------- refusals

FINE = {
    "hidden": torch.zeros(2, 3, 4),
    "weight": torch.zeros(5, 4),
    "target": torch.zeros(2, 3, dtype=torch.int64),
    "bias": torch.zeros(5),
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "target-shape": ({"target": torch.zeros(3, 2).long()}, "hidden (2, 3, 4) and target (3, 2) do not fit."),
    "target-flat": ({"target": torch.zeros(6).long()}, "hidden (2, 3, 4) and target (6,) do not fit."),
    "target-dtype": ({"target": torch.zeros(2, 3)}, "target is torch.float32. Accepted: torch.int64"),
    "target-large": ({"target": torch.full((2, 3), 5)}, "target holds 5. Accepted: 0 to 4, and ignore_index=-100."),
    "target-negative": ({"target": torch.full((2, 3), -1)}, "target holds -1. Accepted: 0 to 4"),
    "hidden-scalar": ({"hidden": torch.tensor(1.0)}, "hidden () and target (2, 3) do not fit."),
    "hidden-dtype": ({"hidden": torch.zeros(2, 3, 4).long()}, "Cannot compute a loss in torch.int64, torch.float32"),
    "weight-shape": (
        {"weight": torch.zeros(4, 5)},
        "weight (4, 5) does not fit hidden (2, 3, 4). Accepted: (classes, 4)",
    ),
    "weight-flat": ({"weight": torch.zeros(4)}, "weight (4,) does not fit hidden"),
    "bias-shape": ({"bias": torch.zeros(4)}, "bias (4,) does not fit weight. Accepted: (5,)."),
    "bias-dtype": ({"bias": torch.zeros(5).double()}, "differ in dtype: torch.float32, torch.float32, torch.float64."),
    "device": ({"weight": torch.zeros(5, 4, device="meta")}, "on different devices (cpu, meta, cpu, cpu). Move them"),
    "reduction": ({"reduction": "avg"}, "reduction='avg' is not valid. Accepted: 'mean', 'sum' or 'none'."),
    "smoothing": ({"label_smoothing": 1.5}, "label_smoothing=1.5 is not valid. Accepted: a number from 0 to 1."),
    "softcap": ({"softcap": 0.0}, "softcap=0.0 is not valid. Accepted: a positive number, or None."),
    "chunk": ({"chunk_bytes": "8G"}, "chunk_bytes='8G' is not a byte size."),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_meant(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=re.escape(message)) as refusal:
        linear_cross_entropy(**{**FINE, **change})
    assert "\n" not in str(refusal.value)


# ---------------------------------------------------------------------------------------------------- streamed models

TILE = 4 * 64  # bytes: several tiles of these small models' logits


class Losing(Chain):
    """Computes its loss in its forward, with the weight of a module that is not called."""

    def forward(self, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return linear_cross_entropy(x, self.head.weight, target, bias=self.head.bias, chunk_bytes=TILE)


class Tied(Losing):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


def beside(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Outside of any module: blocks one by one, then the head's parameters."""
    assert isinstance(model, Chain)
    x = model.embed(batch[0])
    for block in model.blocks:
        x = block(x)
    return linear_cross_entropy(x, model.head.weight, batch[1], bias=model.head.bias, chunk_bytes=TILE)


def beside_huggingface(model: nn.Module, batch: Batch) -> torch.Tensor:
    hidden = model.get_submodule("model")(input_ids=batch[0]).last_hidden_state
    return linear_cross_entropy(hidden, model.get_parameter("lm_head.weight"), batch[1], chunk_bytes=TILE)


def within(model: nn.Module, batch: Batch) -> torch.Tensor:
    return torch.as_tensor(model(*batch))


CASES = [
    Case("beside", Chain, tokens, beside),
    Case("beside-tied", Tied, tokens, beside),
    Case("beside-huggingface", HUGGINGFACE.make, tokens, beside_huggingface),
    Case("within", Losing, tokens, within),
    Case("within-tied", Tied, tokens, within),
]


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return adamw(model, fused=True)


def near(ours: object, plain: object) -> None:
    torch.testing.assert_close(frozen(ours), frozen(plain), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_streamed_head(device: torch.device, case: Case) -> None:
    with Pair(case, sgd if device.type == "cuda" else fused, device=device) as pair:
        for step in range(3):
            pair.steps(1, start=step)
            pair.both(lambda side: gradients(side.model), "gradients")
        pair.check()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_streamed_head_has_torchs_gradients(device: torch.device, case: Case) -> None:
    """Not only those of its plain twin, which runs the same code."""

    def plain_loss(side: Side) -> torch.Tensor:
        if case.name == "beside-huggingface":
            logits = side.model(input_ids=side.batch(0)[0]).logits
        else:
            logits = Chain.forward(side.model, side.batch(0)[0])  # type: ignore[arg-type]
        return functional.cross_entropy(logits.reshape(-1, VOCABULARY), side.batch(0)[1].flatten())

    with Pair(case, device=device) as pair:
        expected = plain_loss(pair.plain)
        expected.backward()
        loss = pair.streamed.loss(0)
        loss.backward()
        near(loss, expected)
        near(gradients(pair.streamed.model), gradients(pair.plain.model))


@pytest.mark.parametrize("case", [case for case in CASES if case.name != "beside-tied"], ids=lambda case: case.name)
@pytest.mark.daily("beside-huggingface", "within")
def test_updated_in_backward(case: Case) -> None:
    with Pair(case, fused, step="backward") as pair:
        pair.steps(3)
        pair.check(grads=False)


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.make is not HUGGINGFACE.make], ids=lambda case: case.name
)
@pytest.mark.daily("beside-tied", "within")
def test_micro_batches_and_evaluation(device: torch.device, case: Case) -> None:
    def run(side: Side) -> object:
        side.optimizer.zero_grad()
        losses = [side.loss(step) for step in (0, 1)]
        with torch.no_grad():
            losses.append(side.loss(2))
        (losses[0] + losses[1]).backward()
        side.loss(3).backward()
        side.optimizer.step()
        return losses

    with Pair(case, sgd, device=device) as pair:
        for _ in range(2):
            near(run(pair.streamed), run(pair.plain))  # a tied weight's gradients are added up in another order
        near(pair.streamed.model.state_dict(), pair.plain.model.state_dict())


@pytest.mark.parametrize("name", ["beside", "within"])
def test_a_frozen_head(device: torch.device, name: str) -> None:
    case = next(case for case in CASES if case.name == name)

    def freeze(side: Side) -> None:
        side.model.get_submodule("head").requires_grad_(False)

    with Pair(case, sgd, device=device, before=freeze) as pair:
        pair.steps(3)
        pair.check()


def test_graphs_made_within_a_forward_hold_no_weights() -> None:
    case = next(case for case in CASES if case.name == "within")
    model = case.build()
    with stream(model, adamw(model), seed=0) as session:
        losses = [case.loss(model, case.batch(step)) for step in range(8)]
        for loss in losses:
            loss.backward()
        assert session.ledger.peak_bytes(Tier.DEVICE) <= tight(model)
