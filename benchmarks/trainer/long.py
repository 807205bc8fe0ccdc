"""``python -m benchmarks.trainer.long``: one long sequence through a streamed Llama of transformers, in a loop by hand.

``auto`` has no checkpoints of the user's; ``checkpoint`` is the model's own gradient checkpointing, in the same VRAM.
``auto-little-ram`` has RAM for weights and optimizer states and 4 GiB more, of which gradients take most. Each in a
process of its own. The loss is `storm.linear_cross_entropy`: logits of 65,536 tokens would not fit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.about import ROOT, commit, machine

METHODS = ("auto", "checkpoint", "auto-little-ram")
_COLUMNS = ("method", "step s", "steps s", "VRAM GiB", "RAM for activations GiB", "ram", "GPU", "activations")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trainer.long", description=__doc__)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--model", default="long-2b")
    parser.add_argument("--sequence", type=int, default=65536)
    parser.add_argument("--vram", default="24GiB")
    parser.add_argument("--warm", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--limit", type=float, default=120, help="seconds that one process may take")
    parser.add_argument("--commit", help="what to write down as the commit where there is no git (default: git's)")
    parser.add_argument("--out", type=Path, metavar="NAME", help="also write NAME.md")
    parser.add_argument("--one", choices=METHODS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(_measured(options.one, options)))
        return 0
    rows: list[dict[str, Any]] = []
    for method in options.methods:
        command = [sys.executable, "-m", "benchmarks.trainer.long", "--one", method]
        for name in ("model", "sequence", "vram", "warm", "steps"):
            command += [f"--{name}", str(getattr(options, name))]
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=options.limit, check=False)
            failed = "" if done.returncode == 0 else done.stderr.strip()[-300:]
            rows.append({"method": method, "step s": f"FAILED: {failed}"} if failed else _last_json(done.stdout))
        except subprocess.TimeoutExpired as late:
            said = late.stderr.decode() if isinstance(late.stderr, bytes) else str(late.stderr or "")
            steps = [line for line in said.splitlines() if line.endswith(" s")]
            rows.append({"method": method, "step s": f"FAILED: not over after {options.limit:g} s; steps {steps}"})
        print(f"{method}: {rows[-1]['step s']}", file=sys.stderr, flush=True)
        _write(rows, options, "")  # a run that is cut short leaves what it has
    _write(rows, options, machine())
    print(_text(rows, options, machine()))
    return int(any(str(row["step s"]).startswith("FAILED") for row in rows))


def _text(rows: list[dict[str, Any]], options: argparse.Namespace, where: str) -> str:
    """``where``: the machine, once no case runs any more."""
    lines = [f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|"]
    lines += [f"| {' | '.join(str(row.get(column, '')) for column in _COLUMNS)} |" for row in rows]
    about = f"{where}  \ncommit: {options.commit or commit()}  \ncommand: benchmarks.trainer.long "
    return f"# One long sequence\n\n{about}{' '.join(sys.argv[1:])}\n\n" + "\n".join(lines) + "\n"


def _write(rows: list[dict[str, Any]], options: argparse.Namespace, where: str) -> None:
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.with_suffix(".md").write_text(_text(rows, options, where))


def _last_json(said: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


def _measured(method: str, options: argparse.Namespace) -> dict[str, Any]:
    import torch
    from benchmarks.models.build import CONFIGS, build, parameters_of

    import stormtorch as storm
    from stormtorch.core.tags import Tag, Tier

    model: Any = build(options.model, dtype=torch.bfloat16)
    model.config.use_cache = False
    if method == "checkpoint":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    count = parameters_of(model)
    ram = f"{12 * count + 4 * 2**30}" if method == "auto-little-ram" else "auto"  # bf16, and 10 bytes of states
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokens = torch.randint(CONFIGS[options.model][1]["vocab_size"], (1, options.sequence), device=device)
    session = storm.stream(model, optimizer, vram=options.vram, ram=ram)
    times = []
    for _ in range(options.warm + options.steps):
        began_s = time.perf_counter()
        hidden = model.model(input_ids=tokens).last_hidden_state
        loss = storm.linear_cross_entropy(hidden[:, :-1], model.lm_head.weight, tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        times.append(time.perf_counter() - began_s)
        print(f"{times[-1]:.2f} s", file=sys.stderr, flush=True)
    report = session.report()
    host = [b.peak_bytes for b in report.balances if b.tier is Tier.HOST and b.tag is Tag.ACTIVATIONS]
    return {
        "method": method,
        "step s": f"{statistics.median(times[options.warm :]):.3f}",
        "steps s": " ".join(f"{seconds:.2f}" for seconds in times),
        "VRAM GiB": f"{torch.cuda.max_memory_allocated() / 2**30:.1f}" if device.type == "cuda" else "",
        "RAM for activations GiB": f"{sum(host) / 2**30:.2f}",
        "ram": f"{int(ram) / 2**30:.1f} GiB" if ram != "auto" else ram,
        "GPU": str(report.gpu or ""),
        "activations": report.plan.activations.reason,
    }


if __name__ == "__main__":
    sys.exit(main())
