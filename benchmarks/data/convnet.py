"""The small convnet that the GPU table trains: images of CIFAR's shape, plain SGD, fp32."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from .made import CLASSES


def build(width: int, device: torch.device) -> nn.Sequential:
    torch.manual_seed(11)

    def block(channels: int, out: int) -> list[nn.Module]:
        return [nn.Conv2d(channels, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]

    return nn.Sequential(
        nn.Unflatten(1, (3, 32, 32)),
        *block(3, width),
        *block(width, 2 * width),
        nn.MaxPool2d(2),
        *block(2 * width, 4 * width),
        nn.MaxPool2d(2),
        *block(4 * width, 4 * width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, CLASSES),
    ).to(device)


class Trainer:
    """The model and its optimizer. ``step`` trains on one batch; on a GPU it only enqueues."""

    def __init__(self, width: int, device: torch.device) -> None:
        self.model = build(width, device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9, foreach=True)
        self.loss = torch.zeros((), device=device)

    def step(self, images: Tensor, labels: Tensor) -> None:
        images[:, 0] = 0  # the row's number would be the largest thing in the image
        loss = F.cross_entropy(self.model(images), labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.loss = loss.detach()
