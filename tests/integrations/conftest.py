"""For tests with trainers: a CPU without bf16 tries oneDNN for each product, and fails with a stack trace each time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def _without_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)


@pytest.fixture(autouse=True)
def _precision_stays() -> Iterator[None]:
    """``torch_compile=True`` among a trainer's arguments switches TF32 on for the whole process, where a GPU has it."""
    backends: Any = torch.backends
    before = backends.fp32_precision
    yield
    if backends.fp32_precision != before:
        backends.fp32_precision = before
