"""Updates streamed parameters as the user's optimizer would: in ``step``, or unit by unit while backward runs.

Our own Adam computes where it can, on the CPU worker and on the device. Every other optimizer runs torch's own step on
home memory. ``step``, ``zero_grad``, ``state`` and state dicts of the user's object keep their meaning;
optimizer/patch.py puts our methods on it."""

from __future__ import annotations

import functools
from collections.abc import Callable
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
from ..gradients.stream import GradientStream
from ..home.parameter import Access
from ..home.torch_grad import has_sparse_grad, real_grad
from ..units.unit import Unit
from ..weights.stream import ParameterStream
from .adam import AdamStream
from .adam_settings import refuse_unknown
from .adam_states import AdamStates
from .master_states import MasterStates
from .masters import Masters
from .param_groups import ParamGroups
from .patch import PUT_ON, Takeover, users_own
from .torch_step import Shadow, TorchStep, as_is, is_separable


class OptimizerStream:
    """The user's optimizer on streamed parameters."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        access: Access,
        units: list[Unit],
        parameters: ParameterStream,
        gradients: GradientStream,
        adam: AdamStream | None,
        masters: bool,
        mode: str,
    ) -> None:
        self.optimizer, self._units = optimizer, units
        self._parameters, self._gradients, self._adam, self._mode = parameters, gradients, adam, mode
        self._place = {id(place.parameter): place for unit in units for place in unit.places}
        self._own_step, self._own_zero_grad = users_own(optimizer, "step"), users_own(optimizer, "zero_grad")
        if self._own_zero_grad is None and type(optimizer).zero_grad is not torch.optim.Optimizer.zero_grad:
            self._own_zero_grad = functools.partial(type(optimizer).zero_grad, optimizer)
        self._is_separable = is_separable(optimizer)
        if self._own_step is not None:
            say_once(
                f"The step of {type(optimizer).__name__} was set on the optimizer object: it is called as it is, on "
                "all parameters at once, which is slower. Use hooks (register_step_pre_hook) instead: they are free."
            )
        self._shadow = Shadow(optimizer, PUT_ON)
        self.torch_step = TorchStep(self._shadow, parameters, masters=masters)
        self.stepping: int | None = None  # the signal handler that runs the step, 0 for none; None: no step runs
        self._access = access
        self._unstepped = False  # backward has updated units since the last step()
        self.lock = parameters.lock
        self._states_seen = {id(p) for p in optimizer.state}
        self.steps = 0
        self.before_update: Callable[[], None] = lambda: None
        self.on_step: Callable[[], None] = lambda: None
        self.masters, self.has_masters = Masters(adam, self.torch_step), masters
        self._not_written: set[int] = set()  # parameters without later writes, as a state dict is about to be loaded
        self.before_change: Callable[[Unit | None], None] = lambda _unit: None  # a save may still read the unit
        self._groups = ParamGroups(optimizer)
        self._states: AdamStates | None = None
        self._master_states: MasterStates | None = None
        if adam is not None:
            self._states = AdamStates(optimizer, adam, gradients, self._groups, access, self._before_replacing)
        elif masters:
            self._master_states = MasterStates(optimizer, self.torch_step, self._groups, units)
        self._loads = self._states or self._master_states  # the states that torch would cast on loading
        self._takeover = Takeover(
            optimizer,
            step=self.step,
            zero_grad=self._own_zero_grad or self.zero_grad,
            before_saving=self.join_all,
            after_saving=None if self._master_states is None else self._master_states.after_saving,
            before_loading=self._before_loading,
            after_loading=self._after_loading,
        )
        try:
            self._takeover.begin()
            self._connect()
        except BaseException:
            self.release()
            raise

    def _connect(self) -> None:
        """Connect the optimizer to backward through the gradients, and take over existing states."""
        adam, gradients, state = self._adam, self._gradients, self.optimizer.state
        if self._mode == "backward":
            gradients.consume = self._consume
            gradients.before_dropping = self.before_dropping
        if adam is not None:
            if state and self._states is not None:
                self._states.take_all({p: dict(entry) for p, entry in state.items()})
            gradients.before_storing = adam.finish
            gradients.staying = adam.there.staying
            if self._mode == "backward":
                adam.in_backward_mode = True
                gradients.update_here = self._update_here
        elif self._master_states is not None and self._is_separable:
            self._master_states.take_all()

    # --- the step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """``optimizer.step``: returns when the work is queued, or done where torch's own step runs."""
        if self._access.is_interrupted():
            raise handlers.inside_step("take an optimizer step")
        handlers.look_at_all()
        before, self.stepping = self.stepping, handlers.handler_here()
        try:
            return self._step(closure)
        finally:
            self.stepping = before

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        if self._adam is None and not self._is_separable:
            self.before_change(None)
            loss = as_is(self.optimizer, self._own_step, closure)
        else:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            if self._mode != "backward":
                self.before_change(None)  # here Ctrl-C can end the wait
            self._update_and_count()
            return loss
        self._count()
        return loss

    @locked
    def _update_and_count(self) -> None:
        self.before_update()
        self._update_all()
        self._unstepped = False
        self._count()

    @locked
    def _count(self) -> None:
        self._sort_state()
        self.steps += 1  # before the hooks: they may save a checkpoint
        self.on_step()

    def _sort_state(self) -> None:
        """Sort new entries of ``optimizer.state`` by parameter: units may be updated in any order."""
        state = self.optimizer.state
        if len(state) != len(self._states_seen):
            for parameter in [p for p in self._groups.parameters() if p in state and id(p) not in self._states_seen]:
                state[parameter] = state.pop(parameter)
                self._states_seen.add(id(parameter))

    @locked  # excludes the closure, whose backward runs on another thread
    @torch.no_grad()
    def _update_all(self) -> None:
        refuse_ranks()
        self._refuse_thawed()
        if self._adam is not None:
            refuse_unknown(self.optimizer, self._place)
        for home in self._gradients.homes:
            for place in home.unit.trained:
                self._gradients.fold(place)
        self._refuse_sparse(self._units)
        if self._states is not None:
            self._states.heed()
        for home in self._gradients.homes:
            if home.present or (self._adam is None and any(has_sparse_grad(place) for place in home.unit.trained)):
                self._update(home, self._groups.of(home.unit))
        if self._states is not None:
            self._states.count()
        others = [p for p in self._groups.parameters() if id(p) not in self._place and p.grad is not None]
        if others:  # left on the device, added later, or not the model's
            self._shadow.run([(p, p) for p in others])
        if self._mode == "serial":
            self.join_all()
        self._parameters.end_step()
        self._parameters.load_ahead()

    def _refuse_thawed(self) -> None:
        """Raise for parameters that were frozen when streaming began: they have no memory for gradients and states."""
        for unit in self._units:
            for place in unit.places[len(unit.trained) :]:
                if real_grad(place) is not None and place.index in self._groups.of(unit):
                    raise StormError(
                        f"Cannot update {place.name!r}: it was frozen when streaming began. Close the session and call "
                        "storm.stream again."
                    )

    def _refuse_sparse(self, units: list[Unit]) -> None:
        """Raise before the first unit is updated, so that an error leaves all units unchanged."""
        for unit in units if self._adam is not None else []:
            sparse = [place.index for place in unit.trained if has_sparse_grad(place)]
            if sparse and not self._groups.of(unit).keys().isdisjoint(sparse):
                raise StormError("Adam does not support sparse gradients. Use SparseAdam, SGD or Adagrad.")

    def _update(self, home: GradHome, mine: dict[int, dict[str, Any]]) -> None:
        self.before_change(home.unit)
        if self._adam is not None:
            self._adam.update(home, mine)
        else:
            self.torch_step.update(home, mine)
        self._note_change(home, mine)

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

    def _consume(self, home: GradHome) -> None:
        """For step="backward": update the unit now, from gradients that were just sent home."""
        mine = self._consumable(home)
        if mine is not None:
            self._refuse_sparse([home.unit])
            if self._states is not None:
                self._states.heed(home.unit)
            with torch.no_grad():
                self._update(home, mine)
            self._consumed(home)

    def _update_here(self, home: GradHome, bucket: torch.Tensor) -> bool:
        """For step="backward": update the unit now on the device, if it is to be updated there."""
        assert self._adam is not None
        assert self._states is not None
        mine = self._consumable(home) if self._adam.homes[home.unit.index].on_device else None
        if mine is None:
            return False
        self._states.heed(home.unit)
        self.before_change(home.unit)
        residence = self._parameters.residences[home.unit.index]
        updates = residence.updates
        try:
            if not self._adam.update_here(home, bucket, mine):
                return False
        finally:
            if residence.updates != updates:  # perhaps partly, before an error: that cannot be undone either
                self._note_change(home, mine)
                self._consumed(home)
        return True

    def _consumable(self, home: GradHome) -> dict[int, dict[str, Any]] | None:
        """The unit's hyperparameters; None if the optimizer lacks some of its parameters: user code may use those."""
        if self._adam is not None and not self._unstepped:  # check before the first unit changes
            refuse_unknown(self.optimizer, self._place)
        mine = self._groups.of(home.unit)
        return mine if all(index in mine for index in home.present) else None

    def _consumed(self, home: GradHome) -> None:
        home.consumed_places |= home.present
        home.present.clear()
        home.norms.clear()
        home.consumed = self._unstepped = True

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
            self._gradients.clear()
        else:
            self.apply_factor()  # parameters of other optimizers keep their gradients
        for key, parameter in held.items():
            place = self._place.get(key)
            if place is None:
                parameter.grad = None
            elif not everything or (not place.trained and real_grad(place) is not None):
                self._gradients.set_grad(place, None)
        self.forget_factor()

    @locked
    def before_dropping(self) -> None:
        """Raise once if gradients that backward has used are dropped without a step(): that would not skip the step."""
        if not self._unstepped:
            return
        self._unstepped = False
        if self._states is not None:
            self._states.count()  # the updates count, if training goes on from here
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
        if self._adam is None:
            return None
        if self._mode == "backward":
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
            self._gradients.fold(place)
            home = self._gradients.homes[place.unit.index]
            if place.index not in home.present:
                continue
            if place.index not in home.norms:
                return None
            norms.append(home.norms[place.index])
        everything = sum(len(home.present) for home in self._gradients.homes)
        if len(norms) != everything or not norms:
            return None
        return self._adam.clip(norms, max_norm)

    # --- the state, in torch's own format

    def _before_replacing(self, unit: Unit) -> None:
        self.before_change(unit)  # an attribute that is set after construction

    def _before_loading(self, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        self.join_all()
        self.before_change(None)
        self._not_written = self.masters.loading(self._units)
        return None if self._loads is None else self._loads.before_loading(state_dict)

    def _after_loading(self) -> None:
        self._unstepped = False  # loading starts from a complete step
        if self._loads is not None:
            self.masters.loaded(self._loads.after_loading(), self._not_written)

    # --- for checkpoints

    @locked
    def settle(self) -> None:
        """Block until home memory has the current weights and states, including changes that user code made to the
        state."""
        if self._states is not None:
            self._states.heed()
        self.join_all()

    @locked
    def replace_states(self, states: dict[Any, dict[str, Any]]) -> None:
        """Install these states. For our own kernels, moments and masters are in home memory already."""
        self._unstepped = False
        self.optimizer.state.clear()
        if self._states is not None:
            self._states.replace(states)
        for parameter, state in states.items():
            self.optimizer.state[parameter] = state
        self._states_seen.clear()
        self._sort_state()

    # --- waiting and ending

    def gate(self, unit: Unit, lane: Any) -> None:
        if self._adam is not None:
            self._adam.gate(unit, lane)

    @locked
    def join(self, unit: Unit, *, states: bool = False) -> None:
        """Block until the unit's weights at home are up to date; with ``states``, the optimizer's too."""
        if self._adam is not None:
            (self._adam.join_states if states else self._adam.join)(unit)

    def join_all(self) -> None:
        for unit in self._units:
            self.join(unit, states=True)

    @locked
    def apply_factor(self) -> None:
        """Scale gradients whose clipping was deferred: user code reads them."""
        if self._adam is not None:
            self._adam.apply_factor()

    @locked
    def forget_factor(self) -> None:
        """Forget deferred clipping: its gradients were dropped."""
        if self._adam is not None:
            self._adam.forget_factor()

    @property
    def released(self) -> bool:
        return self._takeover.ended

    @locked
    def release(self) -> None:
        """Give the optimizer back, with its state in ordinary tensors of the parameters' dtypes."""
        if self.released:
            return
        if self._master_states is not None and self._is_separable:
            self._master_states.make_ordinary()  # can run twice, if Ctrl-C ends it
        self._takeover.end()
        if self._states is not None:
            if self._unstepped:
                self._states.count()
            self._states.make_ordinary()
