"""The recorder: sums of events, and the latest of them."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from torch import nn

import stormtorch as storm
from stormtorch.core.events import Span, What
from stormtorch.core.tags import Tag
from stormtorch.native.worker.jobs import UpdateMeter
from stormtorch.observe.recorder import Recorder


def test_sums_by_kind() -> None:
    recorder = Recorder()
    for _ in range(3):
        recorder(Span(What.COPY, 1.0, 1.5, "load", Tag.DATA, 10))
        recorder(Span(What.COPY, 1.0, 2.0, "store", Tag.DATA, 20))
        recorder(Span(What.WAIT, 2.0, 2.25, "weights"))
        recorder(Span(What.UPDATE, 0.0, 4.0, share=0.25))
    for size in (100, 300, 200):
        recorder(Span(What.POOL, 0.0, 0.0, bytes=size))
    totals = recorder.snapshot()
    assert totals.bytes == {("load", Tag.DATA): 30, ("store", Tag.DATA): 60}
    assert totals.busy_s == {("load", Tag.DATA): 1.5, ("store", Tag.DATA): 3.0}
    assert totals.waits_s == {"weights": 0.75}
    assert totals.seconds[What.UPDATE] == 3.0
    assert totals.pool_bytes == 200


def test_the_latest_events_are_kept_and_no_more() -> None:
    recorder = Recorder()
    for number in range(10_000):
        recorder(Span(What.LOAD, 0.0, 0.0, unit=number))
    units = [span.unit for span in recorder.latest()]
    assert units == list(range(10_000 - len(units), 10_000))
    assert 1000 <= len(units) < 10_000
    assert recorder.snapshot().times[What.LOAD] == 10_000


def test_a_session_tells_what_happened_when() -> None:
    """Every event lies between its beginning and its end, and the report is their sum."""
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(8)))
    size = sum(parameter.nbytes for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    before_s = time.perf_counter()
    with storm.stream(model, optimizer, device="cpu", vram=size) as session:
        recorder, pool = session._parts.ground.recorder, session._parts.ground.pool
        for _ in range(3):
            model(torch.ones(2, 32)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        session.synchronize()
        report, spans, after_s = session.report(), recorder.latest(), time.perf_counter()
        assert report.pool_bytes == pool.capacity_bytes > 0
    assert all(before_s <= span.start_s <= span.end_s <= after_s for span in spans)
    of = {what: [span for span in spans if span.what is what] for what in What}
    assert len(of[What.STEP]) == report.steps == 3
    assert all(a.end_s == b.start_s for a, b in itertools.pairwise(of[What.STEP]))
    assert len(of[What.LOAD]) == report.loads > len(of[What.MISS]) == report.misses > 0
    assert sum(span.seconds for span in of[What.SETUP]) == report.setup_s == session.setup_s
    updated_s = sum(span.seconds * span.share for span in of[What.UPDATE])
    assert updated_s == pytest.approx(report.limits_s["cpu"] * 3)
    assert updated_s > 0
    loaded = [span for span in of[What.COPY] if span.tag is Tag.PARAMETERS]
    assert {span.unit for span in loaded} == {unit.index for unit in session.units}
    assert sum(span.bytes for span in loaded) == sum(span.bytes for span in of[What.LOAD])
    assert session.report().pool_bytes == 0, "it was returned"


def test_an_update_is_counted_once() -> None:
    """However often the meter is asked."""

    class Busy:
        threads = 2
        busy_s = 0.0

        def stats(self) -> Busy:
            return self

    worker, recorder = Busy(), Recorder()
    meter = UpdateMeter(worker, recorder)  # type: ignore[arg-type]
    for busy_s in (1.0, 1.0, 4.0):
        worker.busy_s = busy_s
        meter.emit()
    assert recorder.snapshot().seconds[What.UPDATE] == pytest.approx(2.0)
