"""Opens the parts of a session, each on those before it: the ground, the streams, the attachment, the optimizer.

Each part registers at once how it ends. If opening fails, the parts opened so far end, and model and optimizer are
ordinary again.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..checkpoint.state.session_state import Durable
from ..checkpoint.state.snapshot import Still
from ..core.endings import Endings
from ..core.errors import SettingError
from ..core.tags import Tag
from ..memory.disk.calls import SystemCalls
from ..memory.disk.scratch import ScratchFile, create_scratch
from ..memory.host.arena import PAGE, HostArena
from ..memory.lanes.flags import Flag
from ..memory.pools.device import bytes_for_graph
from ..native.worker.files import open_file_worker
from ..native.worker.jobs import UpdateMeter
from ..native.worker.open import open_worker
from ..planner.inference import Inference
from ..planner.online import Tuning
from ..streams.activations.plans.room import Surroundings
from ..streams.activations.runner import Saving
from ..streams.bridge.ranks import refuse_ranks, refuse_wrapped
from ..streams.gradients.home import GradHome
from ..streams.gradients.memory import GradMemory, GradRing
from ..streams.gradients.stream import GradientStream
from ..streams.home.meta import Exchange, give_substance
from ..streams.home.parameter import plain
from ..streams.model.access import UserAccess
from ..streams.model.attach import Attachment
from ..streams.model.schedule import Schedule
from ..streams.optimizer.adam.ahead import spare_bytes
from ..streams.optimizer.adam.device_states import kept_bytes
from ..streams.optimizer.adam.disk_home import DiskHome, file_of
from ..streams.optimizer.adam.home import AdamHome
from ..streams.optimizer.adam.state_home import RamHome
from ..streams.optimizer.adam.stream import AdamStream
from ..streams.optimizer.stream import OptimizerStream
from ..streams.optimizer.torch_step import TorchStep, is_whole
from ..streams.optimizer.updater import MASTER
from ..streams.settings import Settings, Trial
from ..streams.units.sizes import FILE_THREADS
from ..streams.weights.graph_twins import GraphTwins
from ..streams.weights.residency import Residence, Residency
from ..streams.weights.stream import ParameterStream
from .resources import Ground, open_ground, outline

# Keeps what is attached to a model as long as its parameters are streamed, even if user code drops the session.
_TIED: weakref.WeakKeyDictionary[nn.Module, weakref.ref[UserAccess]] = weakref.WeakKeyDictionary()
_TAKEN: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[OptimizerStream]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class Parts:
    """All parts of a session."""

    ground: Ground
    tuning: Tuning
    schedule: Schedule
    parameters: ParameterStream
    access: UserAccess
    optimizer: OptimizerStream | None
    inference: Inference | None  # None: an optimizer trains
    durable: Durable

    @property
    def adam(self) -> AdamStream | None:
        """The updater if it is our own Adam, for a look at its homes and at its states on the device."""
        return updater if isinstance(updater := self.schedule.updater, AdamStream) else None


def open_parts(model: nn.Module, optimizer: torch.optim.Optimizer | None, settings: Settings, trial: Trial) -> Parts:
    """Stream ``model`` in place, and take over ``optimizer``; ``ground.endings`` make both ordinary again."""
    refuse_ranks()
    refuse_wrapped(model)
    earlier = _TIED.get(model)
    if earlier is not None and (access := earlier()) is not None and not access.closed:
        raise SettingError("This model is being streamed already. Close that session first.")
    if optimizer is not None:
        _check_optimizer(model, optimizer)
    endings = Endings()
    exchange = give_substance(model, optimizer)
    try:
        parts = _open(model, optimizer, settings, trial, endings, exchange)
    except BaseException:
        try:
            endings.run()
        finally:
            exchange.undo()
        raise
    _TIED[model] = weakref.ref(parts.access)
    if optimizer is not None and parts.optimizer is not None:
        _TAKEN[optimizer] = weakref.ref(parts.optimizer)
    return parts


def check_budgets(model: nn.Module, optimizer: torch.optim.Optimizer, settings: Settings) -> None:
    """Raise for want of memory as `open_parts` would, without taking any. The model may be on the meta device."""
    exchange = give_substance(model, optimizer)
    try:
        outline(model, optimizer, settings)
    finally:
        exchange.undo()


def _open(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    settings: Settings,
    trial: Trial,
    endings: Endings,
    exchange: Exchange,
) -> Parts:
    ground, images = open_ground(model, optimizer, settings, trial, endings)
    flags = (ground.board[index] for index in range(len(ground.board)))
    tuning = Tuning(
        ground.meter,
        ledger=ground.ledger,
        pool=ground.pool,
        placement=ground.placement,
        partition=ground.partition,
        recorder=ground.recorder,
        mode=settings.step,
        look=ground.look,
    )
    parameters, gradients = _open_streams(ground, images, flags, tuning, serial=settings.step == "serial")
    inference = None if optimizer is not None else Inference(tuning, ground.partition, parameters, gradients)
    schedule = Schedule(
        parameters,
        gradients,
        lanes=ground.lanes,
        waits=ground.waits,
        snapshot=Still(ground.ledger),
        tuner=tuning,
        witness=inference,
        serial=settings.step == "serial",
    )
    attachment = Attachment(model, ground.partition.entries, ground.units, ground.device, schedule)
    endings.before_others(attachment.detach)
    attachment.attach()
    access = attachment.access
    tuning.note_foreign_memory(model)
    _arrange(model, ground, tuning, schedule, settings.activations, trial, stepped=optimizer is not None)
    endings.before_others(schedule.drain)
    for parameter in ground.partition.left:
        parameter.data = exchange.values(parameter, ground.device)
    schedule.unwritten = exchange.unwritten(model, ground.units, ground.partition.left, access.found_written)
    if optimizer is not None:
        gradients.prepare()
        masters, mode = settings.master_dtype is not None, settings.step_mode.mode
        if ground.homes.adam:
            schedule.updater = _open_adam(ground, images, flags, tuning, schedule, trial, mode)
        else:
            schedule.updater = TorchStep(optimizer, ground.units, parameters, masters=masters)
        schedule.optimizer = taken = OptimizerStream(
            optimizer, access, ground.units, schedule, schedule.user_gradients, masters=masters, mode=mode
        )
        endings.before_others(taken.release)
        endings.after_others(schedule.forget)
    endings.before_others(schedule.settle)
    return Parts(
        ground=ground,
        tuning=tuning,
        schedule=schedule,
        parameters=parameters,
        access=access,
        optimizer=schedule.optimizer,
        inference=inference,
        durable=Durable(access),
    )


def _open_streams(
    ground: Ground, images: list[torch.Tensor], flags: Iterator[Flag], tuning: Tuning, *, serial: bool
) -> tuple[ParameterStream, GradientStream]:
    residency = Residency(
        [Residence(unit, image) for unit, image in zip(ground.units, images, strict=True)],
        pool=ground.pool,
        ledger=ground.ledger,
        twins=GraphTwins(bytes_for_graph(0, ground.device)),
        enlarge=tuning.enlarge,
    )
    parameters = ParameterStream(residency, lanes=ground.lanes, sink=ground.recorder, serial=serial, files=ground.files)
    memory = _open_memory(ground)
    gradients = GradientStream(
        [GradHome(r.unit, next(flags), ground.lanes, r.gate, memory) for r in residency.residences],
        lanes=ground.lanes,
        residency=residency,
        waits=ground.waits,
        memory=memory,
        bucket_bytes=ground.placement.bucket_bytes,
        serial=serial,
        poison=ground.poison,
    )
    ground.endings.after_others(residency.forget)
    ground.endings.after_others(gradients.forget)
    return parameters, gradients


def _open_memory(ground: Ground) -> GradMemory:
    """RAM for gradients, taken when it is needed; ends late: the model takes over its contents."""

    def take(capacity: int | Sequence[int]) -> HostArena:
        arena = ground.arena(capacity, Tag.GRADIENTS)
        ground.endings.after_others(arena.close)
        return arena

    if ground.homes.ring_bytes:
        return GradRing(ground.units, take, ground.homes.ring_bytes)
    return GradMemory(ground.units, take, ground.homes.gradients)


def _arrange(
    model: nn.Module, ground: Ground, tuning: Tuning, schedule: Schedule, mode: str, trial: Trial, *, stepped: bool
) -> None:
    """Handle activations by ``mode``. ``stepped``: the session has an optimizer."""
    # The device is RAM as well: "auto" would keep all.
    no_limit = ground.meter is None and trial.activation_room is None
    if mode == "keep" or (mode == "auto" and no_limit):
        return
    around = Surroundings(
        device=ground.device,
        lanes=ground.lanes,
        ledger=ground.ledger,
        page_lock=ground.page_lock,
        waits=ground.waits,
        lock=schedule.lock,
        rates=tuning.free_rates,
        meter=tuning.meter,
        peak=tuning.peak,
        limit_bytes=tuning.limit_bytes,
        foreign_bytes=tuning.foreign_bytes,
        can_recompute=tuning.can_recompute,
        weights=ground.pool,
        is_streamed=lambda tensor: schedule.weights.residence_of(tensor) is not None,
        note_of=schedule.weights.pack,
        steps=(lambda: tuning.steps) if stepped else None,
        is_settled=(lambda: tuning.is_settled) if stepped else (lambda: True),
    )
    left, modules = ground.partition.left, [weakref.ref(module) for module in model.modules()]

    def on_device() -> Iterator[torch.Tensor]:  # a walk through the model takes long
        yield from left
        for reference in modules:
            if (module := reference()) is not None:
                yield from (buffer for buffer in module._buffers.values() if buffer is not None)

    schedule.saving = Saving(model, mode, around, on_device, trial)
    ground.endings.before_others(schedule.saving.close)


def _check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise for an optimizer that cannot be taken over, before anything is opened. It may have other parameters too."""
    if not is_whole(optimizer):
        inner = next((name for name, value in getattr(optimizer, "__dict__", {}).items() if is_whole(value)), None)
        raise SettingError(
            f"{type(optimizer).__name__} is not a torch.optim.Optimizer, or did not call its __init__. If it wraps "
            f"another optimizer, pass that one to storm.stream{f' (optimizer.{inner})' if inner else ''}, and go on "
            "calling the wrapper."
        )
    earlier = _TAKEN.get(optimizer)
    if earlier is not None and (taken := earlier()) is not None and not taken.released:
        raise SettingError(
            "This optimizer belongs to a session already. Close that session first; to train several models with one "
            "optimizer, stream them together: storm.stream(nn.ModuleList([...]), optimizer)."
        )
    known = {id(parameter) for parameter in model.parameters()}
    if not any(id(p) in known for group in optimizer.param_groups for p in group["params"]):
        raise SettingError("The optimizer holds no parameter of the model. Build it from model.parameters().")


def _open_adam(
    ground: Ground,
    images: list[torch.Tensor],
    flags: Iterator[Flag],
    tuning: Tuning,
    schedule: Schedule,
    trial: Trial,
    mode: str,
) -> AdamStream:
    units, endings = ground.units, ground.endings
    lock, sizes = ground.page_lock, ground.homes.states
    # Locked in the background: no lane needs states in the first steps.
    states = HostArena(sizes, ledger=ground.ledger, tag=Tag.OPTIMIZER, page_lock=lock, lock_behind=True)
    endings.before_others(states.close)
    factors = ground.arena(ground.homes.factors_bytes, Tag.STAGING)
    endings.before_others(factors.close)
    disk = _open_disk(ground, states, flags, trial) if ground.homes.on_disk.layouts else None
    state_home = disk or RamHome(units, states)
    residences = schedule.residency.residences
    homes = [AdamHome(r.unit, [next(flags) for _ in r.unit.trained], r.gate) for r in residences]
    for item in (item for unit in units for item in unit.trained):
        if item.is_split and item.dtype == torch.float16:
            state_home.shown(item)[MASTER].copy_(plain(item.parameter).detach())
            state_home.written(item)
    worker = open_worker()
    endings.before_others(worker.close)

    def take(sizes: list[int]) -> HostArena:
        arena = HostArena(sizes, ledger=ground.ledger, tag=Tag.OPTIMIZER, page_lock=lock, lock_behind=True)
        endings.after_others(arena.close)  # states may be there until all are shown
        return arena

    adam = AdamStream(
        homes,
        state_home,
        images=images,
        worker=worker,
        meter=UpdateMeter(worker, ground.recorder),
        board=ground.board,
        lanes=ground.lanes,
        schedule=schedule,
        waits=ground.waits,
        factors=factors.tensor((64, 16), torch.float32)[:, :1],
        take=take,
        disk=disk,
        in_backward_mode=mode == "backward",
        poison=ground.poison,
    )
    endings.after_others(adam.forget)
    if trial.kept or trial.device_share:
        states.settle()
    if trial.kept:
        ground.pool.grow(sum(kept_bytes(unit, wide=True) for unit in units[: trial.kept]))
        adam.there.keep([unit.index for unit in units[: trial.kept]], wide=True)

    if trial.ahead:
        adam.spare(math.inf, sum(PAGE * 4 + sum(spare_bytes(unit)) for unit in units))

    def can_travel() -> bool | None:
        if not states.settled:
            return None
        states.say_if_refused()
        return ground.can_copy(states)

    tuning.take_adam(adam, worker, can_travel=can_travel, fixed_share=trial.device_share)
    return adam


def _open_disk(ground: Ground, states: HostArena, flags: Iterator[Flag], trial: Trial) -> DiskHome:
    """Open scratch files, and the threads that update states there."""
    on_disk, calls, directories = ground.homes.on_disk, trial.calls or SystemCalls(), ground.directories
    sizes = [0] * len(directories)
    for number, layout in enumerate(on_disk.layouts.values()):
        for region, size in enumerate(layout.regions):
            sizes[file_of(number, region, len(sizes))] += size
    files = list[ScratchFile]()
    for directory, size in zip(directories, sizes, strict=True):
        files.append(create_scratch(directory, size, ledger=ground.ledger, tag=Tag.OPTIMIZER, calls=calls))
        ground.endings.after_others(files[-1].close)  # states are read there until all are shown
    memory = HostArena(on_disk.ram_bytes, ledger=ground.ledger, tag=Tag.STAGING)
    ground.endings.before_others(memory.close)
    mine = memory.tensor((FILE_THREADS * on_disk.thread_bytes,), torch.uint8, alignment=PAGE)
    worker = open_file_worker(FILE_THREADS, mine, read=calls.pread, write=calls.pwrite)
    ground.endings.before_others(worker.close)
    return DiskHome(
        ground.units,
        states,
        on_disk.layouts,
        files=files,
        worker=worker,
        board=ground.board,
        flags=flags,
        sink=ground.recorder,
        weights=None if ground.files is None else ground.files.scratch,
    )
