"""``python -m benchmarks.micro [CASE ...]``: every case in a process of its own with a time limit, one table at the
end.

A case is a module of this folder with ``run(tiny) -> list[Row]``. ``--tiny`` checks that they work, in seconds.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from .rows import Row, machine, table

CASES = ("link", "pinning", "adamw", "files")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.micro", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"any of {', '.join(CASES)} (default: all)")
    parser.add_argument("--tiny", action="store_true", help="small sizes: shows that it runs, not how fast")
    parser.add_argument("--limit", type=float, default=180, help="seconds that one case may take")
    parser.add_argument("--out", type=Path, metavar="NAME", help="also write NAME.md and NAME.json")
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = set(options.cases) - set(CASES)
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}. There are {', '.join(CASES)}.")
    if options.in_process:
        rows = importlib.import_module(f".{options.cases[0]}", __package__).run(options.tiny)
        print(json.dumps([asdict(row) for row in rows]))
        return 0
    rows, failed = [], False
    for case in options.cases or CASES:
        print(f"{case} ...", file=sys.stderr, flush=True)
        command = [
            sys.executable,
            "-m",
            "benchmarks.micro",
            "--in-process",
            case,
            *(["--tiny"] if options.tiny else []),
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=options.limit, check=True)
            rows += [Row(**fields) for fields in json.loads(done.stdout.splitlines()[-1])]
        except subprocess.TimeoutExpired:
            failed = True
            print(f"{case}: stopped after {options.limit:.0f} s", file=sys.stderr)
        except subprocess.CalledProcessError as error:
            failed = True
            print(f"{case}: failed\n{error.stderr}", file=sys.stderr)
    text = f"{machine()}\n\n{table(rows)}\n"
    print(text)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.with_suffix(".md").write_text(f"# Micro benchmarks\n\n{text}")
        report = {"machine": machine(), "rows": [asdict(row) for row in rows]}
        options.out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
