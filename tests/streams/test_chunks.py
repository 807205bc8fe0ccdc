"""Chunks of a unit's states: every element in one of them, in every buffer at the place that it has there."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from stormtorch.streams.optimizer.adam.home import Buffers, Run, adjoin, bind
from stormtorch.streams.optimizer.adam.settings import adam_step
from stormtorch.streams.optimizer.adam.state_home import States
from stormtorch.streams.units.chunks import chunks_of, whole_of
from stormtorch.streams.units.unit import Place, Unit

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HYPER = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 0.0, "weight_decay": 0.0}
HYPER |= {"decoupled_weight_decay": True, "maximize": False}

parameters = st.lists(st.tuples(st.integers(0, 700), st.sampled_from(DTYPES)), min_size=1, max_size=8)


def unit_of(sizes: list[tuple[int, torch.dtype]]) -> Unit:
    return Unit(0, "unit", [(str(n), nn.Parameter(torch.zeros(size, dtype=d))) for n, (size, d) in enumerate(sizes)])


def runs_of(places: list[Place], *, wide: bool) -> list[Run]:
    """As long as can be."""
    runs: list[Run] = []
    for place in places:
        if runs and runs[-1].last.dtype == place.dtype and adjoin(runs[-1].last, place, wide):
            runs[-1].last = place
        else:
            runs.append(Run(place, place, adam_step(HYPER, 1)))
    return runs


@given(parameters, st.integers(1, 2000))
def test_they_follow_each_other_and_are_small(sizes: list[tuple[int, torch.dtype]], most: int) -> None:
    unit = unit_of(sizes)
    chunks = chunks_of(unit, most)
    assert sum(len(chunk.states) for chunk in chunks) >= sum(place.count for place in unit.trained)
    for name in ("states", "masters", "grads", "wide"):
        for one, other in itertools.pairwise(chunks):
            assert getattr(one, name).stop <= getattr(other, name).start
        if chunks:
            assert getattr(chunks[-1], name).stop <= getattr(whole_of(unit), name).stop
    gaps = 16 * len(unit.trained)  # tensors begin at multiples of 64 bytes
    assert all(len(chunk.states) <= max(64, most) + gaps for chunk in chunks)


@given(parameters, st.integers(1, 2000), st.booleans(), st.integers(0, 3000))
def test_every_element_is_updated_once_with_what_belongs_to_it(
    sizes: list[tuple[int, torch.dtype]], most: int, wide: bool, done: int
) -> None:
    """Each buffer holds the number of each element: whatever an update is given has to agree."""
    unit = unit_of(sizes)
    image, masters, grads = (
        torch.zeros(size, dtype=torch.uint8)
        for size in (unit.image_bytes, unit.master_bytes, unit.wide_bytes if wide else unit.grad_bytes)
    )
    moments = torch.zeros(unit.state_count)
    for place in unit.trained:
        numbers = torch.arange(place.count) % 251
        place.in_image(image).copy_(numbers)
        at, dtype = (place.wide_at, place.wide_dtype) if wide else (place.grad_at, place.dtype)
        place.view(grads, at, dtype).copy_(numbers)
        moments[place.state_at : place.state_at + place.count] = numbers.float()
        if place.is_split:
            dtype = torch.int16 if place.dtype == torch.bfloat16 else torch.float32
            place.view(masters, place.master_at, dtype).copy_(numbers)
    seen = torch.zeros(unit.state_count, dtype=torch.int32)
    for chunk in chunks_of(unit, most):
        which = chunk.gradients(wide=wide)
        part = moments[chunk.states.start : chunk.states.stop]
        parts = [part.view(torch.uint8), part.clone().view(torch.uint8)]
        states = States(unit, chunk, [*parts, masters[chunk.masters.start : chunk.masters.stop]])
        buffers = Buffers(image, states, grads[which.start : which.stop], which.start)
        for run in runs_of(unit.trained, wide=wide):
            found = bind(run, buffers, wide=wide, factor=None, done=done)
            if found is None:
                continue
            expected = found.exp_avg
            for tensor in (found.weight, found.grad, *([] if found.master is None else [found.master])):
                assert torch.equal(tensor.float(), expected.to(tensor.dtype).float())
            start = chunk.states.start + int(expected.storage_offset() - part.storage_offset())
            seen[start : start + len(expected)] += 1
    for place in unit.trained:
        counts = seen[place.state_at : place.state_at + place.count]
        left = max(0, min(place.count, done - place.state_at))
        assert bool((counts[:left] == 0).all())
        assert bool((counts[left:] == 1).all())
