"""How long tests take: `make durations` measures it and writes durations.json, which test_durations.py watches.

Seconds are those of processors, of a test and of the processes that it has waited for: other work on the machine does
not count, sleeping neither. ``slow`` names the tests of which a case takes longer than a fast run has for one."""

from __future__ import annotations

import json
import resource
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("durations.json")
BUDGET_S = 875.0  # two processors have 880 s in seven minutes and twenty seconds; collecting on three workers takes 30
SLOW_S = 0.3
_KEY, _BEGAN = "processor_s", pytest.StashKey[float]()


def slow_tests() -> set[str]:
    """Names up to the parameters, as ``tests/laws/test_orders.py::test_any_order``; none where nothing was measured."""
    return set(json.loads(FILE.read_text())["slow"]) if FILE.exists() else set()


def _processor_s() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


class Durations:
    """A plugin of pytest. Workers measure, and tell with their reports; the process that hears all reports writes."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seconds: defaultdict[str, float] = defaultdict(float)  # by case

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        report = yield
        if call.when == "teardown":
            report.user_properties.append((_KEY, _processor_s() - item.stash[_BEGAN]))  # type: ignore[attr-defined]
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        item.stash[_BEGAN] = _processor_s()
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for key, value in report.user_properties:
            if key == _KEY and report.when == "teardown":
                self._seconds[report.nodeid] = float(str(value))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not hasattr(session.config, "workerinput"):
            whole = session.config.args_source is pytest.Config.ArgsSource.TESTPATHS
            self.write(self._seconds, all_others_take_none=whole)

    def write(self, seconds: dict[str, float], *, all_others_take_none: bool = False) -> None:
        """Replace what is known of the files that ran, and forget those that are gone."""
        files, slow = measured(seconds)
        root = self._file.parent.parent
        found = {path.relative_to(root).as_posix() for path in self._file.parent.rglob("test_*.py")}
        known = json.loads(self._file.read_text()) if self._file.exists() else {"files": {}, "slow": []}
        if all_others_take_none:  # none of their tests runs here
            known = {"files": dict.fromkeys(found, 0.0), "slow": []}
        kept = {name for name in known["slow"] if name.partition("::")[0] in found - set(files)}
        merged = {**known["files"], **files}
        listed = {
            "files": {name: merged[name] for name in sorted(merged) if name in found},
            "slow": sorted(kept | slow),
        }
        self._file.write_text(json.dumps(listed, indent=1) + "\n")


def measured(seconds: dict[str, float]) -> tuple[dict[str, float], set[str]]:
    """Of seconds by case: those of each file, and the tests that are slow."""
    files: defaultdict[str, float] = defaultdict(float)
    slow = set()
    for name, taken_s in seconds.items():
        files[name.partition("::")[0]] += taken_s
        if taken_s > SLOW_S:
            slow.add(name.partition("[")[0])
    return {name: round(taken_s, 1) for name, taken_s in files.items()}, slow
