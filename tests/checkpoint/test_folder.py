"""Which checkpoints count, and how they come and go."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stormtorch.checkpoint import all_complete, complete, newest, prune, sweep
from stormtorch.checkpoint.folders.manifest import read_manifest
from stormtorch.checkpoint.saving.draft import Draft
from stormtorch.core.errors import CheckpointError, SettingError

from .made import Run


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """step-1, step-2 and step-10 in a folder: by name, the last would be the second."""
    run = Run()
    for step in (1, 2, 10):
        while run.session._saver.steps < step:
            run.step()
        run.session.save(tmp_path / f"step-{step}")
    run.session.close()
    return tmp_path


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def test_the_newest_is_the_one_with_the_most_steps(three: Path) -> None:
    assert names(all_complete(three)) == ["step-1", "step-2", "step-10"]
    assert newest(three) == three / "step-10"
    assert newest(str(three)) == three / "step-10"


def test_no_folder_has_no_checkpoints(tmp_path: Path) -> None:
    assert newest(tmp_path / "nothing") is None
    assert all_complete(tmp_path) == []
    assert not complete(tmp_path)
    assert prune(tmp_path, 1) == []
    assert sweep(tmp_path / "nothing") == []


@pytest.mark.parametrize(
    "file", ["model.safetensors", "storm/optimizer.safetensors", "storm/state.pt", "storm/manifest.json"]
)
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_truncated_one_is_never_chosen(three: Path, file: str, damage: str) -> None:
    path = three / "step-10" / file
    if damage == "gone":
        path.unlink()
    else:
        os.truncate(path, path.stat().st_size - 1 if file != "storm/manifest.json" else 40)
    assert not complete(three / "step-10")
    assert newest(three) == three / "step-2"


def test_pruning_keeps_the_newest(three: Path) -> None:
    assert names(prune(three, 2)) == ["step-1"]
    assert names(prune(three, 1)) == ["step-2"]
    assert prune(three, 1) == []
    assert names(sorted(three.iterdir())) == ["step-10"]
    with pytest.raises(SettingError, match="at least 1"):
        prune(three, 0)


def test_pruning_counts_whole_ones_only(three: Path) -> None:
    (three / "step-10" / "model.safetensors").unlink()
    assert names(prune(three, 1)) == ["step-1"]
    assert newest(three) == three / "step-2"
    assert (three / "step-10").exists()  # not ours to judge


def test_leftovers_of_the_dead_go_those_of_the_living_stay(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    dead = tmp_path / f".step-1.writing-{int(ended.stdout)}-abcd"
    removing = tmp_path / f".step-1.removing-{int(ended.stdout)}-abcd"
    living = tmp_path / f".step-1.writing-{os.getppid()}-abcd"
    other = tmp_path / ".cache"
    for path in (dead, removing, living, other):
        path.mkdir()
        (path / "file").write_bytes(b"x" * 100)
    mine = Draft(tmp_path / "step-2")
    mine.make()
    assert sorted(sweep(tmp_path)) == sorted([dead, removing])
    assert sorted(tmp_path.iterdir()) == sorted([living, other, mine.path])
    mine.discard()
    assert not mine.path.exists()


def test_a_number_that_another_process_has_now_protects_nothing(tmp_path: Path) -> None:
    old = tmp_path / f".step-1.writing-{os.getppid()}-abcd"
    old.mkdir()
    os.utime(old, (1000, 1000))  # long before that process began
    ours = tmp_path / f".step-1.writing-{os.getpid()}-abcd"
    ours.mkdir()  # of an earlier process with our number: we know of none
    assert sorted(sweep(tmp_path)) == sorted([old, ours])


def test_a_checkpoint_is_replaced_in_one_step(tmp_path: Path) -> None:
    run = Run()
    for step in range(1, 4):
        run.step()
        run.session.save(tmp_path / "latest")
        assert read_manifest(tmp_path / "latest").step == step
        assert names(list(tmp_path.iterdir())) == ["latest"]
    run.session.close()


def test_where_names_cannot_be_exchanged_it_is_replaced_in_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stormtorch.checkpoint.files import disk

    def cannot(_one: str, _other: str) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(disk, "CALLS", disk.DiskCalls(exchange=cannot))
    run = Run()
    for _ in range(2):
        run.step()
        run.session.save(tmp_path / "latest")
    run.session.close()
    assert read_manifest(tmp_path / "latest").step == 2
    assert names(list(tmp_path.iterdir())) == ["latest"]


def test_what_is_no_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.tex").write_text("years")
    (tmp_path / "file").write_text("one")
    (tmp_path / "empty").mkdir()
    run = Run()
    for name in ("work", "file"):
        with pytest.raises(SettingError, match="is not a checkpoint"):
            run.session.save(tmp_path / name)
    run.session.save(tmp_path / "empty")
    assert complete(tmp_path / "empty")
    run.session.close()
    assert (tmp_path / "work" / "thesis.tex").read_text() == "years"


def test_files_of_others_are_in_the_manifest(tmp_path: Path) -> None:
    run = Run()

    def files(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        (folder / "storm" / "run.json").write_text('{"seed": 1}')

    run.session.save(tmp_path / "one", files=files, wait=False)
    run.session.close()
    manifest = read_manifest(tmp_path / "one")
    assert {"config.json", "storm/run.json"} <= manifest.files.keys()
    assert manifest.files["storm/run.json"].size == 11
    (tmp_path / "one" / "config.json").unlink()
    assert not complete(tmp_path / "one")


def test_files_that_cannot_be_written_leave_nothing(tmp_path: Path) -> None:
    run = Run()

    def files(_folder: Path) -> None:
        raise RuntimeError("no tokenizer")

    with pytest.raises(RuntimeError, match="no tokenizer"):
        run.session.save(tmp_path / "one", files=files)
    assert list(tmp_path.iterdir()) == []
    run.session.save(tmp_path / "one")
    run.session.close()


def test_a_manifest_of_the_future_is_refused(three: Path) -> None:
    path = three / "step-10" / "storm" / "manifest.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 7'))
    with pytest.raises(CheckpointError, match=r"format 7; this version reads up to 1"):
        read_manifest(three / "step-10")
    assert newest(three) == three / "step-2"
