"""`stream` and `Session`: the one line that a user adds, and what it gives back."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from .checkpoint.saver import Saver
from .core.errors import SettingError, StormError
from .core.tags import Tag, Tier
from .memory.flags import Flags
from .memory.host import HostArena, capacity_for
from .memory.lane import Lane
from .memory.lanes import open_lanes
from .memory.ledger import open_ledger
from .memory.page_lock import page_lock_for
from .memory.pool import DevicePool
from .memory.wait_meter import WaitMeter
from .native.worker import open_worker
from .observe.recorder import Recorder
from .observe.report import Report, make_report
from .streams.adam import AdamStream
from .streams.adam_home import AdamHome
from .streams.arrangement import Surroundings, open_saving
from .streams.attach import Attachment
from .streams.device_states import kept_bytes
from .streams.durable import Durable
from .streams.grad_home import GradHome
from .streams.gradients import GradientStream
from .streams.meta import give_substance
from .streams.optimizer import OptimizerStream, runs_as_adam
from .streams.parameters import ParameterStream, Residence
from .streams.partition import Partition, partition
from .streams.placement import Placement, place
from .streams.saving import Saving
from .streams.settings import Settings, Trial
from .streams.still import Still
from .streams.torch_step import is_separable
from .streams.unit import Unit
from .tuning import Tuning

_STREAMED: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Session]] = weakref.WeakKeyDictionary()


def stream(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    vram: object = "auto",
    ram: object = "auto",
    disk: Path | str | None = None,
    device: torch.device | str = "auto",
    activations: str = "auto",
    step: str = "auto",
    master_dtype: torch.dtype | None = torch.float32,
    only: Sequence[str] | None = None,
    leave: Sequence[str] = (),
) -> Session:
    """Stream ``model`` through ``vram`` of device memory, in place; the training loop stays as it is.

    ``vram``, ``ram``: hard limits, "8GiB", a number of bytes, or "auto". ``device``: where to compute; "auto" is the
    first GPU, or the CPU. ``step``: when the optimizer runs. "forward" (what "auto" takes) is exact with everything:
    ``step()`` returns at once and the next forward runs behind the update. "backward" updates each unit as its
    gradients arrive, and refuses clipping and accumulation. "serial" does one thing at a time, for debugging; the
    numbers are the same. ``master_dtype``: bf16 and fp16 models are updated with fp32 masters, or with None in their
    own dtype. ``only`` and ``leave`` name modules to stream or to leave on the device as they are.

    Without an optimizer, for inference or for an optimizer of your own. ``close()`` makes the model ordinary again.
    """
    settings = Settings(
        vram=vram,
        ram=ram,
        disk=disk,
        device=device,
        activations=activations,
        step=step,
        master_dtype=master_dtype,
        only=only,
        leave=leave,
    )
    return Session(model, optimizer, settings)


class Session:
    """A model that is being streamed. Use it in a ``with`` statement, or ``close`` it."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        settings: Settings,
        *,
        trial: Trial = Trial(),  # noqa: B008
    ) -> None:
        self._closed = False
        earlier = _STREAMED.get(model)
        if earlier is not None and (open_one := earlier()) is not None and not open_one._closed:
            raise SettingError("This model is being streamed already. Close that session first.")
        self._started_s = time.perf_counter()
        self._model, self._settings = model, settings
        self._endings: list[Any] = []
        self.saving: Saving | None = None
        self.device = _device(settings.device)
        self.ledger = open_ledger(self.device, vram=settings.vram, ram=settings.ram)
        self._serial = settings.step == "serial"
        try:
            self._open(model, optimizer, settings, trial)
        except BaseException:
            self._end()
            raise
        _STREAMED[model] = weakref.ref(self)
        self.setup_s = time.perf_counter() - self._started_s

    def _open(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, settings: Settings, trial: Trial
    ) -> None:
        limit = self.ledger.budgets[Tier.DEVICE].limit_bytes
        give_substance(model, optimizer)
        found = partition(
            model,
            unit_limit_bytes=limit // 6,
            only=None if settings.only is None else list(settings.only),
            leave=list(settings.leave),
        )
        if not found.units:
            raise SettingError("The model has no parameters to stream.")
        self._partition = found
        units = self.units = found.units
        trains = any(unit.trained for unit in units)
        kept = sum(kept_bytes(unit, wide=True) for unit in units[: trial.kept])
        self.placement: Placement = place(found, self.device, self.ledger, training=trains, reserve_bytes=kept)
        lock = page_lock_for(self.device)
        self.recorder = Recorder()
        self._page_lock = lock
        arena = HostArena(
            capacity_for(unit.image_bytes for unit in units), ledger=self.ledger, tag=Tag.PARAMETERS, page_lock=lock
        )
        self._endings.append(arena.close)
        images = [arena.tensor((unit.image_bytes,), torch.uint8) for unit in units]
        self._lanes = lanes = open_lanes(
            self.device, home=arena, ledger=self.ledger, sink=self.recorder, delay=trial.delay
        )
        self._endings.append(lanes.close)
        flag_count = sum(1 + len(unit.trained) for unit in units)
        self._board = board = Flags(flag_count, ledger=self.ledger, device=self.device, page_lock=lock)
        self._endings.append(board.close)
        flags = iter(range(flag_count))
        self._pool = DevicePool(
            self.device,
            ledger=self.ledger,
            tag=Tag.PARAMETERS,
            compute=lanes.compute,
            poison=lanes.store if trial.poison else None,
        )
        self._endings.append(self._pool.close)
        self._pool.grow(self.placement.pool_bytes)
        self._tuning = Tuning(
            self.device,
            ledger=self.ledger,
            pool=self._pool,
            placement=self.placement,
            partition=found,
            recorder=self.recorder,
            mode=settings.step,
        )
        self._waits = waits = WaitMeter(lanes.compute, self.recorder)
        self._parameters = ParameterStream(
            [Residence(unit, image) for unit, image in zip(units, images, strict=True)],
            lanes=lanes,
            pool=self._pool,
            ledger=self.ledger,
            waits=waits,
            gate=self._gate,
            enlarge=self._tuning.enlarge,
            serial=self._serial,
        )
        self._gradients = GradientStream(
            [GradHome(unit, board[next(flags)]) for unit in units],
            lanes=lanes,
            parameters=self._parameters,
            waits=waits,
            gate=self._gate,
            make_own=self._make_own_grads,
            make_wide=self._make_wide_grads,
            serial=self._serial,
            poison=lanes.store if trial.poison else None,
        )
        self._attachment = Attachment(
            model,
            found.entries,
            units,
            device=self.device,
            parameters=self._parameters,
            gradients=self._gradients,
        )
        self._optimizer: OptimizerStream | None = None
        self._adam: AdamStream | None = None
        self._endings.append(self._attachment.detach)
        self._attachment.attach(images)  # before the states are allocated: the model's own memory is free by then
        self._tuning.note_foreign_memory(model)
        free = self.device.type == "cpu" and trial.activation_room is None  # RAM on either side: "auto" would keep all
        if settings.activations != "keep" and not (settings.activations == "auto" and free):
            self._open_saving(model, found, settings.activations, trial)
        self._endings.append(self._drain)
        for parameter in found.left:
            parameter.data = parameter.data.to(self.device)
        if optimizer is not None:
            self._take_over(optimizer, found, images, flags, settings, trial)
        self._saver = self._open_saver(model)

    def _open_saver(self, model: nn.Module) -> Saver:
        self._attachment.durable = durable = Durable(
            units=self.units,
            parameters=self._parameters,
            gradients=self._gradients,
            attachment=self._attachment,
            optimizer=self._optimizer,
            adam=self._adam,
            still=Still(self.ledger),
            drain=self._drain,
        )
        return Saver(model, durable, lambda: 0 if self._optimizer is None else self._optimizer.steps)

    def _open_saving(self, model: nn.Module, found: Partition, mode: str, trial: Trial) -> None:
        around = Surroundings(
            device=self.device,
            lanes=self._lanes,
            ledger=self.ledger,
            page_lock=self._page_lock,
            waits=self._waits,
            lock=self._parameters.lock,
            rates=self._tuning.free_rates,
            peak=self._tuning.peak,
            limit_bytes=self._tuning.limit_bytes,
            foreign_bytes=self._tuning.foreign_bytes,
            can_recompute=self._tuning.can_recompute,
        )
        self.saving, end = open_saving(model, mode, around, lambda: [*model.buffers(), *found.left], trial)
        self._attachment.saving = saving = self.saving
        self._tuning.activation_wish = lambda: saving.wish_bytes
        self._endings.append(end)

    def _take_over(
        self,
        optimizer: torch.optim.Optimizer,
        found: Partition,
        images: list[torch.Tensor],
        flags: Iterable[int],
        settings: Settings,
        trial: Trial,
    ) -> None:
        units = found.units
        self._gradients.prepare()
        known = {id(parameter) for parameter in self._model.parameters()}
        foreign = sum(id(p) not in known for group in optimizer.param_groups for p in group["params"])
        if foreign:
            raise SettingError(
                f"The optimizer holds {foreign} parameters that the model does not. Build it from model.parameters()."
            )
        masters = settings.master_dtype is not None
        mode = "forward" if settings.step == "auto" else settings.step
        adam = None
        if runs_as_adam(optimizer, units, masters):
            adam = self._open_adam(units, images, iter(flags), trial)
        elif mode == "backward" and not is_separable(optimizer):
            raise SettingError(
                f'step="backward" needs an optimizer of torch.optim that updates each parameter by itself; '
                f'{type(optimizer).__name__} is not known to. Use step="forward".'
            )
        self._optimizer = OptimizerStream(
            optimizer,
            access=self._attachment,
            units=units,
            left=found.left,
            parameters=self._parameters,
            gradients=self._gradients,
            adam=adam,
            masters=masters,
            mode=mode,
        )
        self._optimizer.on_step = lambda: self._tuning.after_step(self._gradients)
        self._attachment.optimizer = self._optimizer
        self._gradients.join_readers = self._optimizer.join
        self._gradients.before_adding = self._optimizer.apply_factor
        self._endings.append(self._optimizer.release)

    def _open_adam(self, units: list[Unit], images: list[torch.Tensor], flags: Any, trial: Trial) -> AdamStream:
        sizes = [size for unit in units for size in (unit.state_count * 4, unit.state_count * 4, unit.master_bytes)]
        states = HostArena(capacity_for(sizes), ledger=self.ledger, tag=Tag.OPTIMIZER, page_lock=self._page_lock)
        self._endings.append(states.close)
        factors = HostArena(64 * 64, ledger=self.ledger, tag=Tag.STAGING, page_lock=self._page_lock)
        self._endings.append(factors.close)
        homes = []
        for unit in units:
            exp_avg, exp_avg_sq = (states.tensor((unit.state_count,), torch.float32) for _ in range(2))
            home = AdamHome(
                unit,
                exp_avg,
                exp_avg_sq,
                states.tensor((unit.master_bytes,), torch.uint8),
                [self._board[next(flags)] for _ in unit.trained],
            )
            for item in unit.trained:
                master = home.master(item)
                if master is not None and item.dtype == torch.float16:
                    master.copy_(item.in_image(images[unit.index]))
            homes.append(home)
        self._worker = worker = open_worker()
        self._endings.append(worker.close)
        adam = AdamStream(
            homes,
            images=images,
            worker=worker,
            board=self._board,
            lanes=self._lanes,
            parameters=self._parameters,
            gradients=self._gradients,
            waits=self._waits,
            factors=factors.tensor((64, 16), torch.float32)[:, :1],
            poison=self._lanes.store if trial.poison else None,
        )
        self._adam = adam
        if trial.kept:
            self._pool.grow(sum(kept_bytes(unit, wide=True) for unit in units[: trial.kept]))
            adam.there.keep([unit.index for unit in units[: trial.kept]], wide=True)
        self._tuning.take_adam(adam, worker, fixed_share=trial.device_share)
        self._parameters.pending = adam.pending
        self._parameters.before_use = adam.before_use
        self._parameters.prepare = adam.prepare
        return adam

    # --- what users call

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip all gradients of the model by their total norm, which is returned; waits for nothing where it can.

        The gradients are scaled as the optimizer uses them, or as soon as somebody looks at them.
        """
        self._check_open()
        parameters = list(self._model.parameters())
        if norm_type == 2.0 and self._optimizer is not None and not error_if_nonfinite:
            total = self._optimizer.clip_grad_norm_(parameters, max_norm)
            if total is not None:
                return total
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)

    def synchronize(self) -> None:
        """Block until everything that was asked for is done: updates, loads, stores, a save in the background."""
        self._check_open()
        self._drain()
        self._saver.finish()

    def save(
        self,
        directory: Path | str,
        *,
        also: Mapping[str, Any] | None = None,
        files: Callable[[Path], None] | None = None,
        wait: bool = True,
    ) -> None:
        """Write a checkpoint: the model as ``from_pretrained`` opens it, and all that an exact resume needs.

        ``directory`` appears when everything in it is on the disk. ``also``: more to keep, by name: what has a
        ``state_dict`` (scheduler, loader, scaler), or plain data. ``files`` is called with the folder, to put others
        beside the weights. With ``wait=False`` training may go on while it is written; what goes wrong then is raised
        by the next ``save``, ``load``, ``synchronize`` or ``close``. See docs/checkpoints.md.
        """
        self._check_open()
        self._saver.save(directory, also=also, files=files, wait=wait)

    def load(self, directory: Path | str, *, also: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Restore what ``save`` has written, random numbers included; ``also`` gives the objects to fill, by name.

        Returns what was saved as ``also`` and was not asked for here: plain data."""
        self._check_open()
        return self._saver.load(directory, also=also)

    def report(self, *, samples_per_step: int | None = None, tokens_per_step: int | None = None) -> Report:
        """What was measured since the session began, as data; ``print`` it for a table. Waits for nothing."""
        self._waits.emit()
        return make_report(
            self.recorder.snapshot(),
            ledger=self.ledger,
            placement=self.placement,
            pool_bytes=self._pool.capacity_bytes,
            share_reason=self._tuning.share_reason,
            activation_reason=self.saving.reason if self.saving is not None else "",
            units=self.units,
            setup_s=self.setup_s,
            misses=self._parameters.misses,
            loads=self._parameters.loads,
            cpu_busy_s=self._worker.stats().busy_s / self._worker.threads if self._adam is not None else 0.0,
            samples_per_step=samples_per_step,
            tokens_per_step=tokens_per_step,
        )

    def close(self) -> None:
        """Finish what is pending and make model and optimizer ordinary again, in RAM. Safe to call twice."""
        if self._closed:
            return
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # --- inside

    def _gate(self, unit: Unit, lane: Lane) -> None:
        if self._optimizer is not None:
            self._optimizer.gate(unit, lane)

    def _make_own_grads(self) -> list[torch.Tensor]:
        arena = HostArena(
            capacity_for(unit.grad_bytes for unit in self.units),
            ledger=self.ledger,
            tag=Tag.GRADIENTS,
            page_lock=self._page_lock,
        )
        self._endings.insert(0, arena.close)
        return [arena.tensor((unit.grad_bytes,), torch.uint8) for unit in self.units]

    def _make_wide_grads(self, unit: Unit) -> torch.Tensor:
        arena = HostArena(unit.wide_bytes, ledger=self.ledger, tag=Tag.GRADIENTS, page_lock=self._page_lock)
        self._endings.insert(0, arena.close)
        return arena.tensor((unit.wide_bytes,), torch.uint8)

    def _drain(self) -> None:
        if self._optimizer is not None:
            self._optimizer.join_all()
        self._lanes.synchronize()

    def _end(self) -> None:
        """Undo everything in reverse; each part is tried, the first error is raised."""
        self._closed = True
        error: BaseException | None = None
        endings, self._endings = self._endings, []
        order = list(reversed(endings))
        if hasattr(self, "_attachment"):
            order.insert(0, self._before_end)
        if hasattr(self, "_saver"):
            order.insert(0, self._saver.finish)  # before home memory becomes the model's own
        if hasattr(self, "_attachment"):
            order.append(self._forget)
        for ending in order:
            try:
                ending()
            except BaseException as problem:
                error = error or problem
        if error is not None:
            raise error

    def _before_end(self) -> None:
        if self._optimizer is not None:
            self._optimizer.apply_factor()
        self._drain()
        self._parameters.drop_all()

    def _forget(self) -> None:
        self._parameters.forget()
        self._gradients.forget()
        if self._adam is not None:
            self._adam.forget()

    def _check_open(self) -> None:
        if self._closed:
            raise StormError("This session was closed. Call storm.stream again.")


def _device(device: torch.device | str) -> torch.device:
    if device == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        return torch.device(device)
    except RuntimeError:
        raise SettingError(
            f"device={device!r} cannot be meant. Accepted: 'auto', 'cpu', 'cuda', 'cuda:0', ..."
        ) from None
