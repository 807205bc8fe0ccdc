"""`offload_activations`: for a model that fits on the device, while its activations do not."""

from __future__ import annotations

import contextlib
import threading
from types import TracebackType
from typing import Self

import torch
from torch import nn

from ..core.endings import Endings
from ..core.errors import SettingError, StormError
from ..core.tags import Tier
from ..memory.books.ledger import Ledger, open_ledger
from ..memory.books.limits import usable_device
from ..memory.cuda.allocator import expand_segments
from ..memory.cuda.device_meter import DeviceMeter, PeakMeter, device_meter_for
from ..memory.host.pinning import page_lock_for
from ..memory.lanes.build import open_lanes
from ..memory.lanes.waits import WaitMeter
from ..observe.recorder import Recorder, link_rates
from ..observe.report import ActivationReport, make_activation_report
from ..streams.activations.plans.room import Surroundings
from ..streams.activations.runner import Saving
from ..streams.bridge import handlers
from ..streams.settings import ACTIVATIONS, Trial


def offload_activations(
    model: nn.Module | None = None,
    *,
    mode: str = "auto",
    vram: object = "auto",
    ram: object = "auto",
    device: torch.device | str = "auto",
) -> OffloadedActivations:
    """Offload activations: use it around forward, for any number of steps; backward comes after::

        activations = storm.offload_activations(model, vram="8GiB")
        for batch in loader:
            with activations:
                loss = model(batch)
            loss.backward()

    ``mode``: "offload" moves tensors that autograd saves to RAM, "recompute" runs blocks again in backward, "auto"
    keeps, offloads or recomputes, whichever is fastest within ``vram``, which limits all memory of this process on the
    device. Without ``model`` there are no blocks to recompute, and the mode is "offload".
    """
    return OffloadedActivations(model, mode, vram, ram, device)


class OffloadedActivations:
    """A context that handles activations. Enter it as often as you like; ``close`` it in the end."""

    def __init__(
        self,
        model: nn.Module | None,
        mode: str,
        vram: object,
        ram: object,
        device: torch.device | str,
        *,
        trial: Trial = Trial(),  # noqa: B008
    ) -> None:
        if model is None and mode == "auto":
            mode = "offload"
        if mode not in ACTIVATIONS or (model is None and mode == "recompute"):
            needs = ' ("recompute" needs the model)' if model is None else ""
            raise SettingError(f"mode={mode!r} is not valid{needs}. Accepted: {', '.join(map(repr, ACTIVATIONS))}.")
        _refuse_meta(model)
        self._closed = False
        self._context: contextlib.ExitStack | None = None
        self._endings = Endings()
        first = next(model.parameters(), None) if model is not None else None
        self.device = first.device if device == "auto" and first is not None else usable_device(device)
        self.ledger: Ledger = open_ledger(self.device, vram=vram, ram=ram)
        limit = self.ledger.budgets[Tier.DEVICE].limit_bytes
        meter = trial.meter or device_meter_for(self.device)
        if meter is not None:
            meter.forget_peak()
            if vram == "auto":
                limit += meter.allocated()  # "auto" is what is free now
        self.recorder = Recorder()
        try:
            self._open(model, mode, limit, meter, trial)
        except BaseException:
            self._endings.run()
            raise

    def _open(
        self, model: nn.Module | None, mode: str, limit_bytes: int, meter: DeviceMeter | None, trial: Trial
    ) -> None:
        self._endings.last(handlers.begin(self._endings))
        self._endings.last(expand_segments(self.device))
        lanes = open_lanes(self.device, sink=self.recorder, delay=trial.delay)
        self._endings.before_others(lanes.close)
        self._lanes = lanes
        self._waits = WaitMeter(lanes.compute, self.recorder)
        around = Surroundings(
            device=self.device,
            lanes=lanes,
            ledger=self.ledger,
            page_lock=page_lock_for(self.device),
            waits=self._waits,
            lock=threading.RLock(),
            rates=self._rates,
            meter=meter,
            peak=PeakMeter(int if meter is None else meter.peak),
            limit_bytes=limit_bytes,
        )

        def weights() -> list[torch.Tensor]:
            return [*model.parameters(), *model.buffers()] if model is not None else []

        self.saving = Saving(model, mode, around, weights, trial)
        self._endings.before_others(self.saving.close)
        self._endings.before_others(lanes.synchronize)

    def _rates(self, _forward_s: float) -> tuple[float, float]:
        """The link's, of which activations have all."""
        self._lanes.emit()
        return link_rates(self.recorder.snapshot())

    @handlers.undisturbed
    def report(self) -> ActivationReport:
        """Measurements and decisions so far, as data; ``print`` it for text. Does not wait."""
        self._waits.emit()
        self._lanes.emit()
        return make_activation_report(
            self.recorder.snapshot(),
            passes=self.saving.planning.passes,
            ledger=self.ledger,
            reason=self.saving.planning.choice.reason,
        )

    def __enter__(self) -> Self:
        if self._closed:
            raise StormError("This context was closed. Call storm.offload_activations again.")
        if self._context is not None:
            raise StormError("This context is in use; it cannot be entered again inside of itself.")
        with contextlib.ExitStack() as stack:
            if torch.is_grad_enabled():
                hooks = self.saving.pack, self.saving.unpack
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*hooks))
                stack.enter_context(self.saving.passing(*hooks))
            self._context = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        context, self._context = self._context, None
        if context is not None:
            context.__exit__(kind, error, at)

    def close(self) -> None:
        """Make the model ordinary again and return the memory. Open graphs cannot run backward any more."""
        if self._closed:
            return
        self._closed = True
        self._endings.run()


def _refuse_meta(model: nn.Module | None) -> None:
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta] if model is not None else []
    if empty:
        raise SettingError(
            f"The model is on the meta device: {empty[0]!r}"
            f"{f' and {len(empty) - 1} more have' if len(empty) > 1 else ' has'} no memory. Give it memory and weights "
            "first: build it on the CPU or the GPU, or model.to_empty(device=...) and then load parameters and "
            "buffers. To fill it while it is streamed, call storm.stream instead."
        )
