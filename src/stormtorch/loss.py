"""The cross entropy of a linear layer's output, without ever holding all of that output.

The logits of 16384 tokens over a vocabulary of 128256 are 7.8 GiB in fp32, and plain PyTorch holds them more than once.
Here one *tile* of them exists at a time. Forward keeps only each row's *logsum*, the logarithm of the sum of its
exponentials; backward computes each tile again, and takes both products with it.

The road not taken: compute gradients in forward, some rows at a time, and only scale them in backward. That saves one
product of four. But each group of rows adds to all of the weight's gradient: an fp32 sum as large as the weight, which
lives from forward to backward. With the logsum known, a tile may be cut both ways: the weight's gradient is finished
slice by slice and rounded once, and only the gradient of ``hidden`` needs a sum beside it. Forward, backward and their
peak on an H200, for those logits of a width of 4096, in bf16: plain 97 ms and 23.5 GiB, this 143 ms and 1.7 GiB, the
other road 129 ms and 3.1 GiB (105 ms and 4.1 GiB with chunks of 1 GiB). The head is a small part of a step, and memory
is what a streamed model lacks. The scale of the gradient is known before anything is rounded, so fp16 with a loss scale
underflows no sooner than in plain PyTorch.

All sums are fp32 for bf16 and fp16 (fp64 for fp64): logits, logsums, gradients until they are complete."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function

from .core.errors import SettingError, StormError
from .core.sizes import MiB, parse_bytes
from .streams.home.parameter import plain


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    chunk_bytes: int | str = 256 * MiB,
) -> torch.Tensor:
    """``F.cross_entropy(F.linear(hidden, weight, bias), target)``, with at most ``chunk_bytes`` of logits at any time.

    ``hidden`` is (..., D), ``target`` has its leading shape, ``weight`` is (V, D). With ``softcap``, logits are
    ``softcap * tanh(logits / softcap)``, as in Gemma 2. The other settings are torch's. The loss is fp32 for bf16 and
    fp16: a loss scale would overflow fp16. On a GPU these dtypes need a 16-bit copy of the tile in addition, half of
    ``chunk_bytes``; the host does not wait.

    Backward computes the logits again, so ``hidden`` and ``weight`` must not change until then. There is no second
    derivative.
    """
    given = (hidden, weight, target, bias)
    if has_torch_function(given):  # a streamed parameter: home/parameter.py puts a device view in its place
        result: torch.Tensor = handle_torch_function(
            linear_cross_entropy,
            given,
            hidden,
            weight,
            target,
            bias=bias,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            softcap=softcap,
            chunk_bytes=chunk_bytes,
        )
        return result
    # home/parameter.py has waited for it, and backward needs no watching.
    weight, bias = plain(weight), None if bias is None else plain(bias)
    if reduction not in ("mean", "sum", "none"):
        raise SettingError(f"reduction={reduction!r} is not valid. Accepted: 'mean', 'sum' or 'none'.")
    if not 0.0 <= label_smoothing <= 1.0:
        raise SettingError(f"label_smoothing={label_smoothing!r} is not valid. Accepted: a number from 0 to 1.")
    if softcap is not None and not 0.0 < softcap < math.inf:
        raise SettingError(f"softcap={softcap!r} is not valid. Accepted: a positive number, or None.")
    _check_shapes(hidden, weight, target, bias)
    room = parse_bytes(chunk_bytes, setting="chunk_bytes") // (1 if softcap is None else 2)  # backward keeps its slope
    tiles = _tiles(hidden, weight, bias, target.numel(), room)
    ignored = (target == ignore_index).flatten()
    _check_range(target.flatten(), ignored, weight.shape[0], ignore_index)
    losses: torch.Tensor = _RowLosses.apply(  # type: ignore[no-untyped-call]
        hidden.reshape(target.numel(), hidden.shape[-1]),
        weight,
        bias,
        target.flatten().masked_fill(ignored, -1),
        label_smoothing,
        softcap,
        tiles,
    )
    if reduction == "none":
        return losses.view(target.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / (~ignored).sum()


@dataclass(frozen=True)
class _Tiles:
    """How the logits are cut, and their dtypes: products of ``work`` are added up in ``wide``."""

    rows: int
    columns: int
    work: torch.dtype
    wide: torch.dtype


def _tiles(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rows: int, chunk_bytes: int
) -> _Tiles:
    dtype = _dtype(hidden, weight, bias)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    # Only CUDA has a product with 16-bit factors and a 32-bit result; elsewhere the factors are widened.
    mixed = hidden.device.type == "cuda" and torch.version.cuda is not None
    # Square where both sides are long: the most work per byte in a product, and the fewest additions to a sum.
    room = max(1, chunk_bytes // wide.itemsize)
    height = max(1, min(rows, math.isqrt(room)))
    width = max(1, min(weight.shape[0], room // height))
    if 64 < width < weight.shape[0]:
        width -= width % 64  # rows aligned for tensor cores
    height = max(1, min(rows, room // width))
    return _Tiles(height, width, dtype if mixed else wide, wide)


def _dtype(*tensors: torch.Tensor | None) -> torch.dtype:
    """The dtype in which a linear layer would compute here: the tensors' own, or autocast's."""
    present = [tensor for tensor in tensors if tensor is not None]
    given, dtypes = ", ".join(str(tensor.dtype) for tensor in present), {tensor.dtype for tensor in present}
    if not dtypes <= {torch.float16, torch.bfloat16, torch.float32, torch.float64}:
        raise SettingError(f"Cannot compute a loss in {given}. Accepted: float16, bfloat16, float32 or float64.")
    kind = present[0].device.type
    if torch.is_autocast_enabled(kind):
        cast = torch.get_autocast_dtype(kind)
        dtypes = {dtype if dtype == torch.float64 else cast for dtype in dtypes}  # autocast leaves fp64 alone
    if len(dtypes) > 1:
        raise SettingError(
            f"hidden, weight and bias differ in dtype: {given}. Cast them to one, or use torch.autocast."
        )
    return dtypes.pop()


def _check_shapes(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None) -> None:
    if target.dtype != torch.int64:
        raise SettingError(f"target is {target.dtype}. Accepted: torch.int64, the index of a class for each row.")
    if hidden.dim() == 0 or hidden.shape[:-1] != target.shape:
        raise SettingError(
            f"hidden {tuple(hidden.shape)} and target {tuple(target.shape)} do not fit. "
            "Accepted: a target of hidden's shape without its last dimension."
        )
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise SettingError(
            f"weight {tuple(weight.shape)} does not fit hidden {tuple(hidden.shape)}. "
            f"Accepted: (classes, {hidden.shape[-1]}), as nn.Linear has it."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise SettingError(f"bias {tuple(bias.shape)} does not fit weight. Accepted: ({weight.shape[0]},).")
    devices = [str(tensor.device) for tensor in (hidden, weight, target, bias) if tensor is not None]
    if len({*devices}) > 1:
        where = ", ".join(devices)
        raise SettingError(f"hidden, weight, target and bias are on different devices ({where}). Move them to one.")


def _check_range(target: torch.Tensor, ignored: torch.Tensor, classes: int, ignore_index: int) -> None:
    wrong = ~ignored & ((target < 0) | (target >= classes))
    if target.device.type != "cpu":
        torch._assert_async(~wrong.any())  # like torch's own loss: a check on the host would wait
    elif wrong.any():
        raise SettingError(
            f"target holds {int(target[wrong][0])}. Accepted: 0 to {classes - 1}, and ignore_index={ignore_index}."
        )


class _RowLosses(torch.autograd.Function):
    """``apply(hidden, weight, bias, target, smoothing, softcap, tiles)`` gives the loss of each row.

    Rows with a negative target have no loss and no gradient. Autocast is kept out: ``tiles`` has the dtypes.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        smoothing: float,
        softcap: float | None,
        tiles: _Tiles,
    ) -> torch.Tensor:
        rows, classes = hidden.shape[0], weight.shape[0]
        logsum = hidden.new_full((rows,), -math.inf, dtype=tiles.wide)
        aimed, total = torch.zeros_like(logsum), torch.zeros_like(logsum)  # the target's logit, the sum of all
        with torch.autocast(hidden.device.type, enabled=False):
            factors = hidden.to(tiles.work)
            for columns in _ranges(classes, tiles.columns):
                part, shift = weight[columns].to(tiles.work), None if bias is None else bias[columns]
                for here in _ranges(rows, tiles.rows):
                    tile = _capped_(_logits(factors[here], part, shift, tiles.wide), softcap)
                    place, inside = _places(target[here], columns)
                    aimed[here] += tile.gather(1, place).masked_fill_(~inside, 0.0).squeeze(1)
                    if smoothing:
                        total[here] += tile.sum(1)
                    logsum[here] = torch.logaddexp(logsum[here], _logsumexp_(tile))
                    del tile  # before the next one is made
        losses = logsum - (1 - smoothing) * aimed
        if smoothing:
            losses -= smoothing / classes * total
        ctx.save_for_backward(hidden, weight, bias, target, logsum)
        ctx.smoothing, ctx.softcap, ctx.tiles = smoothing, softcap, tiles
        return losses.masked_fill_(target < 0, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # once_differentiable would be silent if ``grad`` itself has no graph, and the result would count as a constant.
        if torch.is_grad_enabled():
            raise StormError(
                "Cannot build a graph of linear_cross_entropy's backward (create_graph=True). "
                "Use F.cross_entropy(F.linear(hidden, weight, bias), target) where you need a second derivative."
            )
        hidden, weight, bias, target, logsum = ctx.saved_tensors
        tiles: _Tiles = ctx.tiles
        scale = grad.to(tiles.wide).masked_fill(target < 0, 0.0)  # not by a product: it is inf where all are ignored
        to_hidden, to_weight, to_bias = ctx.needs_input_grad[:3]
        hidden_sum = torch.zeros_like(hidden, dtype=tiles.wide) if to_hidden else None
        weight_grad = torch.empty_like(weight) if to_weight else None
        bias_grad = torch.empty_like(bias) if to_bias else None
        weight_sum = torch.empty_like(weight[: tiles.columns], dtype=tiles.wide) if to_weight else None
        with torch.autocast(hidden.device.type, enabled=False):
            factors = hidden.to(tiles.work)
            for columns in _ranges(weight.shape[0], tiles.columns):
                part, shift = weight[columns].to(tiles.work), None if bias is None else bias[columns]
                slice_sum = None if weight_sum is None else weight_sum[: part.shape[0]].zero_()
                bias_sum = part.new_zeros(part.shape[0], dtype=tiles.wide)
                for here in _ranges(hidden.shape[0], tiles.rows):
                    tile = _capped_(_logits(factors[here], part, shift, tiles.wide), ctx.softcap)
                    cap_slope = None if ctx.softcap is None else (tile / ctx.softcap).square_().neg_().add_(1)
                    _slope_(tile, logsum[here], target[here], columns, ctx.smoothing, weight.shape[0])
                    if cap_slope is not None:
                        tile.mul_(cap_slope)
                    del cap_slope
                    if to_bias:
                        bias_sum.addmv_(tile.t(), scale[here])
                    tile = _scaled_(tile, scale[here, None], tiles.work)
                    if hidden_sum is not None:
                        _add_product_(hidden_sum[here], tile, part)
                    if slice_sum is not None:
                        _add_product_(slice_sum, tile.t(), factors[here])
                    del tile
                if weight_grad is not None and slice_sum is not None:
                    weight_grad[columns] = slice_sum
                if bias_grad is not None:
                    bias_grad[columns] = bias_sum
        hidden_grad = None if hidden_sum is None else hidden_sum.to(hidden.dtype)
        return hidden_grad, weight_grad, bias_grad, None, None, None, None


def _ranges(total: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, total)) for start in range(0, total, step))


def _logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wide: torch.dtype) -> torch.Tensor:
    mixed = hidden.dtype != wide
    tile = torch.mm(hidden, weight.t(), wide) if mixed else torch.mm(hidden, weight.t())
    return tile if bias is None else tile.add_(bias)


def _capped_(tile: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return tile if softcap is None else tile.div_(softcap).tanh_().mul_(softcap)


def _places(target: torch.Tensor, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """(each target's column in the tile, whether it lies there), one column each; those outside are set to the edge."""
    place = target.unsqueeze(1) - columns.start
    size = columns.stop - columns.start
    return place.clamp(0, size - 1), (place >= 0) & (place < size)


def _logsumexp_(tile: torch.Tensor) -> torch.Tensor:
    """``tile.logsumexp(1)``, in the tile's own memory."""
    top = tile.amax(1, keepdim=True)
    top.masked_fill_(top.isinf(), 0.0)  # a bias of -inf, which masks classes, may fill a tile
    return tile.sub_(top).exp_().sum(1).log_().add_(top.squeeze(1))


def _slope_(
    tile: torch.Tensor, logsum: torch.Tensor, target: torch.Tensor, columns: slice, smoothing: float, classes: int
) -> None:
    """Turn logits into the derivative of their row's loss: the softmax less the target distribution."""
    tile.sub_(logsum.unsqueeze(1)).exp_()
    if smoothing:
        tile.sub_(smoothing / classes)
    place, inside = _places(target, columns)
    tile.scatter_add_(1, place, inside.to(tile.dtype).mul_(smoothing - 1))


def _scaled_(tile: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``tile`` times ``scale``, in its own memory, or rounded only once to another ``dtype``."""
    return torch.mul(tile, scale, out=tile if tile.dtype == dtype else torch.empty_like(tile, dtype=dtype))


def _add_product_(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        torch.addmm(total, left, right, total.dtype, out=total)
