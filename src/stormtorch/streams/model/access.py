"""Serves user code that reads or writes home memory: home/parameter.py notices the access and asks here.

Before a read, pending work on the value is finished. Before a write, its readers are finished too. A write makes the
device copies stale, also those that modules are computing with."""

from __future__ import annotations

import torch

from ...core.errors import StormError
from ..bridge import handlers
from ..bridge.lock import locked
from ..bridge.torch_private import in_backward
from ..units.unit import Place
from .calls import Calls
from .schedule import Schedule
from .views import Twins


class UserAccess:
    """Implements `home.Access`. Parameters hold it, and through it all that streaming them needs."""

    def __init__(self, *, device: torch.device, schedule: Schedule, twins: Twins, calls: Calls) -> None:
        self.device, self.twins, self.closed = device, twins, False
        self.lock = schedule.lock
        self.stepping: int | None = None
        self.schedule, self._weights, self._grads, self._calls = schedule, schedule.weights, schedule.gradients, calls
        self._passes = twins.passes

    def in_forward(self) -> bool:
        """Whether the caller is inside a forward. A signal handler that has interrupted one is not: it reads home
        memory."""
        if self.closed or self._passes.depth == 0:
            return False
        return not handlers.state.running or self._passes.handler == handlers.handler_here()

    def is_interrupted(self, *, forward: bool = True) -> bool:
        """Whether the caller is a signal handler that has interrupted a backward, a step or, with ``forward``, a
        forward."""
        here = handlers.handler_here()
        if not here:
            return False
        if self.stepping not in (None, here):
            return True
        return self._passes.handler != here and (in_backward() or (forward and self._passes.depth > 0))

    @locked
    def join(self, place: Place, kind: str) -> None:
        if self.closed or kind == "past":
            return
        if kind == "grad":
            self.schedule.updater.apply_factor()
            home = self._grads.homes[place.unit.index]
            if place.index in home.consumed_places:
                raise StormError(
                    f'The gradient of {place.name!r} is gone: step="backward" updates units as their gradients arrive. '
                    'Use step="forward" (the "auto" choice) to read, clip or change gradients.'
                )
            home.join()
        elif kind == "state":
            self.schedule.updater.join_states(place.unit)
        else:
            self.schedule.updater.join(place.unit)

    @locked
    def before_write(self, place: Place, kind: str) -> None:
        if self.closed or kind == "past":
            return
        if kind != "grad":
            self.schedule.snapshot.before_change(place.unit.index)  # a save may still read it
        if kind == "weight":
            last = self._weights.residences[place.unit.index].last_load
            if last is not None:
                last.synchronize()  # a load may still be reading
            self.schedule.updater.before_rewrite(place)
        elif kind == "grad":
            self.schedule.updater.join(place.unit)  # an update may still be reading

    @locked
    def after_write(self, place: Place, kind: str) -> None:
        if self.closed:
            return
        if kind == "weight":
            place.written = True
            self._weights.changed(place.unit, by_step=False)
            self.schedule.updater.rewritten(place)
            if place.stored is not None:
                place.stored.sync()
            self._calls.renew(place.unit)
        elif kind == "grad":
            self._grads.homes[place.unit.index].forget_norm(place.index)
        elif kind == "state":
            self.schedule.updater.states_written(place)

    @locked
    def expose(self, place: Place, kind: str) -> None:
        if self.closed or kind == "past":
            return
        if place.in_file and kind == "weight":
            assert self._weights.files is not None
            self._weights.files.expose(place)
        else:
            self.schedule.updater.never_ahead(place.unit)

    @locked
    def found_written(self, place: Place) -> None:
        """Take note that a parameter got its first values by a write that was not reported."""
        place.written = True
        self._weights.changed(place.unit, by_step=False)
        self.schedule.updater.reset_master(place)
        if place.stored is not None:
            place.stored.sync()

    def grad(self, place: Place) -> torch.Tensor | None:
        return None if self.closed else self.schedule.user_gradients.grad(place, self)

    def grad_norm(self, place: Place) -> torch.Tensor | None:
        return None if self.closed else self.schedule.user_gradients.norm(place)

    def scale_grad(self, place: Place, factor: torch.Tensor) -> bool:
        return not self.closed and self.schedule.user_gradients.scale(place, factor)

    @locked
    def set_grad(self, place: Place, value: torch.Tensor | None) -> None:
        if value is not None:
            self.schedule.updater.apply_factor()
        self.schedule.user_gradients.set_grad(place, value)
        updater = self.schedule.updater
        if value is None and updater.is_scaled() and not any(home.present for home in self._grads.homes):
            updater.forget_factor()
