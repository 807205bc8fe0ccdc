"""The loss, a piece of the tokens at a time, alike for every method.

All logits at once would be the largest thing on the device and hide what is compared here. Torch's own checkpoint
could recompute them piece by piece, but each method's saved-tensor hooks would see its inputs, and RamTorch forbids it.
So the gradients are made in forward, where the logits are: nothing is saved through hooks, nothing is computed twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

CHUNK = 1024  # tokens; their fp32 logits are 128 MiB at a vocabulary of 32768


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, chunk: int, train: bool) -> Tensor:
        loss = torch.zeros((), device=x.device)
        x_grad, weight_grad = (torch.empty_like(x), torch.zeros_like(weight)) if train else (None, None)
        for start in range(0, len(x), chunk):
            piece, target = x[start : start + chunk], targets[start : start + chunk, None]
            logarithms = (piece @ weight.t()).float().log_softmax(-1)
            loss -= logarithms.gather(-1, target).sum()
            if x_grad is not None and weight_grad is not None:
                grad = logarithms.exp_()
                grad.scatter_add_(-1, target, grad.new_full((), -1).expand_as(target))
                grad = grad.div_(len(x)).to(x.dtype)
                torch.mm(grad, weight, out=x_grad[start : start + chunk])
                weight_grad.addmm_(grad.t(), piece)
        ctx.grads = x_grad, weight_grad
        return loss / len(x)

    @staticmethod
    def backward(ctx: Any, *factors: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        x_grad, weight_grad = ctx.grads
        del ctx.grads
        return x_grad.mul_(factors[0]), weight_grad.mul_(factors[0]), None, None, None


class LossHead(nn.Linear):
    """The head of a language model that knows the targets, and answers with the loss instead of logits."""

    def __init__(self, head: nn.Linear, targets: Tensor, *, chunk: int = CHUNK) -> None:
        super().__init__(head.in_features, head.out_features, bias=False, device="meta")
        self.weight = head.weight
        self.targets, self.chunk = targets, chunk

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = self.weight
        x, kind = x.flatten(0, -2), x.device.type
        if torch.is_autocast_enabled(kind):
            x, weight = (tensor.to(torch.get_autocast_dtype(kind)) for tensor in (x, weight))
        with torch.autocast(kind, enabled=False):
            train = torch.is_grad_enabled()
            loss: Tensor = _ChunkedLoss.apply(x, weight, self.targets.flatten(), self.chunk, train)  # type: ignore[no-untyped-call]
        return loss
