"""What all tests share: which of them run, a device fixture for CPU and GPU, a generous ledger, notices that are given
again.

Many laws are a grid of cases, and all of them take half an hour on two cores. Without ``STORM_WIDE`` a part of each
large grid runs, the same one every time, with every value of every axis in it; and what is marked ``wide``, as tiny
runs of benchmarks, does not. ``daily("...", "...")`` names the cases that run, by words of their ids, where the others
prove the same once more. With ``STORM_FAST`` one case of each law runs, and nothing that durations.json calls slow.
``STORM_DURATIONS`` names the file to which the seconds of tests are written."""

from __future__ import annotations

import gc
import os
import signal
import zlib
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping

import hypothesis
import pytest
import torch

from stormtorch.core.budget import Budget
from stormtorch.core.notices import forget_notices
from stormtorch.core.sizes import GiB
from stormtorch.core.tags import Tier
from stormtorch.memory.books.ledger import Ledger

from .durations import Durations, slow_tests
from .thinning import thinned

KINDS = {"pair", "settled", "_way"}  # fixtures that are made in several kinds, for every test of a file
FAST = bool(os.environ.get("STORM_FAST"))
collect_ignore = ["benchmarks", "integrations", "kill"] if FAST else []  # processes, and packages that load slowly

# Examples may take their time where other processes keep the cores busy; ours make what they change themselves.
hypothesis.settings.register_profile(
    "storm",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("storm")

# A background job or nohup has SIGINT ignored, and Python then installs no handler; the tests of Ctrl-C need theirs.
signal.signal(signal.SIGINT, signal.default_int_handler)

# torch.manual_seed keeps a seed, with the stack as text, for each kind of accelerator that is not there. That took a
# tenth of the time of the laws.
for _kind in (torch.cuda, torch.xpu, torch.mtia):
    if not _kind.is_available():
        setattr(_kind, "manual_seed_all", lambda _seed: None)  # noqa: B010


def pytest_configure(config: pytest.Config) -> None:
    if "STORM_DURATIONS" in os.environ:
        config.pluginmanager.register(Durations(config.rootpath / os.environ["STORM_DURATIONS"]))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not any("::" in asked for asked in config.args):
        _check_daily(items)
    if not os.environ.get("STORM_WIDE"):
        left_out = _left_out(items) | (_not_fast(items) if FAST else set())
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch sees none here")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """All that the imports made stays to the end: the collector, which many tests call, need not look at it again. By
    itself it looks at everything a tenth as often as usual; that took one second of 30."""
    gc.collect()
    gc.freeze()
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, 10 * old)


def _left_out(items: list[pytest.Item]) -> set[pytest.Item]:
    """What only a wide run has. What needs a GPU is never left out."""
    grids: defaultdict[str, dict[str, pytest.Item]] = defaultdict(dict)
    left_out: set[pytest.Item] = set()
    for item in items:
        if "gpu" in item.keywords:
            continue
        if len(items) > 1 and ("wide" in item.keywords or not _is_daily(item)):
            left_out.add(item)
        elif hasattr(item, "callspec"):
            grids[item.nodeid.partition("[")[0]][item.nodeid] = item
    for cases in grids.values():
        for name in _twins(cases):
            left_out.add(cases.pop(name))
        values = {name: _values_of(item) for name, item in cases.items()}
        kept = thinned(values)  # type: ignore[arg-type]
        left_out |= {item for name, item in cases.items() if name not in kept}
    return left_out


def _is_daily(item: pytest.Item) -> bool:
    """Without the mark, all cases are. A word means one part of the id, or several in their order: ``forward-1``."""
    words = _daily_words(item)
    return not words or any(_has(item, word) for word in words)


def _daily_words(item: pytest.Item) -> list[str]:
    return [word for mark in item.iter_markers("daily") for word in mark.args]


def _has(item: pytest.Item, word: str) -> bool:
    return f"-{word}-" in f"-{item.callspec.id}-"  # type: ignore[attr-defined]


def _check_daily(items: list[pytest.Item]) -> None:
    """A word that no case has is a mistake: what it meant would run on no day."""
    found: defaultdict[tuple[str, str], bool] = defaultdict(bool)
    for item in items:
        for word in _daily_words(item):
            found[item.nodeid.partition("[")[0], word] |= _has(item, word)
    for (test, word), is_there in found.items():
        if not is_there:
            raise pytest.UsageError(f"{test}: no case has {word!r}, which @pytest.mark.daily names")


def _twins(cases: Mapping[str, pytest.Item]) -> list[str]:
    """All but one of the cases that differ in the kind of a fixture alone. A test's name decides which one it gets, and
    the tests of a file together have every kind."""
    first: dict[frozenset[Hashable], str] = {}
    for name in sorted(cases, key=lambda name: zlib.crc32(name.encode())):
        first.setdefault(frozenset(value for value in _values_of(cases[name]) if value[0] not in KINDS), name)
    kept = set(first.values())
    return [name for name in cases if name not in kept]


def _not_fast(items: list[pytest.Item]) -> set[pytest.Item]:
    """What a fast run leaves out besides: slow tests, and of each law all cases but one."""
    slow, seen = slow_tests(), set[str]()
    left_out: set[pytest.Item] = set()
    for item in sorted(items, key=lambda item: zlib.crc32(item.nodeid.encode())):
        name = item.nodeid.partition("[")[0]
        if name in slow or "gpu" in item.keywords or (name in seen and name.startswith("tests/laws/")):
            left_out.add(item)
        elif "wide" not in item.keywords:
            seen.add(name)
    return left_out


def _values_of(item: pytest.Item) -> set[tuple[str, int]]:
    """One object stands in all cases that have it."""
    return {(name, id(value)) for name, value in item.callspec.params.items()}  # type: ignore[attr-defined]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    """Room for every test; what a test leaves charged is an error."""
    book = Ledger(*(Budget(tier=tier, limit_bytes=8 * GiB, given=f"{tier.setting}='8GiB'") for tier in Tier))
    yield book
    book.check()
    left = {tier.value: book.used_bytes(tier) for tier in Tier if book.used_bytes(tier)}
    assert not left, f"still charged after the test: {left}"


@pytest.fixture(autouse=True)
def _hear_notices_anew() -> None:
    forget_notices()
