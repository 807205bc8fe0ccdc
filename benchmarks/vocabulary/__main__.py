"""``python -m benchmarks.vocabulary [CASE ...]``: whether models with large vocabularies train within small budgets.

The shapes of Llama-3-8B (two tables of 128,256 x 4,096) and Gemma-2-9B (one of 256,000 x 3,584, tied), with fewer
layers: the tables count here. A case is a model and a way, such as ``llama:full``; each has a process of its own.

    full     ``storm train`` of all weights with its chunked loss, two micro-batches a step, clipped
    lora     the same with adapters
    trainer  `StormTrainer`, whose loss makes all logits, two micro-batches a step, clipped

"least vram" is the smallest budget through which the weights pass; what activations need comes on top.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.about import ROOT, commit, machine
from benchmarks.process import end, start, why_it_ended

WAYS = {"full": "6GiB", "lora": "4GiB", "trainer": "12GiB"}  # and their budgets
MODELS = ("llama", "gemma")
_COLUMNS = ("case", "parameters", "vram", "least vram", "peak VRAM", "s a step", "losses")
_DATA = ROOT / "src" / "stormtorch" / "demo_data"


def main() -> int:
    cases = [f"{model}:{way}" for model in MODELS for way in WAYS]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.vocabulary",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"{', '.join(cases)} (default: all)")
    parser.add_argument("--layers", type=int, default=6, metavar="N", help="(default: 6)")
    parser.add_argument("--batch", type=int, default=4, metavar="N", help="rows of a micro-batch (default: 4)")
    parser.add_argument("--sequence", type=int, default=1024, metavar="N", help="tokens of a row (default: 1024)")
    parser.add_argument("--steps", type=int, default=6, metavar="N", help="(default: 6)")
    parser.add_argument("--vram", metavar="SIZE", help=f"budget of all ways (default: {', '.join(WAYS.values())})")
    parser.add_argument("--limit", type=float, default=120, metavar="S", help="seconds that one case may take")
    parser.add_argument("--tiny", action="store_true", help="narrow models on the CPU: shows that it runs")
    parser.add_argument("--commit", help="what to write down as the commit where there is no git (default: git's)")
    parser.add_argument("--out", type=Path, metavar="NAME", help="also write NAME.md and NAME.log")
    parser.add_argument("--one", nargs=2, metavar=("CASE", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = [case for case in options.cases if case not in cases]
    if unknown:
        parser.error(f"no case {unknown[0]!r}; there are {', '.join(cases)}")
    if options.tiny:
        options.batch, options.sequence, options.steps, options.layers = 2, 32, 3, 3
        options.vram = options.vram or "8MiB"
    if options.one is not None:
        from .one import measure

        file = Path(options.one[1])
        found = measure(options.one[0], options)
        file.with_suffix(".part").write_text(json.dumps(found))
        file.with_suffix(".part").replace(file)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the case running ends too
    return _all(options.cases or cases, options)


def budget(case: str, options: argparse.Namespace) -> str:
    return str(options.vram or WAYS[case.partition(":")[2]])


def _all(cases: list[str], options: argparse.Namespace) -> int:
    rows: list[dict[str, str]] = []
    with tempfile.TemporaryDirectory(prefix="vocabulary-") as folder:
        log = options.out.with_suffix(".log") if options.out else Path(folder) / "log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("")
        for case in dict.fromkeys(cases):
            print(f"{case} ...", end=" ", file=sys.stderr, flush=True)
            began_s = time.monotonic()
            found = _run(case, Path(folder) / f"{case.replace(':', '-')}.json", log, options)
            print(found.get("failed", f"{time.monotonic() - began_s:.0f} s"), file=sys.stderr, flush=True)
            rows.append(_row(case, found, options))
            _write(rows, options, "")  # a run that is cut short leaves what it has
    _write(rows, options, machine())
    print(_text(rows, options, machine()))
    return int(any("FAILED" in cell for row in rows for cell in row.values()))


def _write(rows: list[dict[str, str]], options: argparse.Namespace, where: str) -> None:
    if options.out is not None:
        options.out.with_suffix(".md").write_text(_text(rows, options, where))


def _text(rows: list[dict[str, str]], options: argparse.Namespace, where: str) -> str:
    """``where``: the machine, once no case runs any more."""
    about = {
        "machine": where,
        "commit": options.commit or commit(),
        "command": " ".join(["benchmarks.vocabulary", *sys.argv[1:]]),
    }
    lines = [f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|"]
    lines += [f"| {' | '.join(row.get(column, '') for column in _COLUMNS)} |" for row in rows]
    return "\n".join(f"{key}: {value}  " for key, value in about.items()) + "\n\n" + "\n".join(lines) + "\n"


def _run(case: str, file: Path, log: Path, options: argparse.Namespace) -> dict[str, Any]:
    command = [
        sys.executable,
        "-u",
        "-m",
        "benchmarks.vocabulary",
        "--one",
        case,
        str(file),
        "--vram",
        budget(case, options),
    ]
    for name in ("layers", "batch", "sequence", "steps"):
        command += [f"--{name}", str(getattr(options, name))]
    command += ["--tiny"] if options.tiny else []
    with log.open("a") as output:
        output.write(f"\n=== {case}\n")
        output.flush()
        process = start(command, cwd=ROOT, output=output)
        try:
            process.wait(timeout=options.limit)
            late = ""
        except subprocess.TimeoutExpired:
            late = f"stopped after {options.limit:g} s"
        finally:
            code = end(process)
    if file.exists():
        found: dict[str, Any] = json.loads(file.read_text())
        return found
    return {"failed": late or why_it_ended(code, log)}


def _row(case: str, found: dict[str, Any], options: argparse.Namespace) -> dict[str, str]:
    row = {"case": case, "vram": budget(case, options)}
    if "failed" in found:
        return row | {"losses": f"FAILED: {found['failed']}"}
    row |= {
        "parameters": f"{found['parameters'] / 1e9:.2f}e9",
        "least vram": f"{found['least_bytes'] / 2**30:.2f} GiB",
        "s a step": f"{found['step_s']:.3f}",
        "losses": ", ".join(f"{loss:.4f}" for loss in found["losses"]),
    }
    if found.get("peak_bytes"):
        row["peak VRAM"] = f"{found['peak_bytes'] / 2**30:.2f} GiB"
    return row


if __name__ == "__main__":
    sys.exit(main())
