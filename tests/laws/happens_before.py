"""Gives the lanes of a CPU the freedom of a GPU's streams, and finds the accesses that nothing orders.

On a CPU the calling thread computes, and it asks for nothing before that is done: most missing waits cannot make a
number wrong there. Here the lanes do their work as ever, and a `Checker` is told of each copy, wait, event and flag, of
each job of the workers and of each operation of torch. It keeps the clocks of ordering.py, where compute is a stream of
its own: what it was asked for may run at any later time, unless something orders it.

Memory in an arena is the host's, and all other memory the device's. An event that the host asks about is never done,
unless the host must know that it is: so the code under test takes the way that it takes where lanes are slow."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from stormtorch.checkpoint.state.snapshot import Piece, Still
from stormtorch.core.tags import Tag
from stormtorch.memory.disk.stored import MappedRange, StoredTensor
from stormtorch.memory.host.arena import HostArena
from stormtorch.memory.host.region import Region
from stormtorch.memory.lanes.build import Lanes, open_lanes
from stormtorch.memory.lanes.flags import Flag
from stormtorch.memory.lanes.lane import Event, Lane
from stormtorch.native.adamw import adamw_
from stormtorch.native.update import AdamStep, AdamTensors, WeightCopy
from stormtorch.native.worker.files import FileJob, FileWorker
from stormtorch.native.worker.jobs import FlagValue, Worker
from stormtorch.streams.optimizer.adam.disk_home import DiskHome
from stormtorch.streams.units.unit import Unit
from stormtorch.streams.weights.in_scratch import ScratchWeights

from .checker import Checker, Wait
from .operations import Operations
from .ordering import HOST, Point


class CheckedEvent(Event):
    """A point of a lane that is checked."""

    def __init__(self, checker: Checker, event: Event, point: Point) -> None:
        self._checker, self.event, self.point = checker, event, point

    def done(self) -> bool:
        self.event.done()  # raises if the lane has failed
        return self._checker.clocks.has_seen(HOST, self.point)

    def synchronize(self) -> None:
        self.event.synchronize()
        self._checker.host_sees(self.point)


class CheckedLane(Lane):
    """A lane that tells the checker of all it is asked for."""

    def __init__(self, checker: Checker, lane: Lane) -> None:
        self._checker, self._lane, self.name = checker, lane, lane.name

    def copy(self, target: torch.Tensor, source: torch.Tensor, tag: Tag, unit: int | None = None) -> None:
        what = f"a copy of {tag.name}" + ("" if unit is None else f" of unit {unit}")
        self._checker.use(self.name, source, what, writes=False)
        self._checker.use(self.name, target, what, writes=True)
        self._lane.copy(target, source, tag, unit)

    def fill(self, target: torch.Tensor, byte: int) -> None:
        self._checker.use(self.name, target, "to fill", writes=True)
        self._lane.fill(target, byte)

    def record(self) -> Event:
        return CheckedEvent(self._checker, self._lane.record(), self._checker.clocks.point(self.name))

    def wait(self, event: Event) -> None:
        assert isinstance(event, CheckedEvent), "an event of a lane that is not checked"
        self._checker.see(self.name, event.point)
        self._lane.wait(event.event)

    def write_flag(self, flag: Flag, value: int) -> None:
        self._checker.set_flag(flag.address, value, self._checker.clocks.point(self.name))
        self._lane.write_flag(flag, value)

    def wait_flag(self, flag: Flag, value: int) -> None:
        self._checker.see_flag(self.name, flag.address, value)
        self._lane.wait_flag(flag, value)

    def synchronize(self) -> None:
        self._lane.synchronize()
        self._checker.host_sees(self._checker.clocks.point(self.name))

    def emit(self) -> None:
        self._lane.emit()

    def close(self) -> None:
        self._lane.close()
        self._checker.host_sees(self._checker.clocks.point(self.name))


@contextlib.contextmanager
def checking(missing: Wait | None = None) -> Iterator[Checker]:
    """Check the sessions that are opened and closed inside; the caller asks the checker what it has found."""
    checker = Checker(missing)
    with pytest.MonkeyPatch.context() as patch:
        _check_lanes(patch, checker)
        _check_flags(patch, checker)
        _check_home(patch, checker)
        _check_updates(patch, checker)
        with Operations(checker.operate):
            yield checker


def _check_lanes(patch: pytest.MonkeyPatch, checker: Checker) -> None:
    def opened(*args: Any, **settings: Any) -> Lanes:
        lanes = open_lanes(*args, **settings)
        load, store, compute, aside = (
            CheckedLane(checker, lane) for lane in (lanes.load, lanes.store, lanes.compute, lanes.aside)
        )
        files = None if lanes.files is None else CheckedLane(checker, lanes.files)
        return Lanes(lanes.device, load, store, compute, aside, lanes.ring, files)

    patch.setattr("stormtorch.session.resources.open_lanes", opened)
    patch.setattr("stormtorch.session.offload.open_lanes", opened)


def _check_flags(patch: pytest.MonkeyPatch, checker: Checker) -> None:
    wait, reached = Flag.wait, FlagValue.reached

    def checked_wait(flag: Flag, value: int, timeout_s: float | None = None) -> bool:
        arrived = wait(flag, value, timeout_s)
        point = checker.flag(flag.address, value) if arrived else None
        if point is not None:
            checker.host_sees(point)
        return arrived

    def checked_reached(value: FlagValue) -> bool:
        point = checker.flag(value.address, value.value)
        return reached(value) if point is None else checker.clocks.has_seen(HOST, point)

    patch.setattr(Flag, "wait", checked_wait)
    patch.setattr(FlagValue, "reached", checked_reached)


def _check_home(patch: pytest.MonkeyPatch, checker: Checker) -> None:
    add, lend, refresh = HostArena._add, Still.lend, DiskHome.refresh
    refresh_weights, sync = ScratchWeights.refresh, StoredTensor.sync

    def checked_add(arena: HostArena, region: Region) -> None:
        add(arena, region)
        checker.add_home(region)

    @contextlib.contextmanager
    def checked_lend(still: Still, piece: Piece) -> Iterator[torch.Tensor]:
        """The thread that writes the file reads all the while."""
        with lend(still, piece) as tensor:
            check_piece(piece, tensor)
            yield tensor
            check_piece(piece, tensor)

    def check_piece(piece: Piece, tensor: torch.Tensor) -> None:
        checker.save(tensor)
        if piece.stored is not None:
            read(piece.stored.where, piece.stored.at, piece.stored.nbytes)

    def read(where: MappedRange, at: int, size: int) -> None:
        checker.use_file(HOST, where.file.number, where.offset + at, size, writes=False)

    def checked_refresh(home: DiskHome, unit: Unit) -> None:
        """User code may read the unit's states next."""
        refresh(home, unit)
        for place in unit.trained if home.holds(unit) else ():
            for name in home.shown(place):
                stored = home.stored_tensor(place, name)
                if stored is not None:
                    read(stored.where, stored.at, stored.nbytes)

    def checked_refresh_weights(weights: ScratchWeights, unit: Unit) -> bool:
        """User code may read the unit's weights next."""
        changed = refresh_weights(weights, unit)
        for place in unit.places if weights.holds(unit) else ():
            if place.stored is not None:
                read(place.stored.where, place.stored.at, place.stored.nbytes)
        return changed

    def checked_sync(stored: StoredTensor) -> None:
        """User code has written a weight."""
        where = stored.where
        checker.use_file(HOST, where.file.number, where.offset + stored.at, stored.nbytes, writes=True)
        sync(stored)

    patch.setattr(HostArena, "_add", checked_add)
    patch.setattr(ScratchWeights, "refresh", checked_refresh_weights)
    patch.setattr(StoredTensor, "sync", checked_sync)
    patch.setattr(Still, "lend", checked_lend)
    patch.setattr(DiskHome, "refresh", checked_refresh)


def _check_updates(patch: pytest.MonkeyPatch, checker: Checker) -> None:
    submit = Worker.submit

    def checked_submit(worker: Worker, tensors: AdamTensors, step: AdamStep, **settings: Any) -> int:
        checker.job(tensors, settings.get("ready"), settings.get("done"))
        return submit(worker, tensors, step, **settings)

    def checked_update(tensors: AdamTensors, step: AdamStep, **settings: Any) -> None:
        checker.update(tensors)
        adamw_(tensors, step, **settings)

    run = FileWorker.run

    def checked_run(worker: FileWorker, job: FileJob) -> int:
        if job.target is not None:
            checker.read(job.target, job)
        else:
            checker.file_job(job)
        return run(worker, job)

    copy = Worker.copy

    def checked_copy(worker: Worker, tensors: WeightCopy, **settings: Any) -> int:
        checker.job(tensors, settings["ready"], settings["done"], settings["also"])
        return copy(worker, tensors, **settings)

    patch.setattr(Worker, "submit", checked_submit)
    patch.setattr(Worker, "copy", checked_copy)
    patch.setattr(FileWorker, "run", checked_run)
    patch.setattr("stormtorch.streams.optimizer.adam.stream.adamw_", checked_update)
