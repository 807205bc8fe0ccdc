"""Updates streamed parameters as the user's optimizer would: in ``step``, or unit by unit while backward runs.

Our own Adam computes where it can, on the CPU worker and on the device. Every other optimizer runs torch's own step on
home memory. ``step``, ``zero_grad``, ``state`` and state dicts of the user's object keep their meaning;
optimizer/patch.py puts our methods on it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ...core.errors import StormError
from ...core.notices import say_once
from ..bridge import handlers
from ..bridge.lock import locked
from ..bridge.ranks import refuse_ranks
from ..bridge.torch_private import without_torch_function
from ..gradients.home import GradHome
from ..home.parameter import Access
from ..home.torch_grad import has_sparse_grad, real_grad
from ..units.unit import Unit
from .param_groups import ParamGroups
from .patch import Takeover, users_own
from .torch_step import Shadow, as_is
from .updater import Conductor
from .user_gradients import UserGradients


class OptimizerStream:
    """The user's optimizer on streamed parameters."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        access: Access,
        units: list[Unit],
        schedule: Conductor,
        user_gradients: UserGradients,
        *,
        masters: bool,
        mode: str,
    ) -> None:
        self.optimizer, self._units = optimizer, units
        self._schedule, self._snapshot, self._mode = schedule, schedule.snapshot, mode
        self._gradients, self._user_gradients = schedule.gradients, user_gradients
        self._updater = updater = schedule.updater
        self._place = {id(place.parameter): place for unit in units for place in unit.places}
        self._own_step, self._own_zero_grad = users_own(optimizer, "step"), users_own(optimizer, "zero_grad")
        if self._own_zero_grad is None and type(optimizer).zero_grad is not torch.optim.Optimizer.zero_grad:
            self._own_zero_grad = functools.partial(type(optimizer).zero_grad, optimizer)
        if self._own_step is not None:
            say_once(
                f"The step of {type(optimizer).__name__} was set on the optimizer object: it is called as it is, on "
                "all parameters at once, which is slower. Use hooks (register_step_pre_hook) instead: they are free."
            )
        self._shadow = Shadow(optimizer)  # for parameters that are not streamed
        self._access, self.has_masters = access, masters
        self._unstepped = False  # backward has updated units since the last step()
        self.lock = schedule.weights.lock
        self._states_seen = {id(p) for p in optimizer.state}
        self.steps = 0
        self._groups = ParamGroups(optimizer)
        self.states = updater.states(self._groups, access, schedule.snapshot)
        self._takeover = Takeover(
            optimizer,
            step=self.step,
            zero_grad=self._own_zero_grad or self.zero_grad,
            hooks={
                "state_dict_pre": updater.join_all,
                "state_dict_post": self.states.after_saving,
                "load_state_dict_pre": self._before_loading,
                "load_state_dict_post": self._after_loading,
            },
        )
        try:
            self._takeover.begin()
            self.states.take_over()
        except BaseException:
            self.release()
            raise

    @property
    def in_backward(self) -> bool:
        """Whether each unit is updated when its gradients are complete."""
        return self._mode == "backward"

    # --- the step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """``optimizer.step``: returns when the work is queued, or done where torch's own step runs."""
        if self._access.is_interrupted():
            raise handlers.inside_step("take an optimizer step")
        handlers.look_at_all()
        before, self._access.stepping = self._access.stepping, handlers.handler_here()
        try:
            return self._step(closure)
        finally:
            self._access.stepping = before

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        if not self._updater.by_unit:
            self._snapshot.before_change(None, by_step=True)
            loss = as_is(self.optimizer, self._own_step, closure)
            self._schedule.end_step()
            return loss
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self.in_backward:
            self._snapshot.before_change(None, by_step=True)  # here Ctrl-C can end the wait
        self._schedule.step()
        return loss

    def count(self) -> None:
        """Count a step that is complete."""
        self._unstepped = False
        self._sort_state()
        self.steps += 1

    def _sort_state(self) -> None:
        """Sort new entries of ``optimizer.state`` by parameter: units may be updated in any order."""
        state = self.optimizer.state
        if len(state) != len(self._states_seen):
            for parameter in [p for p in self._groups.parameters() if p in state and id(p) not in self._states_seen]:
                state[parameter] = state.pop(parameter)
                self._states_seen.add(id(parameter))

    def check(self) -> None:
        """Raise before a step for what it cannot do."""
        refuse_ranks()
        self._refuse_thawed()
        self._updater.check(self.optimizer, self._place)

    def _refuse_thawed(self) -> None:
        """Raise for parameters that were frozen when streaming began: they have no memory for gradients and states."""
        for unit in self._units:
            for place in unit.places[len(unit.trained) :]:
                if real_grad(place) is not None and place.index in self._groups.of(unit):
                    raise StormError(
                        f"Cannot update {place.name!r}: it was frozen when streaming began. Close the session and call "
                        "storm.stream again."
                    )

    def refuse_sparse(self, units: list[Unit]) -> None:
        """Raise before the first unit is updated, so that an error leaves all units unchanged."""
        for unit in [] if self._updater.takes_sparse else units:
            sparse = [place.index for place in unit.trained if has_sparse_grad(place)]
            if sparse and not self._groups.of(unit).keys().isdisjoint(sparse):
                raise StormError("Adam does not support sparse gradients. Use SparseAdam, SGD or Adagrad.")

    def update(self, home: GradHome, mine: dict[int, dict[str, Any]] | None = None) -> None:
        """Update a unit from its gradients, or queue that. ``mine``: its hyperparameters, if they are known."""
        mine = self._groups.of(home.unit) if mine is None else mine
        self._snapshot.before_change(home.unit.index, by_step=True)
        self._updater.update(home, mine)
        self._note_change(home, mine)

    def update_others(self) -> None:
        """Update parameters that are not streamed: left on the device, added later, or not the model's."""
        others = [p for p in self._groups.parameters() if id(p) not in self._place and p.grad is not None]
        if others:
            self._shadow.run([(p, p) for p in others])

    def _note_change(self, home: GradHome, mine: dict[int, dict[str, Any]]) -> None:
        """Tell autograd of the change: graphs outside of the model that have saved these parameters must not run any
        more."""
        changed = [
            place.parameter
            for place in home.unit.trained
            if place.index in mine and (place.index in home.present or has_sparse_grad(place))
        ]
        with without_torch_function():
            torch.autograd.graph.increment_version(changed)

    def update_home(self, home: GradHome) -> None:
        """For step="backward": update the unit now, from gradients that were just sent home."""
        mine = self._consumable(home)
        if mine is not None:
            self.refuse_sparse([home.unit])
            self.states.heed(home.unit)
            with torch.no_grad():
                self.update(home, mine)
            self._consumed(home)

    def update_here(self, home: GradHome, bucket: torch.Tensor) -> bool:
        """For step="backward": update the unit now on the device, if it is to be updated there."""
        mine = self._consumable(home) if self._updater.is_on_device(home.unit) else None
        if mine is None:
            return False
        self.states.heed(home.unit)
        self._snapshot.before_change(home.unit.index, by_step=True)
        residence = self._schedule.weights.residences[home.unit.index]
        updates = residence.updates
        try:
            if not self._updater.update_here(home, bucket, mine):
                return False
        finally:
            if residence.updates != updates:  # perhaps partly, before an error: that cannot be undone either
                self._note_change(home, mine)
                self._consumed(home)
        return True

    def update_ahead(self, home: GradHome, *, added: bool) -> None:
        """For step="forward": perhaps begin the unit's update, for the step to take over. ``added``: its gradients were
        added to earlier ones."""
        if self._updater.ahead_units and not self.in_backward:
            with torch.no_grad():
                self._updater.begin_ahead(home, self._groups.of(home.unit), added=added)

    def takes_at_once(self, home: GradHome, indices: Iterable[int], *, by_cpu: bool) -> bool:
        """Whether `update_home` will take the unit's gradients, those of ``indices``, at home: it leaves those of
        parameters that it lacks, and those that the device is to update with later, unless the CPU must do that."""
        if home.is_wide or (self._updater.is_on_device(home.unit) and not by_cpu):
            return False
        mine = self._groups.of(home.unit)
        return all(index in mine for index in indices)

    def _consumable(self, home: GradHome) -> dict[int, dict[str, Any]] | None:
        """The unit's hyperparameters; None if the optimizer lacks some of its parameters: user code may use those."""
        if not self._unstepped:  # check before the first unit changes
            self._updater.check(self.optimizer, self._place)
        mine = self._groups.of(home.unit)
        return mine if all(index in mine for index in home.present) else None

    def _consumed(self, home: GradHome) -> None:
        home.use_up()
        self._unstepped = True

    # --- gradients

    @locked
    def zero_grad(self, set_to_none: bool = True) -> None:
        """``optimizer.zero_grad``, unless the user has set one; with ``set_to_none`` it does not wait."""
        if self._access.is_interrupted():
            raise handlers.inside_step("clear gradients")
        self.before_dropping()
        if not set_to_none:
            type(self.optimizer).zero_grad(self.optimizer, set_to_none=False)
            return
        held = {id(parameter): parameter for parameter in self._groups.parameters()}
        everything = all(id(place.parameter) in held for unit in self._units for place in unit.trained)
        if everything:
            self._user_gradients.clear()
        else:
            self._updater.apply_factor()  # parameters of other optimizers keep their gradients
        for key, parameter in held.items():
            place = self._place.get(key)
            if place is None:
                parameter.grad = None
            elif not everything or (not place.trained and real_grad(place) is not None):
                self._user_gradients.set_grad(place, None)
        self._updater.forget_factor()

    @locked
    def before_dropping(self) -> None:
        """Raise once if gradients that backward has used are dropped without a step(): that would not skip the step."""
        if not self._unstepped:
            return
        self._unstepped = False
        self.states.count()  # the updates count, if training goes on from here
        updated = sum(home.consumed for home in self._gradients.homes)
        raise StormError(
            f'step="backward" has updated {updated} of {len(self._units)} units while their gradients arrived, and '
            "optimizer.step() was not called since: the weights are those of a half-done step, and it cannot be "
            'undone. Load a checkpoint, or call zero_grad() again to go on from here. Use step="forward" (the "auto" '
            "choice) to skip steps."
        )

    @locked
    def clip_grad_norm_(self, parameters: list[nn.Parameter], max_norm: float) -> torch.Tensor | None:
        """Clip without waiting; None if that is not possible."""
        if self.in_backward:
            raise StormError(
                'Cannot clip: step="backward" has used the gradients, unit by unit, before their norm was known. '
                'Use step="forward" (the "auto" choice) to clip.'
            )
        norms = []
        for parameter in parameters:
            place = self._place.get(id(parameter))
            if place is None or not place.trained:
                if parameter.grad is not None:
                    return None
                continue
            self._user_gradients.fold(place)
            home = self._gradients.homes[place.unit.index]
            if place.index not in home.present:
                continue
            if not home.has_norm(place.index):
                return None
            home.measure()
            norms.append(home.norms[place.index])
        everything = sum(len(home.present) for home in self._gradients.homes)
        if len(norms) != everything or not norms:
            return None
        return self._updater.clip(norms, max_norm)

    # --- the state, in torch's own format

    def _before_loading(self, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        self._updater.join_all()
        self._snapshot.before_change(None, by_step=True)
        return self.states.before_loading(state_dict)

    def _after_loading(self) -> None:
        self._unstepped = False  # loading starts from a complete step
        self.states.after_loading()

    # --- for checkpoints

    @locked
    def settle(self) -> None:
        """Block until home memory has the current weights and states, including changes that user code made to the
        state."""
        self.states.heed()
        self._updater.join_all()

    @locked
    def replace_states(self, states: dict[Any, dict[str, Any]]) -> None:
        """Install these states. For our own kernels, moments and masters are in home memory already."""
        self._unstepped = False
        self.optimizer.state.clear()
        self.states.replace(states)
        for parameter, state in states.items():
            self.optimizer.state[parameter] = state
        self._states_seen.clear()
        self._sort_state()

    # --- ending

    @property
    def released(self) -> bool:
        return self._takeover.ended

    @locked
    def release(self) -> None:
        """Give the optimizer back, with its state in ordinary tensors of the parameters' dtypes."""
        if self.released:
            return
        self.states.before_release()
        self._takeover.end()
        if self._unstepped:
            self.states.count()
        self.states.after_release()
