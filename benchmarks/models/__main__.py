"""``python -m benchmarks.models [CASE ...]``: models of transformers and diffusers, each beside its resident run.

Models are built from configs with random weights: dense ones, mixtures of experts, a vision and a diffusion
transformer, LoRA, and generation. Nothing is downloaded. Each case has a process of its own with a time limit; one
table at the end. What a case could not do, for want of memory, time or a package, stands there as its result.

    resident              ``Trainer`` as it is, bf16 weights, everything in VRAM
    resident-checkpoint   the same with gradient checkpointing
    resident-masters      the same with fp32 masters in VRAM: STORM's precision
    storm                 `StormTrainer` with its defaults, within ``--vram``
    storm-backward        the same with ``step="backward"``, which cannot clip
    fsdp2                 ``fully_shard`` with ``CPUOffloadPolicy`` and gradient checkpointing, in a loop by hand
    accelerate            ``cpu_offload``, for generation

``Trainer`` does not fit the diffusion transformer: there a loop by hand does what the trainer does by default. "of
resident" compares with the fastest of the resident runs. "same numbers" compares the losses of all steps, to the bit,
with those of the first resident run that updates in the same precision. Some kernels of GPUs add in no fixed order.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.about import commit, machine
from benchmarks.turns import in_turn
from benchmarks.watched import ready_file, watch

from .cases import FORM, METHODS, MODELS, Case, given, parse
from .results import Result, text_of, write

_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.models", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"{FORM} (default: all)")
    parser.add_argument("--methods", nargs="+", metavar="METHOD", help=f"of {', '.join(METHODS)} (default: all)")
    parser.add_argument("--vram", default="", metavar="SIZE", help="budget of storm (default: the model's, cases.py)")
    parser.add_argument("--steps", type=int, metavar="N", help="measured steps, or tokens (default: 10)")
    parser.add_argument("--warm", type=int, metavar="N", help="steps before those, at least (default: 4; storm: 12)")
    parser.add_argument("--limit", type=float, metavar="S", dest="limit_s", help="seconds that one case may take")
    parser.add_argument("--tiny", action="store_true", help="tiny models on the CPU: shows that it runs, not how fast")
    parser.add_argument("--device", choices=("cuda", "cpu"))
    parser.add_argument("--commit", help="what to write down as the commit where there is no git (default: git's)")
    parser.add_argument("--out", type=Path, metavar="NAME", help="also write NAME.md, NAME.json and NAME.log")
    parser.add_argument("--one", nargs=2, metavar=("CASE", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        _one(Case(**json.loads(options.one[0])), Path(options.one[1]))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the case running ends too
    unknown = [method for method in options.methods or () if method not in METHODS]
    if unknown:
        parser.error(f"no method {unknown[0]!r}; there are {', '.join(METHODS)}")
    device = options.device or ("cpu" if options.tiny else None)
    few = {"steps": 3, "warm": 2} if options.tiny else {}
    settings = {name: getattr(options, name) or few.get(name) for name in ("steps", "warm", "limit_s")}
    try:
        cases = [
            given(case, device=device, **settings)
            for text in options.cases or MODELS
            for case in parse(text, methods=tuple(options.methods or ()), vram=options.vram, tiny=options.tiny)
        ]
    except ValueError as error:
        parser.error(str(error))
    return _all(cases, options)


def _all(cases: list[Case], options: argparse.Namespace) -> int:
    about = {"commit": options.commit or commit(), "command": " ".join(["benchmarks.models", *sys.argv[1:]])}
    results = in_turn(cases, _run, out=options.out, write=lambda results: write(results, about, options.out))
    about = {"machine": machine(), **about}
    print(text_of(results, about))
    if options.out is not None:
        write(results, about, options.out)
    return int(any(result.failed and result.case.streams for result in results))


def _run(case: Case, file: Path, log: Path) -> Result:
    command = [sys.executable, "-u", "-m", "benchmarks.models", "--one", json.dumps(asdict(case)), str(file)]
    environment = _OFFLINE | ({"OMP_NUM_THREADS": "1"} if case.tiny else {})  # it has no work for more
    watched = watch(command, file, log, title=case.settings, limit_s=case.limit_s, environment=environment)
    if watched.failed:
        return Result(case=case, failed=watched.failed, ram_bytes=watched.ram_bytes)
    return dataclasses.replace(Result.from_json(json.loads(file.read_text())), ram_bytes=watched.ram_bytes)


def _one(case: Case, file: Path) -> None:
    """Measures in this process and ends it at once: a peer's threads and process groups may not want to."""
    from .one import measure

    part = file.with_suffix(".part")
    part.write_text(json.dumps(asdict(measure(case, ready=ready_file(file)))))
    part.replace(file)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
