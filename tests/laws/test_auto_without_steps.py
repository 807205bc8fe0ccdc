"""A loop whose optimizer the session does not know: passes count as steps, and notes of the device end."""

from __future__ import annotations

import torch

from stormtorch.session.api import Session
from stormtorch.streams.settings import Settings, Trial

from .counting import Counting
from .models import one_thread  # noqa: F401  # a fixture
from .test_activation_budget import Layer, Net


def test_plans_are_compared_where_no_step_is_ever_seen() -> None:
    torch.manual_seed(0)
    with Counting() as meter:
        model, given = Net(Layer, 32, 5), torch.randn(8, 48, 32)
        model(given).backward()
        limit = round(meter.peak() * 0.7)
        model.zero_grad()
        settings = Settings(vram=limit, device="cpu")
        with Session(model, None, settings, trial=Trial(meter=meter, small_bytes=1 << 30)) as session:
            for _ in range(24):
                model(given).backward()
                for parameter in model.parameters():
                    parameter.grad = None
            saving = session.saving
            assert saving is not None
            assert saving.planning.comparisons == 1
            assert not saving._is_noting
