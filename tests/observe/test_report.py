"""The report: data from records, text from the data."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import stormtorch as storm


def test_a_report_says_what_happened() -> None:
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(8)))
    size = sum(parameter.nbytes for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    with storm.stream(model, optimizer, device="cpu", vram=size) as session:
        for _ in range(4):
            model(torch.ones(2, 32)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        session.synchronize()
        report = session.report(samples_per_step=2, tokens_per_step=64)
    assert report.steps == 4
    assert report.step_s is not None
    assert report.step_s > 0
    assert report.samples_per_s == pytest.approx(2 / report.step_s)
    assert report.tokens_per_s == pytest.approx(64 / report.step_s)
    assert report.bytes_out_per_step["gradients"] >= size
    assert size <= report.bytes_in_per_step["parameters"] <= 2.5 * size
    assert report.device_peak_bytes <= size
    assert report.limited_by in report.limits_s
    assert report.percent_of_limit is not None
    assert 0 < report.percent_of_limit <= 100
    text = str(report)
    for word in ("tokens/s", "per step", "compute waited", "peaks", "parameters", "limited by"):
        assert word in text
    assert session.report().steps == 4, "it stays readable after close"


def test_before_the_first_step_there_is_nothing_to_say() -> None:
    with storm.stream(nn.Linear(4, 4), device="cpu") as session:
        report = session.report()
    assert report.step_s is None
    assert report.limited_by is None
    assert "not timed yet" in str(report)
