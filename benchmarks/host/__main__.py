"""``python -m benchmarks.host``: the host's time in a training step of a streamed model, beside the same step in plain
PyTorch. Needs no GPU.

Python launches every kernel, so what STORM adds for each module, saved tensor and parameter is idle time of a GPU. A
small Llama of transformers on the CPU device shows it: its kernels take microseconds. The ways:

    resident    the device holds everything; nothing moves after the first steps
    half        the device holds half of the weights
    recompute   as resident, and every block is recomputed, beside the model's own gradient checkpointing

Figures are processor time of the thread that trains, which other work on the machine disturbs less than the clock. It
includes backward, which a CPU device runs on that thread, and no copies and no updates of other threads. All ways run
in turns in one process; a figure is the median over rounds of the median of a round's steps.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.about import commit, machine

WAYS = ("resident", "half", "recompute")
_COLUMNS = ("width", "way", "clipping", "plain ms", "streamed ms", "ratio", "added ms: forward, backward, clip, step")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host", description=__doc__)
    parser.add_argument("ways", nargs="*", metavar="WAY", help=f"{', '.join(WAYS)} (default: all)")
    parser.add_argument("--widths", nargs="+", type=int, default=[64, 256], metavar="N", help="(default: 64 256)")
    parser.add_argument("--blocks", type=int, default=8, metavar="N", help="(default: 8)")
    parser.add_argument("--warm", type=int, default=14, metavar="N", help="steps of a round before those measured")
    parser.add_argument("--steps", type=int, default=25, metavar="N", help="measured steps of a round (default: 25)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="(default: 3)")
    parser.add_argument("--clip", action="store_true", help="clip gradients by torch's clip_grad_norm_")
    parser.add_argument("--commit", help="what to write down as the commit where there is no git (default: git's)")
    parser.add_argument("--out", type=Path, metavar="NAME", help="also write NAME.md")
    options = parser.parse_args()
    unknown = [way for way in options.ways if way not in WAYS]
    if unknown:
        parser.error(f"no way {unknown[0]!r}; there are {', '.join(WAYS)}")
    rows = [_row(width, way, options) for width in options.widths for way in options.ways or WAYS]
    lines = [f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    about = f"{machine()}  \ncommit: {options.commit or commit()}  \ncommand: benchmarks.host {' '.join(sys.argv[1:])}"
    text = f"# Host time of a step\n\n{about}\n\n" + "\n".join(lines) + "\n"
    print(text)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.with_suffix(".md").write_text(text)
    return 0


def _row(width: int, way: str, options: argparse.Namespace) -> list[str]:
    plain, streamed = [], []
    for _ in range(options.rounds):
        plain.append(_round(width, way, options, is_streamed=False))
        streamed.append(_round(width, way, options, is_streamed=True))
        print(f"{width} {way}: plain {sum(plain[-1]):.1f} ms, streamed {sum(streamed[-1]):.1f} ms", file=sys.stderr)
    before, after = ([statistics.median(parts) for parts in zip(*rounds, strict=True)] for rounds in (plain, streamed))
    added = ", ".join(f"{b - a:+.1f}" for a, b in list(zip(before, after, strict=True))[:4])
    clipping = "yes" if options.clip else "no"
    ratio = f"{sum(after) / sum(before):.2f}"
    return [str(width), way, clipping, f"{sum(before):.1f}", f"{sum(after):.1f}", ratio, added]


def _round(width: int, way: str, options: argparse.Namespace, *, is_streamed: bool) -> list[float]:
    """Milliseconds of each part of a step."""
    import torch

    import stormtorch as storm

    torch.set_num_threads(1)
    model = _model(width, options.blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(512, (4, 64), generator=torch.Generator().manual_seed(0))
    session = None
    if is_streamed:
        vram = sum(p.nbytes for p in model.parameters()) // 2 if way == "half" else 4 << 30
        activations = "recompute" if way == "recompute" else "auto"
        session = storm.stream(model, optimizer, vram=vram, device="cpu", activations=activations)
    elif way == "recompute":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    steps = [_step(model, optimizer, tokens, clip=options.clip) for _ in range(options.warm + options.steps)]
    if session is not None:
        session.close()
    return [statistics.median(part) * 1e3 for part in zip(*steps[options.warm :], strict=True)]


def _step(model: Any, optimizer: Any, tokens: Any, *, clip: bool) -> list[float]:
    import torch

    times = [time.thread_time()]
    loss = model(input_ids=tokens, labels=tokens).loss
    times.append(time.thread_time())
    loss.backward()
    times.append(time.thread_time())
    if clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    times.append(time.thread_time())
    optimizer.step()
    times.append(time.thread_time())
    optimizer.zero_grad()
    times.append(time.thread_time())
    return [b - a for a, b in itertools.pairwise(times)]


def _model(width: int, blocks: int) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=blocks,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=512,
        max_position_embeddings=512,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    sys.exit(main())
