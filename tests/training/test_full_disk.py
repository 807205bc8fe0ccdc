"""A disk that is full while a checkpoint is written in the background: said, survived, the last good one intact."""

from __future__ import annotations

import dataclasses
import errno
import os
from pathlib import Path
from typing import Any

import pytest

from stormtorch.checkpoint import complete
from stormtorch.checkpoint.files import disk

from .tiny import Quiet, checkpoint, losses, one_thread, records, run, settings, steps_saved  # noqa: F401

pytest.importorskip("transformers")


@pytest.mark.parametrize("call", ["pwrite", "sync", "rename"])
def test_a_save_in_the_background_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    chosen = settings(tmp_path, save_every=2, keep=9)
    failures = 0
    real = getattr(disk.CALLS, call)

    def fails_once(*given: Any) -> object:
        nonlocal failures
        path = given[0] if call == "rename" else str(Path(f"/proc/self/fd/{given[0]}").readlink())
        if "step-00000004" in path and not failures:
            failures += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*given)

    changed: dict[str, Any] = {call: fails_once}
    monkeypatch.setattr(disk, "CALLS", dataclasses.replace(disk.CALLS, **changed))
    watcher = Quiet()
    assert run(chosen, watcher) == 0
    assert any("step-00000004 was not saved" in line and "ENOSPC" in line for line in watcher.warned), watcher.warned
    assert steps_saved(chosen) == [2, 6, 8]
    assert all(complete(checkpoint(chosen, step)) for step in steps_saved(chosen))
    assert not [path for path in checkpoint(chosen, 2).parent.iterdir() if path.name.startswith(".")]
    assert losses(chosen).keys() == set(range(1, 9))
    assert [record["step"] for record in records(chosen, "save")] == steps_saved(chosen)
