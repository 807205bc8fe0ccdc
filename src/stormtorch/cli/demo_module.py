"""``storm demo`` without transformers: trains a plain module with less device memory than its weights need.

It trains on STORM's own source text, first in plain PyTorch, then streamed, and compares the two.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn

_WIDTH, _LAYERS, _HEADS, _CONTEXT, _BATCH = 128, 8, 4, 64, 8
_SYMBOLS = 256  # bytes


def run(options: argparse.Namespace) -> int:
    import copy

    import torch

    from ..core.sizes import format_bytes, parse_bytes
    from ..core.tags import Tier
    from ..memory.books import limits
    from ..native.library import describe
    from ..session.api import stream
    from .demo import Run, compare

    gpu = torch.cuda.is_available()
    device = limits.usable_device(("cuda" if gpu else "cpu") if options.device == "auto" else options.device)
    torch.manual_seed(0)
    plain = _model()
    streamed = copy.deepcopy(plain)
    size = sum(parameter.nbytes for parameter in plain.parameters())
    vram = size // 2 if options.vram == "auto" else parse_bytes(options.vram, setting="--vram")
    print(f"{device}: {describe()}")
    print(f"model    {format_bytes(size)} of weights, device budget {format_bytes(vram)}, {options.steps} steps")

    plain.to(device)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=3e-3, fused=True)
    losses, seconds = _train(plain, optimizer, device, options.steps)
    expected = Run(losses, [parameter.detach().cpu() for parameter in plain.parameters()], seconds)

    optimizer = torch.optim.AdamW(streamed.parameters(), lr=3e-3, fused=True)
    with stream(streamed, optimizer, vram=vram, device=device) as session:
        losses, seconds = _train(streamed, optimizer, device, options.steps)
        session.synchronize()
        report, peak = session.report(), session.ledger.peak_bytes(Tier.DEVICE)
    print(f"\n{report}\n")
    found = Run(losses, [parameter.detach() for parameter in streamed.parameters()], seconds)
    return compare(expected, found, peak, vram)


def _model() -> nn.Module:
    import torch
    from torch import nn

    class Language(nn.Module):
        """Predicts the next byte."""

        def __init__(self) -> None:
            super().__init__()
            self.embed, self.place = nn.Embedding(_SYMBOLS, _WIDTH), nn.Embedding(_CONTEXT, _WIDTH)
            self.blocks = nn.ModuleList(
                nn.TransformerEncoderLayer(
                    _WIDTH, _HEADS, 4 * _WIDTH, dropout=0.0, batch_first=True, norm_first=True, activation="gelu"
                )
                for _ in range(_LAYERS)
            )
            self.norm, self.head = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _SYMBOLS)

        def forward(self, symbols: torch.Tensor) -> torch.Tensor:
            length = symbols.shape[1]
            mask = nn.Transformer.generate_square_subsequent_mask(length, device=symbols.device)
            x = self.embed(symbols) + self.place(torch.arange(length, device=symbols.device))
            for block in self.blocks:
                x = block(x, src_mask=mask, is_causal=True)
            logits: torch.Tensor = self.head(self.norm(x))
            return logits

    return Language()


def _train(
    model: Callable[[torch.Tensor], torch.Tensor], optimizer: torch.optim.Optimizer, device: torch.device, steps: int
) -> tuple[list[float], float]:
    """An ordinary training loop; returns the losses and the seconds."""
    import torch
    from torch.nn import functional

    source = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.parent.rglob("*.py")))
    text = torch.frombuffer(bytearray(source), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(0)
    losses, start_s = [], time.perf_counter()
    for _ in range(steps):
        starts = torch.randint(len(text) - _CONTEXT - 1, (_BATCH,), generator=generator).tolist()
        batch = torch.stack([text[start : start + _CONTEXT + 1] for start in starts]).to(device)
        logits = model(batch[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [float(loss) for loss in losses], time.perf_counter() - start_s
