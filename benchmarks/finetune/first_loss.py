"""``python -m benchmarks.finetune.first_loss [WAY ...]``: seconds from a model's files to the first loss of a loop.

A Llama with random bf16 weights is written as sharded safetensors, which the system then has in its page cache. Each
way runs in a process of its own, several times, in turns; time counts from after the imports, with a CUDA context.

    plain    ``from_pretrained`` to the device, AdamW, forward
    storm    ``from_pretrained``, AdamW, `storm.stream`, forward
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.about import ROOT, commit, machine

WAYS = ("plain", "storm")
_PARTS = ("read", "optimizer", "streamed", "forward", "in all")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.finetune.first_loss",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("ways", nargs="*", metavar="WAY", help=f"{', '.join(WAYS)} (default: all)")
    parser.add_argument("--size", choices=("tiny", "3b", "7b"), default="3b")
    parser.add_argument("--vram", default="14GiB", help="budget of storm (default: 14GiB)")
    parser.add_argument("--rows", type=int, default=8, metavar="N", help="(default: 8)")
    parser.add_argument("--sequence", type=int, default=1024, metavar="N", help="tokens of a row (default: 1024)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="(default: 3)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--limit", type=float, default=100, metavar="S", help="seconds that one process may take")
    parser.add_argument("--commit", help="what to write down as the commit where there is no git (default: git's)")
    parser.add_argument("--out", type=Path, metavar="NAME", help="also write NAME.md")
    parser.add_argument("--one", nargs=2, metavar=("WAY", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = [way for way in options.ways if way not in WAYS]
    if unknown:
        parser.error(f"no way {unknown[0]!r}; there are {', '.join(WAYS)}")
    if options.one is not None:
        print(json.dumps(_measured(options.one[0], options.one[1], options)))
        return 0
    from benchmarks.finetune.weights import write_model

    ways = list(dict.fromkeys(options.ways or WAYS))
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory(prefix="first-loss-") as folder:
        written = write_model(Path(folder) / "model", options.size)
        for _ in range(options.rounds):
            for way in ways:
                print(f"{way} ...", end=" ", file=sys.stderr, flush=True)
                found[way].append(_run(way, written.path, options))
                print(f"{found[way][-1]['in all']:.2f} s", file=sys.stderr, flush=True)
    text = _text(found, written.parameters, options)
    print(text)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.with_suffix(".md").write_text(text)
    return 0


def _run(way: str, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    words = ["--device", options.device, "--vram", options.vram, "--rows", str(options.rows)]
    words += ["--sequence", str(options.sequence), "--one", way, str(folder)]
    command = [sys.executable, "-m", "benchmarks.finetune.first_loss", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=options.limit, check=False)
    if done.returncode:
        sys.exit(f"{way} failed:\n{done.stderr}")
    parts: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return parts


def _measured(way: str, folder: str, options: argparse.Namespace) -> dict[str, float]:
    """The seconds of each part."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM

    import stormtorch as storm

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    device = torch.device(options.device)
    torch.zeros(1, device=device)
    _ = storm.stream, AutoModelForCausalLM  # both packages import late
    marks = [time.perf_counter()]
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    if way == "plain":
        model.to(device)
    marks.append(time.perf_counter())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    marks.append(time.perf_counter())
    if way == "storm":
        storm.stream(model, optimizer, vram=options.vram, device=options.device)
    marks.append(time.perf_counter())
    tokens = torch.randint(512, (options.rows, options.sequence), device=device)
    loss = model.train()(input_ids=tokens, labels=tokens).loss
    loss.item()
    marks.append(time.perf_counter())
    each = [b - a for a, b in itertools.pairwise(marks)]
    return dict(zip(_PARTS, [*each, marks[-1] - marks[0]], strict=True))


def _text(found: dict[str, list[dict[str, float]]], parameters: int, options: argparse.Namespace) -> str:
    about = {
        "machine": machine(),
        "commit": options.commit or commit(),
        "command": " ".join(["benchmarks.finetune.first_loss", *sys.argv[1:]]),
        "model": f"{parameters / 1e9:.2f}e9 parameters, {options.rows}x{options.sequence} tokens",
    }
    lines = [f"| way | {' | '.join(f'{part}, s' for part in _PARTS)} | each |", "|---" * (len(_PARTS) + 2) + "|"]
    for way, runs in found.items():
        medians = [f"{statistics.median(run[part] for run in runs):.2f}" for part in _PARTS]
        each = ", ".join(f"{run['in all']:.2f}" for run in runs)
        lines.append(f"| {way} | {' | '.join(medians)} | {each} |")
    return "\n".join(f"{key}: {value}  " for key, value in about.items()) + "\n\n" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
