"""`stream` and `Session`: the one line that a user adds, and the object that it returns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from ..checkpoint.saver import Saver
from ..core.errors import SettingError, StormError
from ..core.events import Span, What
from ..core.plan import Plan
from ..observe.report import Report, make_report
from ..streams.bridge.handlers import inside_step, undisturbed
from ..streams.settings import Settings, Trial
from .build import open_parts
from .in_force import plan_in_force


def stream(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    vram: object = "auto",
    ram: object = "auto",
    disk: object = None,
    disk_limit: object = None,
    device: torch.device | str = "auto",
    activations: str = "auto",
    step: str = "auto",
    master_dtype: torch.dtype | None = torch.float32,
    only: Sequence[str] | None = None,
    leave: Sequence[str] = (),
) -> Session:
    """Stream ``model`` through ``vram`` of device memory, in place; the training loop remains unchanged.

    ``vram``, ``ram``: hard limits, "8GiB", a number of bytes, or "auto". ``disk``: a directory on a fast local disk, or
    several, for optimizer states that ``ram`` has no room for; ``disk_limit``: at most so much of it. ``device``: where
    to compute; "auto" is the first GPU, or the CPU. ``step``: when the optimizer runs. "forward" (the "auto" choice) is
    exact with everything:
    ``step()`` returns at once and the next forward follows the update unit by unit. "backward" updates each unit as its
    gradients arrive, and refuses clipping, accumulation and skipped steps. "serial" does one thing at a time, for
    debugging; the numbers are the same. ``master_dtype``: bf16 and fp16 models are updated with fp32 masters, or with
    None in their own dtype. ``only`` and ``leave`` name modules to stream or to leave on the device unchanged.

    Works without an optimizer, for inference or for an optimizer of your own. ``close()`` makes the model ordinary
    again."""
    if isinstance(optimizer, str):
        raise SettingError(
            f"optimizer={optimizer!r} is a name. Accepted: an optimizer, such as "
            "torch.optim.AdamW(model.parameters(), lr=1e-5), or None."
        )
    settings = Settings(
        vram=vram,
        ram=ram,
        disk=disk,
        disk_limit=disk_limit,
        device=device,
        activations=activations,
        step=step,
        master_dtype=master_dtype,
        only=only,
        leave=leave,
    )
    return Session(model, optimizer, settings)


class Session:
    """A streamed model. Use it in a ``with`` statement, or ``close`` it."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        settings: Settings,
        *,
        trial: Trial = Trial(),  # noqa: B008
    ) -> None:
        started_s = time.perf_counter()
        self._model, self._settings, self._closed = model, settings, False
        self._last_plan: Plan | None = None  # of a session that is closed
        self._keeps_states = True  # in the optimizer, after `close`
        self._parts = parts = open_parts(model, optimizer, settings, trial)
        self.device, self.ledger, self.units = parts.ground.device, parts.ground.ledger, parts.ground.units
        self.saving = parts.schedule.saving
        self._saver = Saver(model, parts.durable, lambda: 0 if parts.optimizer is None else parts.optimizer.steps)
        parts.ground.endings.before_others(self._saver.finish)  # before the model takes over home memory
        ready_s = time.perf_counter()
        self.setup_s = ready_s - started_s
        parts.ground.recorder(Span(What.SETUP, started_s, ready_s))

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip all gradients of the model by their total norm, which is returned; does not wait where it need not.

        The gradients are scaled when the optimizer uses them or user code reads them. Parameters that the optimizer has
        beside the model's are not clipped, and not part of the norm."""
        return self._clip(list(self._model.parameters()), max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def _clip(
        self, parameters: list[nn.Parameter], max_norm: float, norm_type: float, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip these, as torch's function does."""
        self._check_open()
        if norm_type == 2.0 and self._parts.optimizer is not None and not error_if_nonfinite:
            total = self._parts.optimizer.clip_grad_norm_(parameters, max_norm)
            if total is not None:
                return total
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)

    def synchronize(self) -> None:
        """Block until all requested work is done: updates, loads, stores, a save in the background."""
        self._check_open()
        self._parts.schedule.drain()
        self._parts.parameters.check_reads()
        self._saver.finish()

    def save(
        self,
        directory: Path | str,
        *,
        also: Mapping[str, Any] | None = None,
        files: Callable[[Path], None] | None = None,
        wait: bool = True,
        optimizer: bool = True,
    ) -> None:
        """Write a checkpoint: the model as ``from_pretrained`` opens it, and all that an exact resume needs.

        ``directory`` appears when everything in it is on the disk. ``also``: more objects to save, by name: anything
        with a ``state_dict`` (scheduler, loader, scaler), or plain data. ``files`` is called with the folder, to add
        files beside the weights. With ``wait=False`` training may go on during the write; an error is then raised by
        the next ``save``, ``load``, ``synchronize`` or ``close``. ``optimizer=False`` leaves its states out, for a disk
        that is too small for them: a resume is then not exact. See docs/checkpoints.md."""
        self._check_open()
        self._saver.save(directory, also=also, files=files, wait=wait, optimizer=optimizer)

    def load(self, directory: Path | str, *, also: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Restore a checkpoint of ``save``, random numbers included; ``also`` gives the objects to fill, by name.
        Returns the saved ``also`` entries that were not asked for here: plain data."""
        self._check_open()
        return self._saver.load(directory, also=also)

    @property
    @undisturbed
    def plan(self) -> Plan:
        """The plan in force now: what lies where and what runs where, with the reason for each choice. ``print`` it for
        a page. STORM changes it while the model runs, from measurements."""
        return self._last_plan or plan_in_force(self._parts, self._settings)

    @undisturbed
    def report(self, *, samples_per_step: int | None = None, tokens_per_step: int | None = None) -> Report:
        """Measurements since the session began, as data; ``print`` it for a table. Does not wait."""
        parts, ground = self._parts, self._parts.ground
        ground.emit()
        parts.schedule.updater.emit()
        return make_report(
            ground.recorder.snapshot(),
            ledger=ground.ledger,
            plan=self.plan,
            samples_per_step=samples_per_step,
            tokens_per_step=tokens_per_step,
        )

    def close(self) -> None:
        """Finish pending work and make model and optimizer ordinary again, in RAM. Safe to call twice."""
        if not self._closed:
            if self._parts.access.is_interrupted():
                raise inside_step("close the session")
            self._closed, self._last_plan = True, self.plan  # the parts forget what they have decided
            if not self._keeps_states and self._parts.optimizer is not None:
                self._parts.optimizer.states.discard()
            self._parts.ground.endings.run()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise StormError("This session was closed. Call storm.stream again.")
