"""``python -m benchmarks.data.one CASE FILE [--prepare]``: one case in this process, which then ends at once.

The result goes to FILE. With ``--prepare`` it makes the data of the case instead, in the form that a peer reads.
A module of its own, because a peer runs it in an interpreter without STORM.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import traceback
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .cases import Case, package_of
from .results import Result

_MODULES = {"storm": "ours", "torch": "torch_feed", "hf": "hf_feed", "mosaic": "mosaic_feed"}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data.one", description=__doc__)
    parser.add_argument("case", help="as JSON")
    parser.add_argument("file", type=Path)
    parser.add_argument("--prepare", action="store_true")
    options = parser.parse_args()
    case = Case(**json.loads(options.case))
    try:
        result = Result(case=case, figures=_figures(case, prepare=options.prepare))
    except Exception as error:
        traceback.print_exc()
        text = " ".join(str(error).split())
        result = Result(case=case, failed=f"{type(error).__name__}: {text[:200]}{'…' if len(text) > 200 else ''}")
    part = options.file.with_suffix(".part")
    part.write_text(json.dumps(asdict(result)))
    part.replace(options.file)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a peer's threads and workers may not want to end


def _figures(case: Case, *, prepare: bool) -> dict[str, Any]:
    if prepare:
        importlib.import_module(f".{_MODULES[package_of(case.method)]}", __package__).prepare(case)
        return {}
    if case.group == "flat":
        from .flat import measure as measure_flat

        return measure_flat(case)
    if case.group == "gpu":
        from .gpu import measure as measure_gpu

        return measure_gpu(case)
    from .timing import timed_epochs

    if package_of(case.method) != "storm":
        warnings.simplefilter("ignore")  # a peer's deprecations are its own; ours are heard
    return timed_epochs(case, importlib.import_module(f".{_MODULES[package_of(case.method)]}", __package__).feed(case))


if __name__ == "__main__":
    main()
