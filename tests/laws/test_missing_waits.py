"""A wait that is missing in the code under test makes a race, which happens_before.py finds in every run.

The wait takes place all the same: the checker does not hear of it. So nothing breaks, and nothing depends on timing."""

from __future__ import annotations

from pathlib import Path

import pytest

from stormtorch.checkpoint.state.snapshot import Still

from . import test_large_tables as tables
from .checker import Checker, Wait
from .models import one_thread  # noqa: F401  # a fixture
from .watched import (
    MANY,
    SHORT,
    SUMS,
    TIED,
    Way,
    generated,
    ring,  # noqa: F401  # a fixture
    saved,
    skipped,
    small_scale,  # noqa: F401  # a fixture
    trained,
)

HOME, SUM, THERE = Way(share=0.0, look=(1,)), SUMS._replace(share=0.0), SUMS._replace(share=1.0)
AHEAD = Way(ahead=True, share=0.0, steps=4)
DISK = Way(disk=1.0, share=0.0)
WEIGHTS = Way(disk=1.0, weights=1.0, share=0.0, look=(1,))
OFFLOAD = Way(activations="offload", share=0.0, steps=2)
# Left out are waits that others imply in a loop. The store lane's: for updates that read the gradients before (weights
# that these wrote were loaded since), for a slab (compute has waited for its load since), and for weights that were
# updated on the device (it has waited for their states). The load lane's for gradients that it brings back: it waits
# for the bucket that they left.
WAITS = {
    "weights that are used come after their load": (Wait("compute", "Schedule._arrived"), HOME),
    "a load comes after the last use of its place": (Wait("load", "Block.take"), HOME),
    "a load of weights comes after their update": (Wait("load", "HomeGate.hold", "ParameterStream._copy"), HOME),
    "a store of gradients comes after they are made": (Wait("store", "GradHome.bring"), HOME),
    "an update comes after the store of gradients": (Wait("job", "AdamStream._submit"), HOME),
    "an update comes after loads of the weights before": (Wait("store", "AdamStream._announce"), HOME),
    "an update ahead comes after the store of gradients": (Wait("job", "Ahead.begin"), AHEAD),
    "weights are copied home after an update ahead": (Wait("job", "Ahead.take_over"), AHEAD),
    "an update on disk comes after the store of gradients": (Wait("job", "DiskHome.update"), DISK),
    "an update on disk comes after the one before is in its file": (Wait("file", "DiskHome.update"), DISK),
    "a load of weights comes after an update on disk": (Wait("load", "HomeGate.hold", "ParameterStream._copy"), DISK),
    "an update on disk comes after loads of the weights before": (Wait("store", "AdamStream._announce"), DISK),
    "user code reads states on disk after they are there": (Wait("host", "DiskHome.refresh"), DISK),
    "a load reads a file after an update is there": (Wait("file", "Files.load"), WEIGHTS),
    "an update of weights on disk comes after their loads": (Wait("store", "AdamStream._announce"), WEIGHTS),
    "user code reads weights on disk after they are there": (Wait("host", "ScratchWeights.refresh"), WEIGHTS),
    "a bucket is used again after its store": (Wait("compute", "Buckets.lend", "GradientStream.lend"), HOME),
    "a sum comes after the load of earlier gradients": (Wait("compute", "GradientStream._add_earlier"), SUM),
    "a factor is stored after it is made": (Wait("store", "AdamStream._store_factor"), SUM),
    "user code reads gradients after their store": (Wait("host", "GradHome.join"), HOME),
    "user code reads weights after their update": (Wait("host", "HomeGate.join"), HOME),
    "states are used after their load": (Wait("compute", "DeviceStates.staged"), THERE),
    "states are stored after their update": (Wait("store", "DeviceStates._store"), THERE),
    "states are loaded after the last use of their place": (Wait("aside", "DeviceStates._load"), THERE),
    "gradients are loaded after their store": (Wait("aside", "DeviceStates._add_gradients"), THERE),
    "poison comes after the last use": (Wait("store", "Pool._poisoned"), Way(poison=True)),
    "an activation is stored after it is made": (Wait("store", "ActivationStream._store"), OFFLOAD),
    "an activation's memory is used again after its store": (Wait("compute", "ActivationStream._release"), OFFLOAD),
    "an activation is loaded after its store": (Wait("load", "ActivationStream._load"), OFFLOAD),
    "an activation is used after its load": (Wait("compute", "ActivationStream._fetch"), OFFLOAD),
}
IN_PARTS = {
    "a part is stored after it is made": Wait("store", "Parts._send"),
    "a part's bucket is used again after its store": Wait("compute", "Buckets.lend", "Parts._send"),
    "a part is loaded after the last use of its bucket": Wait("load", "Buckets.lend", "Parts._send"),
    "a sum comes after the load of its part": Wait("compute", "Parts._send"),
}


def check_found(checker: Checker) -> None:
    assert checker.missed, "there is no such wait"
    assert checker.races


@pytest.mark.parametrize("name", WAITS)
@pytest.mark.daily(
    "weights that are used come after their load",
    "a load of weights comes after their update",
    "a store of gradients comes after they are made",
    "an update comes after loads of the weights before",
    "an update ahead comes after the store of gradients",
    "an update on disk comes after the one before is in its file",
    "a sum comes after the load of earlier gradients",
    "a factor is stored after it is made",
    "user code reads weights after their update",
    "states are used after their load",
    "an activation is stored after it is made",
    "poison comes after the last use",
)
def test_a_missing_wait_is_found(name: str) -> None:
    missing, way = WAITS[name]
    check_found(trained(SHORT, way, missing))


@pytest.mark.parametrize("name", IN_PARTS)
@pytest.mark.daily("a part is stored after it is made", "a sum comes after the load of its part")
def test_a_missing_wait_between_parts_is_found(name: str) -> None:
    check_found(trained(TIED, SUM._replace(vram=tables.FLOOR), IN_PARTS[name]))


@pytest.mark.usefixtures("ring")
def test_a_ring_that_does_not_wait_for_updates_is_found() -> None:
    check_found(trained(MANY, Way("backward", share=0.0), Wait("store", "HomeGate.hold", "GradRing.lend")))


def test_gradients_that_overwrite_those_of_an_update_ahead_are_found() -> None:
    skipped().check()
    check_found(skipped(Wait("store", "HomeGate.hold", "GradHome.bring")))


@pytest.mark.wide
@pytest.mark.usefixtures("small_scale")
def test_experts_that_are_used_before_they_come_are_found() -> None:
    check_found(generated("grouped", Wait("compute", "Schedule._arrived")))


def test_a_save_that_nothing_waits_for_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Still, "before_change", lambda *_args, **_settings: None)
    assert saved(tmp_path / "save", monkeypatch).races
    assert saved(tmp_path / "another", monkeypatch, states=tmp_path).races
