"""fp32 as a bf16 image and a 16-bit remainder, and back. Exact for every finite value and both infinities.

The image is the value rounded to nearest, ties away from zero; csrc/adamw.h says why not to even. A NaN becomes the
quiet NaN 0x7fc0 with remainder 0.
"""

from __future__ import annotations

import torch


def split(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """New tensors ``(image, remainder)``, bfloat16 and int16, for an fp32 tensor."""
    assert value.dtype == torch.float32
    bits = value.view(torch.int32).masked_fill(value.isnan(), 0x7FC00000)
    image = ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    return image, bits.to(torch.int16)  # the low half: the same 16 bits as the difference to the image


def join(image: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The original value, as a new fp32 tensor."""
    assert image.dtype == torch.bfloat16
    assert remainder.dtype == torch.int16
    high = image.view(torch.int16).to(torch.int32) << 16
    return high.add_(remainder).view(torch.float32)
