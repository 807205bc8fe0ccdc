"""Ties the streams to a model in place (parameters, calls, buffers), and undoes that."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..bridge import ranks
from ..bridge.handlers import undisturbed
from ..home import autograd_functions as functions
from ..home.parameter import HomeParameter
from ..home.registration import unwatch, watch
from ..home.torch_grad import has_sparse_grad
from ..units.partition import Entry, containers_of
from ..units.unit import Unit
from .access import UserAccess
from .calls import Calls
from .schedule import Schedule
from .views import Twins
from .write_guard import WriteGuard


class Attachment:
    """A model and its streams: ``calls`` runs its modules, ``access`` serves user code that uses its parameters."""

    def __init__(
        self, model: nn.Module, entries: list[Entry], units: list[Unit], device: torch.device, schedule: Schedule
    ) -> None:
        self._model, self._entries, self._units = model, entries, units
        self._uses = [use for entry in entries for use in entry.uses]
        self._device, self._schedule = device, schedule
        self._moved_buffers: list[tuple[nn.Module, str]] = []
        twins = Twins(schedule)
        guard = WriteGuard(entries, schedule.weights, device)
        self.calls = Calls(model, units, device=device, schedule=schedule, twins=twins, guard=guard)
        self.access = UserAccess(device=device, schedule=schedule, twins=twins, calls=self.calls)

    def attach(self) -> None:
        """Turn every parameter, by now a view of its home image, into a `HomeParameter`, and wrap the calls."""
        for unit in self._units:
            for place in unit.places:
                parameter: Any = place.parameter
                parameter.__class__ = HomeParameter
                parameter._storm = (self.access, place)
        functions.attach(self.access)
        watch(self._uses)
        ranks.attach([self._model, *(entry.module for entry in self._entries)])
        for entry in self._entries:
            self.calls.wrap(entry.module, entry)
        for module in containers_of(self._model, self._entries):
            self.calls.wrap(module, None)
        if self._device.type != "cpu":
            for module in self._model.modules():
                for name, buffer in module._buffers.items():
                    if buffer is not None and buffer.device != self._device and not buffer.is_meta:
                        module._buffers[name] = buffer.to(self._device)
                        self._moved_buffers.append((module, name))

    @undisturbed
    def detach(self) -> None:
        """Make the modules and parameters ordinary again."""
        if self.access.closed:
            return
        self.calls.closed = self.access.closed = True  # in one line: Ctrl-C cannot come in between
        self.calls.unwrap()
        unwatch(self._uses)
        ranks.detach([self._model, *(entry.module for entry in self._entries)])
        functions.detach(self.access)
        for unit in self._units:
            for place in unit.places:
                grad = None
                home = self._schedule.gradients.homes[unit.index]
                if place.trained:
                    if place.index not in home.consumed_places:
                        self._schedule.user_gradients.fold(place)
                    if place.index in home.present:
                        home.join()
                        grad = home.view(place).to(place.dtype).clone()
                parameter: Any = place.parameter
                vars(parameter).pop("_storm", None)
                parameter.__class__ = nn.Parameter
                if place.trained and not (grad is None and has_sparse_grad(place)):  # a sparse one is in place already
                    parameter.grad = grad
        for module, name in self._moved_buffers:
            buffer = module._buffers.get(name)
            if buffer is not None:  # else user code has deleted it
                module._buffers[name] = buffer.to("cpu")
