"""``python -m benchmarks.data [GROUP ...] --scratch FOLDER``: how fast batches come, ours and others', each case in a
process of its own with a time limit; one table for each group at the end.

Groups: rows and tokens (against the peers, from the page cache), flat (what a sample costs as the data grow beyond
RAM), gpu (a convnet trained from files, beside the same data resident in VRAM). The data are made in a folder of their
own inside FOLDER, which is removed at the end. What a case could not do stands in the table as its result.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.about import commit, machine

from stormtorch.core.errors import SettingError
from stormtorch.core.sizes import parse_bytes

from .cases import PEERS, Case, package_of
from .isolation import run_isolated
from .made import make
from .plan import GROUPS, Machine, cases_of
from .results import Result, ours_failed, text_of, write

_DATA_LIMIT_S = 300  # for a peer to make its data


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data", description=__doc__)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"any of {', '.join(GROUPS)} (default: rows tokens)")
    parser.add_argument(
        "--scratch", type=Path, metavar="FOLDER", help="where data may be made (default: the temporary folder)"
    )
    parser.add_argument("--out", type=Path, metavar="NAME", help="also write NAME.md, NAME.json and NAME.log")
    parser.add_argument(
        "--peers", nargs="*", choices=list(PEERS), default=list(PEERS), help="only these (default: all)"
    )
    parser.add_argument("--methods", nargs="+", metavar="METHOD", help="only these of all cases")
    parser.add_argument(
        "--python", action="append", default=[], metavar="PEER=FILE", help="the interpreter that has a peer's packages"
    )
    parser.add_argument("--largest", default="40GB", metavar="SIZE", help="of the group flat (default: 40GB)")
    parser.add_argument("--device", default="cpu", help="of the groups flat and gpu (default: cpu)")
    parser.add_argument(
        "--repeat", type=int, default=1, metavar="N", help="run all cases of a group so often, in turns"
    )
    parser.add_argument(
        "--patience", type=float, metavar="S", help="seconds that a case of `flat` may wait for a quiet machine"
    )
    parser.add_argument("--limit", type=float, metavar="S", help="seconds that one case may take")
    parser.add_argument(
        "--budget", type=float, metavar="S", help="seconds for everything; what is left over is not run"
    )
    parser.add_argument("--commit", help="what to write down as the commit where there is no git (default: git's)")
    parser.add_argument("--tiny", action="store_true", help="small sizes: shows that it runs, not how fast")
    options = parser.parse_args()
    unknown = set(options.groups) - set(GROUPS)
    if unknown:
        parser.error(f"no such group: {', '.join(sorted(unknown))}. There are {', '.join(GROUPS)}.")
    pythons = dict(text.partition("=")[::2] for text in options.python)
    if pythons.keys() - PEERS.keys() or "" in pythons.values():
        parser.error(f"--python takes PEER=FILE, with PEER one of {', '.join(PEERS)}.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the case running ends too
    try:
        options.largest = parse_bytes(options.largest, setting="--largest")
        return _all(options, pythons)
    except (SettingError, ValueError) as error:
        parser.error(str(error))


def _all(options: argparse.Namespace, pythons: dict[str, str]) -> int:
    results: list[Result] = []
    about = {"commit": options.commit or commit(), "command": " ".join(["benchmarks.data", *sys.argv[1:]])}
    end_s = time.monotonic() + (options.budget or float("inf"))
    with tempfile.TemporaryDirectory(prefix="storm_data_", dir=options.scratch) as name:
        scratch = Path(name)
        log = options.out.with_suffix(".log") if options.out else scratch / "log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)
        for group in options.groups or GROUPS[:2]:
            folder = scratch / group
            folder.mkdir()
            runner = _Runner(folder, log, pythons, end_s)
            cases = _cases(group, folder, options)
            for case in cases * options.repeat:
                results.append(runner.run(case))
                if options.out is not None:  # after every case: a run that is cut short leaves what it has
                    write(results, about, options.out)
            shutil.rmtree(folder)
        if not results:
            raise ValueError("no case is left of these groups, peers and methods")
        about = {"machine": machine(), **about}
        print(text_of(results, about))
        if options.out is not None:
            write(results, about, options.out)
    return int(ours_failed(results))


def _cases(group: str, folder: Path, options: argparse.Namespace) -> list[Case]:
    from stormtorch.memory.books.limits import host_available_bytes

    machine = Machine(
        disk_free_bytes=shutil.disk_usage(folder).free, ram_bytes=host_available_bytes(), device=options.device
    )
    cases = cases_of(group, folder, machine, tiny=options.tiny, largest=options.largest, packages=options.peers)
    if options.patience is not None:
        cases = [replace(case, patience_s=options.patience, limit_s=case.limit_s + options.patience) for case in cases]
    if options.limit is not None:
        cases = [replace(case, limit_s=options.limit) for case in cases]
    return [case for case in cases if not options.methods or case.method in options.methods]


class _Runner:
    """Makes the data of a case where they are not there yet, then runs it in a process of its own.

    A peer's form of the data is made by the peer."""

    def __init__(self, folder: Path, log: Path, pythons: dict[str, str], end_s: float) -> None:
        self.folder, self.log, self.pythons, self.end_s, self.count = folder, log, pythons, end_s, 0

    def run(self, case: Case) -> Result:
        print(f"{case.settings} ...", end=" ", file=sys.stderr, flush=True)
        if package_of(case.method) in {"storm", "torch"}:
            make(case)
            result = Result(case=case)
        else:
            result = self._isolated(replace(case, limit_s=_DATA_LIMIT_S), prepare=True)
        if not result.failed:
            result = self._isolated(case, prepare=False)
        result = replace(result, case=case)
        rate = result.figures.get("rate") or 1 / result.figures.get("sample_s", float("inf"))
        print(result.failed or f"{rate:,.0f} samples/s", file=sys.stderr, flush=True)
        return result

    def _isolated(self, case: Case, *, prepare: bool) -> Result:
        left_s = self.end_s - time.monotonic()
        if left_s < 1:
            return Result(case=case, failed="not run: the time of --budget is over")
        self.count += 1
        python = self.pythons.get(package_of(case.method), sys.executable)
        case = replace(case, limit_s=min(case.limit_s, left_s))
        file = self.folder / f"{self.count}.json"
        return run_isolated(case, python=python, file=file, log=self.log, prepare=prepare)


if __name__ == "__main__":
    sys.exit(main())
