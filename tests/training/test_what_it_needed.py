"""Seconds, bytes and peaks in the metrics; and a last checkpoint that does not fit with its optimizer's states."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from stormtorch.core.errors import SettingError, StorageError
from stormtorch.core.notices import forget_notices
from stormtorch.session.api import Session
from stormtorch.training.reporting import Pace

from .tiny import Quiet, checkpoint, losses, one_thread, records, run, settings, steps_saved  # noqa: F401

pytest.importorskip("transformers")


def test_what_a_run_needed_is_written_and_said(tmp_path: Path) -> None:
    chosen = settings(tmp_path, save_every=4)
    watcher = Quiet()
    assert run(chosen, watcher) == 0
    [end] = records(chosen, "end")
    assert (end["step"], end["steps"]) == (8, 8)
    assert end["tokens_per_s"] > 0
    assert end["peak_rss_bytes"] > 50 << 20
    assert end["peak_vram_bytes"] > 0
    assert [record["step"] for record in records(chosen, "save")] == [4, 8]
    assert all(record["seconds"] > 0 and record["bytes"] > 1000 for record in records(chosen, "save"))
    assert not records(chosen, "load")  # the weights are random
    [said] = [line for line in watcher.said if line.startswith("process: ")]
    assert "last of 2 saves" in said
    shutil.rmtree(checkpoint(chosen, 8))
    watcher = Quiet()
    assert run(chosen, watcher) == 0
    [resume] = records(chosen, "resume")
    assert resume["seconds"] > 0
    assert resume["bytes"] > 1000
    [end] = records(chosen, "end")  # that of the run before lies behind the checkpoint
    assert end["steps"] == 4
    assert end["tokens_per_s"] is None  # the first steps give no rate
    [said] = [line for line in watcher.said if line.startswith("process: ")]
    assert "resume " in said


def test_the_mean_pace_leaves_out_the_first_steps_and_all_pauses() -> None:
    now = [0.0]
    pace = Pace(clock=lambda: now[0])
    for step in range(1, 11):
        now[0] += 10.0 if step <= 5 else 2.0
        pace.step_ended()
        assert (pace.mean_step_s is None) == (step <= 5)
        with pace.pause():
            now[0] += 100.0
    assert pace.mean_step_s == 2.0
    assert pace.steps == 10


def full_for_states(monkeypatch: pytest.MonkeyPatch, at: int, *, weights_too: bool = False) -> None:
    """A disk on which, at one step, a checkpoint has no room unless it holds the weights alone."""
    real = Session.save

    def save(self: Session, directory: Path | str, *, optimizer: bool = True, **options: Any) -> None:
        if Path(directory).name == f"step-{at:08d}" and (optimizer or weights_too):
            error = StorageError(f"Cannot write {directory}: no space is left on the filesystem. Free space there.")
            error.errno = errno.ENOSPC
            raise error
        real(self, directory, optimizer=optimizer, **options)

    monkeypatch.setattr(Session, "save", save)


def run_file(chosen: Any, step: int) -> Any:
    return json.loads((checkpoint(chosen, step) / "storm" / "run.json").read_text())


def test_the_last_one_is_saved_without_states_where_they_do_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = settings(tmp_path, output=str(tmp_path / "other"), schedule="constant")
    assert run(other) == 0
    full_for_states(monkeypatch, 8)
    chosen = settings(tmp_path, save_every=4, keep=1, schedule="constant")
    watcher = Quiet()
    assert run(chosen, watcher) == 1
    assert "step-00000008 was not saved" in watcher.warned[0]
    assert "The weights alone are in " in watcher.warned[-1]
    assert str(checkpoint(chosen, 4)) in watcher.warned[-1]  # which has all that a resume needs
    assert steps_saved(chosen) == [4, 8]
    assert not list(checkpoint(chosen, 8).glob("storm/optimizer*"))
    assert run_file(chosen, 4)["optimizer"] is True
    assert run_file(chosen, 8)["optimizer"] is False
    mine, theirs = (load_file(checkpoint(run_, 8) / "model.safetensors") for run_ in (chosen, other))
    assert all(mine[name].equal(theirs[name]) for name in theirs)
    monkeypatch.undo()
    watcher = Quiet()
    assert run(chosen, watcher) == 1  # nothing is left to do, and it is as incomplete as before
    assert any("nothing is left to train" in line for line in watcher.said)
    assert f"{checkpoint(chosen, 8)} is not complete: it holds the weights alone" in watcher.warned[-1]
    enough = Quiet()
    assert run(settings(tmp_path, save_every=4, schedule="constant", save_optimizer=False), enough) == 0
    assert not any("not complete" in line for line in enough.warned)
    more = settings(tmp_path, save_every=4, steps=12, schedule="constant")
    with pytest.raises(SettingError, match=r"step-00000008 holds the weights alone.*--no-save-optimizer"):
        run(more)
    shutil.rmtree(checkpoint(chosen, 8))
    assert run(more) == 0  # from the fourth


def test_a_disk_with_room_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full_for_states(monkeypatch, 8, weights_too=True)
    chosen = settings(tmp_path, save_every=4)
    watcher = Quiet()
    assert run(chosen, watcher) == 1
    assert "The last step was not saved" in watcher.warned[-1]
    assert steps_saved(chosen) == [4]


def test_a_signal_on_a_full_disk_keeps_what_can_be_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights alone would be the newest checkpoint then, and the same command would refuse to go on."""
    full_for_states(monkeypatch, 6)
    chosen = settings(tmp_path, save_every=4)
    expected = settings(tmp_path, output=str(tmp_path / "other"))
    assert run(expected) == 0
    watcher = Quiet(lambda step: os.kill(os.getpid(), 15) if step == 6 else None)
    assert run(chosen, watcher) == 143
    assert steps_saved(chosen) == [4]
    monkeypatch.undo()
    assert run(chosen) == 0
    assert losses(chosen) == losses(expected)


def test_checkpoints_without_states_by_choice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    forget_notices()
    chosen = settings(tmp_path, save_every=4, save_optimizer=False)
    assert run(chosen) == 0
    expected = losses(chosen)
    assert all(not list(checkpoint(chosen, step).glob("storm/optimizer*")) for step in (4, 8))
    shutil.rmtree(checkpoint(chosen, 8))
    assert run(chosen) == 0
    assert "AdamW starts again" in caplog.text
    again = losses(chosen)
    assert [again[step] == expected[step] for step in range(1, 9)] == [True] * 5 + [False] * 3
    shutil.rmtree(checkpoint(chosen, 8))
    with pytest.raises(SettingError, match="holds the weights alone"):
        run(settings(tmp_path, save_every=4))
