"""A block that is recomputed is loaded as often as one that is not: once for forward and once for backward at most."""

from __future__ import annotations

import itertools

import pytest
from torch import nn

from stormtorch.session.api import Session
from stormtorch.streams.settings import Settings

from ..laws.models import CHAIN, LLAMA, RECOMPUTED, Case, adamw, one_thread, tight  # noqa: F401  # a fixture


def loads(case: Case, activations: str, *, step: str = "forward", passes: int = 1) -> tuple[list[int], int]:
    """The loads of each of the last steps, and how many of all steps' but the first two were not prefetched."""
    model: nn.Module = case.build()
    optimizer = adamw(model)
    counts, missed = list[int](), list[int]()
    settings = Settings(vram=tight(case.build()), device="cpu", step=step, activations=activations)
    with Session(model, optimizer, settings) as session:
        for number in range(6):
            for part in range(passes):
                case.loss(model, case.batch(passes * number + part)).backward()
            optimizer.step()
            optimizer.zero_grad()
            report = session.report()
            counts.append(report.loads)
            missed.append(report.misses)
    return [b - a for a, b in itertools.pairwise(counts[1:])], missed[-1] - missed[1]


@pytest.mark.parametrize("step", ["forward", "backward"])
@pytest.mark.parametrize("case", [LLAMA, CHAIN], ids=lambda case: case.name)
def test_as_often_as_blocks_that_are_kept(case: Case, step: str) -> None:
    kept, _ = loads(case, "keep", step=step)
    recomputed, missed = loads(case, "recompute", step=step)
    assert min(kept) >= 8, "nothing streams"
    assert max(recomputed) <= max(kept)
    assert missed == 0


def test_checkpoints_of_the_users_too() -> None:
    kept, _ = loads(LLAMA, "keep")
    recomputed, missed = loads(RECOMPUTED, "keep")
    assert max(recomputed) <= max(kept)
    assert missed == 0


@pytest.mark.parametrize("activations", ["keep", "offload", "recompute"])
@pytest.mark.parametrize("case", [LLAMA, CHAIN], ids=lambda case: case.name)
def test_every_pass_of_a_step_is_prefetched(case: Case, activations: str) -> None:
    """Room for gradients that are added is that of the unit that they belong to, not of the next one."""
    once, _ = loads(case, activations)
    three_times, missed = loads(case, activations, passes=3)
    assert missed == 0
    assert max(three_times) <= 3 * max(once)
