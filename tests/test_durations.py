"""The suite stays within what two cores do in seven and a half minutes, as durations.json has it."""

from __future__ import annotations

import json
from pathlib import Path

from .durations import BUDGET_S, FILE, Durations, measured

TESTS = Path(__file__).parent
LISTED = json.loads(FILE.read_text())


def test_every_file_is_listed_and_no_other() -> None:
    found = {str(path.relative_to(TESTS.parent)) for path in TESTS.rglob("test_*.py")}
    how = "Measure it: STORM_DURATIONS=tests/durations.json python -m pytest FILE"
    assert found - set(LISTED["files"]) == set(), f"not in {FILE.name}. {how}"
    assert set(LISTED["files"]) - found == set(), f"in {FILE.name}, and not there. {how} of another one"
    assert {name.partition("::")[0] for name in LISTED["slow"]} <= found


def test_all_of_them_are_within_the_budget() -> None:
    total_s = sum(LISTED["files"].values())
    most = sorted(LISTED["files"].items(), key=lambda item: -item[1])[:10]
    assert total_s <= BUDGET_S, f"{total_s:.0f} of {BUDGET_S:.0f} s. Mark cases wide, or make them faster: {most}"
    assert total_s > BUDGET_S / 10, "that cannot be the suite"


def test_what_was_measured_is_added_to_what_is_known(tmp_path: Path) -> None:
    assert measured({"tests/test_a.py::one[x]": 0.2, "tests/test_a.py::one[y]": 0.9, "tests/test_b.py::two": 0.1}) == (
        {"tests/test_a.py": 1.1, "tests/test_b.py": 0.1},
        {"tests/test_a.py::one"},
    )
    file = tmp_path / "tests" / "durations.json"
    file.parent.mkdir()
    for name in ("a", "b", "new"):
        (file.parent / f"test_{name}.py").touch()
    files = {"tests/test_a.py": 3.0, "tests/test_b.py": 2.0, "tests/test_gone.py": 1.0}
    slow = ["tests/test_a.py::one", "tests/test_b.py::two", "tests/test_gone.py::three"]
    file.write_text(json.dumps({"files": files, "slow": slow}))
    Durations(file).write({"tests/test_a.py::one": 0.1})
    assert json.loads(file.read_text()) == {
        "files": {"tests/test_a.py": 0.1, "tests/test_b.py": 2.0},
        "slow": ["tests/test_b.py::two"],
    }
    Durations(file).write({"tests/test_a.py::one": 0.5}, all_others_take_none=True)
    assert json.loads(file.read_text()) == {
        "files": {"tests/test_a.py": 0.5, "tests/test_b.py": 0.0, "tests/test_new.py": 0.0},
        "slow": ["tests/test_a.py::one"],
    }
