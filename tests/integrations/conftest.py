"""For tests with trainers: a CPU without bf16 tries oneDNN for each product, and fails with a stack trace each time."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _without_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
