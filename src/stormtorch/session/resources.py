"""Resources of a session: budgets, units and their placement, home memory, lanes, flags and the pool.

A model that does not fit is refused here, before it is touched. Then its weights move to home memory.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ..core.endings import Endings
from ..core.errors import SettingError
from ..core.events import Sink
from ..core.notices import say_once
from ..core.plan import Division, Placement
from ..core.sizes import as_setting, parse_bytes, round_up
from ..core.tags import Tag, Tier
from ..memory.books.ledger import Ledger, open_ledger
from ..memory.books.limits import usable_device
from ..memory.cuda.allocator import expand_segments
from ..memory.cuda.device_meter import DeviceMeter, device_meter_for
from ..memory.cuda.idle_meter import IdleMeter, idle_meter_for
from ..memory.disk.calls import SystemCalls
from ..memory.disk.mapped import Span, WeightFile
from ..memory.disk.scratch import ScratchFile, create_scratch
from ..memory.host.arena import PAGE, HostArena
from ..memory.host.pinned import cannot_lock
from ..memory.host.pinning import PageLock, page_lock_for
from ..memory.lanes.build import Lanes, open_lanes
from ..memory.lanes.flags import Flags
from ..memory.lanes.lane import Lane
from ..memory.lanes.waits import WaitMeter
from ..memory.pools.pool import DevicePool
from ..native.worker.files import open_file_worker
from ..observe.recorder import Recorder
from ..streams.bridge import handlers
from ..streams.home.moving import Moving, ram_of
from ..streams.optimizer.adam.device_states import kept_bytes
from ..streams.optimizer.adam.settings import runs_as_adam
from ..streams.optimizer.torch_step import is_separable
from ..streams.settings import Settings, Trial
from ..streams.units.in_files import InFiles, spans_of
from ..streams.units.partition import Partition, partition
from ..streams.units.placement import UNITS_IN_BUDGET, Cut, division, place, room_for
from ..streams.units.sizes import Homes, check_disk, homes_for
from ..streams.units.unit import Place, Unit
from ..streams.weights.from_files import Files
from ..streams.weights.in_scratch import ScratchWeights

_READING_THREADS = 4  # reads at the same time: more are not faster


@dataclass(frozen=True, kw_only=True)
class Outline:
    """Resources that a session will take, before it takes any."""

    device: torch.device
    ledger: Ledger
    partition: Partition
    division: Division
    placement: Placement
    homes: Homes
    directories: list[Path]  # for states on disk
    meter: DeviceMeter | None  # None: memory on the device is not counted


@dataclass(frozen=True, kw_only=True)
class Ground(Outline):
    """Memory and lanes of a session, without streams."""

    endings: Endings
    page_lock: PageLock | None
    recorder: Recorder
    lanes: Lanes
    board: Flags
    pool: DevicePool
    waits: WaitMeter
    idle: IdleMeter | None  # None: there is no GPU to watch
    poison: Lane | None  # for tests: fills freed device memory with NaN
    files: Files | None  # that have frozen weights; None: all weights have a home in RAM

    @property
    def units(self) -> list[Unit]:
        return self.partition.units

    def look(self) -> None:
        """Tell the recorder what lanes have done and how long compute has waited so far, and how long the GPU was
        idle."""
        self.emit()
        if self.idle is not None:
            self.idle.watch(torch.cuda.current_stream(self.device).cuda_stream)
            self.idle.emit(self.recorder)

    def emit(self) -> None:
        """Tell the recorder what lanes have done and how long compute has waited so far."""
        self.waits.emit()
        self.lanes.emit()
        if self.files is not None:
            self.files.emit()

    def arena(self, capacity: int | Sequence[int], tag: Tag) -> HostArena:
        """Home memory that lanes can copy; the caller must register its end."""
        arena = HostArena(capacity, ledger=self.ledger, tag=tag, page_lock=self.page_lock)
        if not self.can_copy(arena):
            arena.close()
            raise cannot_lock(arena.capacity_bytes, tag, self.ledger, "stream less with only= or leave=")
        return arena

    def can_copy(self, arena: HostArena) -> bool:
        """Whether lanes can copy that memory: it is page-locked, or there is a page-locked ring."""
        return arena.pinned or self.page_lock is None or self.lanes.ring is not None


def outline(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    settings: Settings,
    trial: Trial = Trial(),  # noqa: B008
) -> Outline:
    """Raise for budgets or settings that do not allow the model. Needs sizes only, no memory."""
    device = usable_device(settings.device)
    ledger = open_ledger(
        device,
        vram=settings.vram,
        ram=settings.ram,
        disk=settings.directories,
        disk_limit=settings.disk_limit,
        returning_bytes=ram_of(model.parameters()),
    )
    limit = ledger.budgets[Tier.DEVICE].limit_bytes
    spans = spans_of(model.parameters(), trained_too=optimizer is None) if settings.directories else {}
    cutting = _Cutting(model, settings, by_rows=optimizer is None, spans=spans)
    cut = cutting.cut(limit, ledger.free_bytes(Tier.DEVICE))
    kept = sum(kept_bytes(unit, wide=True) for unit in cut.partition.units[: trial.kept])
    if kept:
        cut = cutting.cut(limit, ledger.free_bytes(Tier.DEVICE) - kept)
    units = cut.partition.units
    if not units:
        out = len(cut.partition.left)
        left = f": all {out} are left out, by only= or leave=, or for their kind" if out else ""
        raise SettingError(f"The model has no parameters to stream{left}.")
    meter = trial.meter or device_meter_for(device)
    placement = place(
        cut,
        ledger,
        measured=meter is not None,
        reserve_bytes=kept,
        enough=lambda: kept + cutting.enough_vram(limit),
    )
    adam = optimizer is not None and runs_as_adam(optimizer, units, settings.master_dtype is not None)
    if optimizer is not None and not adam and settings.step == "backward" and not is_separable(optimizer):
        raise SettingError(
            f'step="backward" needs an optimizer of torch.optim that updates each parameter by itself; '
            f'{type(optimizer).__name__} is not known to do so. Use step="forward".'
        )
    in_backward = settings.step_mode.mode == "backward"
    if settings.directories and optimizer is not None and not adam:
        say_once(
            f"disk= holds the states of Adam and AdamW. Those of {type(optimizer).__name__} lie in RAM, where torch "
            "makes them."
        )
    homes = homes_for(
        units,
        ledger,
        optimizer=optimizer is not None,
        adam=adam,
        in_backward=in_backward,
        disk=bool(settings.directories),
        disk_part=trial.disk_part,
        weights_part=trial.weights_part,
    )
    check_disk(homes.on_disk, ledger)
    for unit in homes.in_files.units:
        unit.stay_in_files()
    for index in homes.on_disk.weights:
        units[index].lie_in_scratch()
    return Outline(
        device=device,
        ledger=ledger,
        partition=cut.partition,
        division=cut.division,
        placement=placement,
        homes=homes,
        directories=settings.directories,
        meter=meter,
    )


def open_ground(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, settings: Settings, trial: Trial, endings: Endings
) -> tuple[Ground, list[torch.Tensor]]:
    """Open the ground and home memory, and move the weights of all units there."""
    endings.last(handlers.begin(endings))
    outlined = outline(model, optimizer, settings, trial)
    device, ledger, homes, units = outlined.device, outlined.ledger, outlined.homes, outlined.partition.units
    endings.last(expand_segments(device))  # the pool's memory returns to the driver
    page_lock = page_lock_for(device)
    recorder = Recorder()
    moving = Moving(units)
    arena = HostArena(
        homes.parameters,
        ledger=ledger,
        tag=Tag.PARAMETERS,
        page_lock=page_lock,
        fill_later=True,
        returning_bytes=moving.held_bytes,
    )
    endings.before_others(arena.close)
    places = [arena.allocate(unit.home_bytes) for unit in units]
    images = [arena.at(there) for there in places]

    def move(region: int) -> None:
        for unit, there, image in zip(units, places, images, strict=True):
            if there.region == region and unit.index not in homes.on_disk.weights:
                moving.move(unit, image)

    arena.fill(move)
    ring = _open_ring(homes.in_files, ledger, page_lock)
    if ring is not None:
        endings.before_others(ring.close)
    copied = arena if ring is None or not arena.pinned else ring  # one of both that could not be locked, if any
    lanes = open_lanes(
        device, home=copied, ledger=ledger, sink=recorder, delay=trial.delay, from_files=ring is not None
    )
    endings.before_others(lanes.close)
    board = Flags(homes.flags, ledger=ledger, device=device, page_lock=page_lock)
    endings.before_others(board.close)
    scratch = _open_scratch(outlined, board, trial, endings) if homes.on_disk.weights else None
    for index in homes.on_disk.weights:
        moving.move(units[index], images[index])
    moving.say_what_is_held()
    files = None if ring is None else _open_files(outlined, ring, board, scratch, trial, endings, recorder)
    poison = lanes.store if trial.poison else None
    pool = DevicePool(device, ledger=ledger, tag=Tag.PARAMETERS, lanes=lanes, sink=recorder, poison=poison)
    endings.before_others(pool.close)
    pool.grow(outlined.placement.pool_bytes)
    idle = idle_meter_for(device)
    if idle is not None:
        endings.before_others(idle.close)
    ground = Ground(
        **vars(outlined),
        endings=endings,
        page_lock=page_lock,
        recorder=recorder,
        lanes=lanes,
        board=board,
        pool=pool,
        waits=WaitMeter(lanes.compute, recorder),
        idle=idle,
        poison=poison,
        files=files,
    )
    return ground, images


def _open_ring(in_files: InFiles, ledger: Ledger, page_lock: PageLock | None) -> HostArena | None:
    """RAM through which weights come from files; None if all have a home in RAM."""
    if not in_files.slots:
        return None
    size = round_up(in_files.ring_bytes, PAGE)
    return HostArena([size], ledger=ledger, tag=Tag.STAGING, page_lock=page_lock)


def _open_scratch(outlined: Outline, board: Flags, trial: Trial, endings: Endings) -> ScratchWeights:
    """Open scratch files for trained weights. Their flags come before those of the ring, at the board's end."""
    on_disk, directories, files = outlined.homes.on_disk, outlined.directories, list[ScratchFile]()
    sizes = list(on_disk.weights.values())
    for number, directory in enumerate(directories[: len(sizes)]):
        size = sum(sizes[number :: len(directories)])
        calls = trial.calls or SystemCalls()
        files.append(create_scratch(directory, size, ledger=outlined.ledger, tag=Tag.PARAMETERS, calls=calls))
        endings.before_others(files[-1].close)
    layouts = {index: on_disk.layouts[index] for index in on_disk.weights}
    end = len(board) - outlined.homes.in_files.flags
    flags = iter([board[index] for index in range(end - sum(len(la.chunks) for la in layouts.values()), end)])
    scratch = ScratchWeights(outlined.partition.units, layouts, files=files, flags=flags)
    endings.before_others(scratch.forget)
    return scratch


def _open_files(
    outlined: Outline,
    arena: HostArena,
    board: Flags,
    scratch: ScratchWeights | None,
    trial: Trial,
    endings: Endings,
    sink: Sink,
) -> Files:
    """Open the files that have weights, and the threads that read them."""
    in_files, calls = outlined.homes.in_files, trial.calls or SystemCalls()
    mine = {unit.index: unit for unit in in_files.units}
    mine.update((index, outlined.partition.units[index]) for index in outlined.homes.on_disk.weights)
    opened: dict[str, WeightFile] = {}

    def open_file(place: Place) -> WeightFile:
        assert place.span is not None
        if place.span.path not in opened:
            opened[place.span.path] = file = WeightFile(place.span)
            endings.after_others(file.close)
        return opened[place.span.path]

    worker = open_file_worker(_READING_THREADS, arena.tensor((0,), torch.uint8), read=calls.pread)
    endings.before_others(worker.close)
    return Files(
        list(mine.values()),
        open_file,
        scratch,
        ring=arena.tensor((in_files.ring_bytes,), torch.uint8, alignment=PAGE),
        slot_bytes=in_files.slot_bytes,
        flags=[board[len(board) - in_files.flags + index] for index in range(in_files.flags)],
        worker=worker,
        sink=sink,
    )


@dataclass(frozen=True)
class _Cutting:
    """How a model is cut, for any limit."""

    model: nn.Module
    settings: Settings
    by_rows: bool  # whether fused experts come by rows
    spans: Mapping[int, Span]  # where files have parameters that may remain there, by id

    def parted(self, unit_bytes: int, *, by_rows: bool, small: bool = False) -> Partition:
        given = self.settings
        return partition(
            self.model,
            unit_limit_bytes=unit_bytes,
            only=given.only,
            leave=given.leave,
            small=small,
            by_rows=by_rows,
            spans=self.spans,
        )

    def cut(self, limit_bytes: int, free_bytes: int) -> Cut:
        """The largest units that fit in ``free_bytes``; if none do, those that need the least."""
        ways, cuts = [(parts, self.by_rows) for parts in UNITS_IN_BUDGET], list[Cut]()
        if self.by_rows:  # experts beside their block need a little more than as a part of it
            ways.append((UNITS_IN_BUDGET[-1], False))
        for parts, by_rows in ways:
            parted = functools.partial(self.parted, by_rows=by_rows)
            cuts.append(room_for(division(limit_bytes, parts), parted, free_bytes))
            if cuts[-1].least_bytes <= free_bytes:
                return cuts[-1]
        return min(cuts, key=lambda cut: cut.least_bytes)

    def enough_vram(self, limit_bytes: int) -> int:
        """A limit through which the model can be streamed, as an error names it, if ``limit_bytes`` is too small. A
        larger limit makes larger units, which need more."""
        while True:
            least = self.cut(limit_bytes, limit_bytes).least_bytes
            if least <= limit_bytes:
                return limit_bytes
            limit_bytes = parse_bytes(as_setting(least))
