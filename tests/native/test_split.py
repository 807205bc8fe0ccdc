"""fp32 ↔ (bf16 image, int16 remainder) in torch."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from stormtorch.native.split import join, split


def test_round_trip_of_every_image_with_dense_remainders() -> None:
    low = torch.from_numpy(np.unique(np.r_[0:40, 0x7FE0:0x8020, 0xFFD8:0x10000, 1 << np.arange(16)])).int()
    for start in range(-(1 << 15), 1 << 15, 1 << 12):
        high = torch.arange(start, start + (1 << 12), dtype=torch.int32) << 16
        value = (high[:, None] | low).view(torch.float32)
        image, remainder = split(value)
        back = join(image, remainder)
        nan = value.isnan()
        assert torch.equal(back.view(torch.int32)[~nan], value.view(torch.int32)[~nan])
        assert bool((image.view(torch.int16)[nan] == 0x7FC0).all())
        assert bool(back[nan].isnan().all())


@given(st.floats(width=32, allow_nan=False))
def test_image_is_the_nearest_bf16(number: float) -> None:
    value = torch.tensor([number])
    image, _ = split(value)
    even = value.bfloat16()
    if abs(image.double() - value.double()) == abs(even.double() - value.double()) and not torch.equal(image, even):
        assert abs(image.double()) > abs(even.double()), "a tie goes away from zero"
    else:
        assert torch.equal(image, even)
