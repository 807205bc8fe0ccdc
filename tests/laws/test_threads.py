"""Law: two threads that use one streamed model at the same time get an error, never wrong gradients."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import stormtorch as storm

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LIMIT_S = 300


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(6)])
        self.in_forward: Callable[[torch.Tensor], None] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if number == 3 and self.in_forward is not None:
                self.in_forward(x)
        return x.square().mean()


def made(device: str, activations: str = "auto") -> tuple[Model, storm.Session, torch.Tensor, list[torch.Tensor]]:
    """A streamed model, its input, and the gradients of one backward in plain PyTorch."""
    torch.manual_seed(0)
    model, x = Model(), torch.randn(4, 16)
    model.to(device)(x.to(device)).backward()
    expected = [p.grad.cpu() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    model.to("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    session = storm.stream(model, optimizer, vram="1MiB", device=device, activations=activations)
    return model, session, x.to(device), expected


def gradients_are(model: nn.Module, expected: list[torch.Tensor]) -> None:
    found = [p.grad for p in model.parameters()]
    assert len(found) == len(expected)
    for mine, its in zip(found, expected, strict=True):
        assert mine is not None
        torch.testing.assert_close(mine.cpu(), its)


def in_thread(work: Callable[[], Any]) -> Callable[[], BaseException | None]:
    """Start ``work``; the result waits for its end and returns its error."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def end() -> BaseException | None:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
        return errors[0] if errors else None

    return end


@pytest.mark.parametrize("activations", ["auto", "recompute"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_forward_beside_a_backward_is_refused(device: str, activations: str) -> None:
    model, session, x, expected = made(device, activations)
    with session:
        reached, goes_on = threading.Event(), threading.Event()

        def pause(_gradient: torch.Tensor) -> None:
            reached.set()
            assert goes_on.wait(LIMIT_S)

        model.in_forward = lambda hidden: hidden.register_hook(pause)
        loss = model(x)
        end = in_thread(loss.backward)
        assert reached.wait(LIMIT_S)
        with pytest.raises(storm.StormError, match="Another thread runs a backward"):
            model(x)
        goes_on.set()
        assert end() is None
        gradients_are(model, expected)
        model.in_forward = None
        model.zero_grad()
        model(x).backward()  # and it can be used again
        gradients_are(model, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_a_backward_beside_a_forward_is_refused(device: str) -> None:
    model, session, x, expected = made(device)
    with session:
        loss = model(x)
        reached, goes_on = threading.Event(), threading.Event()

        def pause(_hidden: torch.Tensor) -> None:
            reached.set()
            assert goes_on.wait(LIMIT_S)

        model.in_forward = pause
        end = in_thread(lambda: model(x))
        assert reached.wait(LIMIT_S)
        with pytest.raises(storm.StormError, match="another thread is inside of this model"):
            loss.backward()
        goes_on.set()
        assert end() is None
        model.in_forward = None
        model.zero_grad()
        model(x).backward()
        gradients_are(model, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_a_backward_that_failed_does_not_block_the_model(device: str) -> None:
    model, session, x, expected = made(device)
    with session:
        for _ in range(20):

            def fail(_gradient: torch.Tensor) -> None:
                raise ZeroDivisionError

            model.in_forward = lambda hidden, fail=fail: hidden.register_hook(fail)
            loss = model(x)
            with pytest.raises(ZeroDivisionError):
                loss.backward()
            model.in_forward = None
            model.zero_grad()
            model(x).backward()
            gradients_are(model, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_a_forward_may_run_a_backward_of_its_own(device: str) -> None:
    """On a GPU that one runs on a thread of autograd's, while the forward's thread waits for it."""
    model, session, x, expected = made(device)
    seen: list[torch.Tensor] = []
    with session:

        def inside(hidden: torch.Tensor) -> None:
            seen.extend(torch.autograd.grad(hidden.sum(), hidden, retain_graph=True))
            seen.extend(torch.autograd.grad(hidden.square().sum(), [given], retain_graph=True))

        given = x.clone().requires_grad_()
        model.in_forward = inside
        model(given).backward()
        gradients_are(model, expected)
    assert len(seen) == 2


@pytest.mark.parametrize("device", DEVICES)
def test_threads_that_take_turns(device: str) -> None:
    model, session, x, expected = made(device)
    with session:
        for _ in range(4):
            loss = model(x)
            assert in_thread(loss.backward)() is None
            gradients_are(model, expected)
            model.zero_grad()
            assert in_thread(lambda: model(x).backward())() is None
            gradients_are(model, expected)
            model.zero_grad()
