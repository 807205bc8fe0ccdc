"""What all tests share: a device fixture for CPU and GPU, a generous ledger, notices that are heard anew."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import torch

from stormtorch.core.budget import Budget
from stormtorch.core.notices import forget_notices
from stormtorch.core.sizes import GiB
from stormtorch.core.tags import Tier
from stormtorch.memory.ledger import Ledger

# A background job or nohup has SIGINT ignored, and Python then installs no handler; the tests of Ctrl-C need theirs.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch sees none here")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    """Room for every test; what a test leaves charged is an error."""
    book = Ledger(*(Budget(tier=tier, limit_bytes=8 * GiB, given=f"{tier.setting}='8GiB'") for tier in Tier))
    yield book
    book.check()
    left = {tier.value: book.used_bytes(tier) for tier in Tier if book.used_bytes(tier)}
    assert not left, f"still charged after the test: {left}"


@pytest.fixture(autouse=True)
def _hear_notices_anew() -> None:
    forget_notices()
