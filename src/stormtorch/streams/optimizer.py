"""Takes over the user's optimizer: ``step``, ``zero_grad``, ``state_dict`` and ``load_state_dict`` keep their meaning.

The object stays the user's; ``step`` and ``zero_grad`` are set on the instance, as bound methods, because a scheduler
that was built before has done the same, and one that is built later will wrap what it finds. After `release` they
fall through to the class."""

from __future__ import annotations

import types
from collections.abc import Callable, Container
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from ..core.errors import StormError
from .adam import AdamStream
from .adam_states import AdamStates
from .grad_home import GradHome
from .gradients import GradientStream
from .home import Access, plain
from .lock import locked
from .master_states import MasterStates
from .parameters import ParameterStream
from .real_grad import has_sparse_grad, real_grad
from .torch_private import without_torch_function
from .torch_step import Shadow, TorchStep, as_is, is_separable
from .unit import Place, Unit

_OWN = ("step", "zero_grad", "_step_supports_amp_scaling")


def runs_as_adam(optimizer: torch.optim.Optimizer, units: list[Unit], masters: bool) -> bool:
    """Whether our own kernels compute what this optimizer would."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return False
    if _beyond_our_adam(optimizer, {id(place.parameter) for unit in units for place in unit.places}) is not None:
        return False
    dtypes = {place.dtype for unit in units for place in unit.trained}
    return dtypes <= ({torch.float32, torch.bfloat16, torch.float16} if masters else {torch.float32})


def _beyond_our_adam(optimizer: torch.optim.Optimizer, streamed: Container[int]) -> str | None:
    """The first setting of a group of ``streamed`` parameters, by id, that our own kernels do not know."""
    for group in optimizer.param_groups:
        found = [f"{name}={group[name]!r}" for name in ("amsgrad", "differentiable", "capturable") if group.get(name)]
        for name, values in (("lr", [group["lr"]]), ("betas", group["betas"])):
            if any(isinstance(value, torch.Tensor) for value in values):
                found.append(f"a tensor as {name}")  # torch then computes in fp32, where a number is a double
        if found and any(id(parameter) in streamed for parameter in group["params"]):
            return found[0]
    return None


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
        self._shadow = Shadow(optimizer, _OWN)
        self._generic = TorchStep(self._shadow, masters=masters)
        self._previous = {name: vars(optimizer)[name] for name in _OWN if name in vars(optimizer)}
        self.released = False
        self._unstepped = False  # backward has updated units, and step() was not called since
        self.lock = parameters.lock
        self._before_load: dict[int, dict[str, Any]] = {}
        self._images_before: dict[int, torch.Tensor] = {}
        self._states_seen = {id(p) for p in optimizer.state}
        self.steps = 0
        self.on_step: Callable[[], None] = lambda: None
        self.masters = masters
        self._masters = MasterStates(self._generic, units) if masters and adam is None else None
        self.before_change: Callable[[Unit | None], None] = lambda _unit: None  # somebody may still be saving it
        self._states: AdamStates | None = None
        if adam is not None:
            self._states = AdamStates(optimizer, adam, gradients, access, self._before_replacing)
        self._hooks: list[Any] = []
        self._group: dict[int, dict[str, Any]] = {}  # by parameter
        self._groups_key: tuple[int, ...] = ()
        try:
            self._patch()
        except BaseException:
            self.release()
            raise

    def _patch(self) -> None:
        optimizer, adam, gradients = self.optimizer, self._adam, self._gradients
        target: Any = optimizer
        target.step = types.MethodType(self._method("step"), optimizer)
        target.zero_grad = types.MethodType(self._method("zero_grad"), optimizer)
        target._step_supports_amp_scaling = False  # a GradScaler then unscales the gradients itself
        self._hooks.append(optimizer.register_state_dict_pre_hook(lambda _optimizer: self.join_all()))
        self._hooks.append(optimizer.register_load_state_dict_pre_hook(self._take_state))
        self._hooks.append(optimizer.register_load_state_dict_post_hook(self._install_state))
        if self._masters is not None:
            self._hooks.append(optimizer.register_state_dict_post_hook(self._masters.add))
        if self._mode == "backward":
            gradients.consume = self._consume
            gradients.before_dropping = self.before_dropping
        if adam is not None:
            if optimizer.state and self._states is not None:
                self._states.take_all({p: dict(state) for p, state in optimizer.state.items()})
            gradients.before_storing = adam.finish
            gradients.staying = adam.there.staying
            if self._mode == "backward":
                adam.in_backward_mode = True
                gradients.update_here = self._update_here

    def _method(self, name: str) -> Callable[..., Any]:
        def method(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            if self.released:
                return getattr(type(optimizer), name)(optimizer, *args, **kwargs)
            return getattr(self, name)(*args, **kwargs)

        method = torch.compiler.disable(method)  # queues and waits: nothing that could be compiled
        method.__name__ = name
        if hasattr(vars(self.optimizer).get(name), "_wrapped_by_lr_sched"):
            method._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # or the scheduler warns of a foreign step
        method.__doc__ = getattr(type(self.optimizer), name).__doc__
        return method

    # --- the step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """``optimizer.step``: returns as soon as the work is queued, or done where the class runs itself."""
        optimizer: Any = self.optimizer
        optimizer._opt_called = True  # what a scheduler that was built before looks for
        for hook in (*_global_optimizer_pre_hooks.values(), *optimizer._optimizer_step_pre_hooks.values()):
            hook(optimizer, (closure,) if closure else (), {})
        if self._adam is None and not is_separable(optimizer):
            self.before_change(None)
            loss = as_is(optimizer, closure)
        else:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            if self._mode != "backward":
                self.before_change(None)  # here, where Ctrl-C ends the wait
            self._update_all()
            self._unstepped = False
        self._sort_state()
        self.steps += 1  # before the hooks: one of them may save a checkpoint
        self.on_step()
        for hook in (*optimizer._optimizer_step_post_hooks.values(), *_global_optimizer_post_hooks.values()):
            hook(optimizer, (closure,) if closure else (), {})
        return loss

    def _sort_state(self) -> None:
        """New entries of ``optimizer.state`` in the order of the parameters, in whichever order units were updated."""
        state = self.optimizer.state
        if len(state) != len(self._states_seen):
            for parameter in [p for p in self._held() if p in state and id(p) not in self._states_seen]:
                state[parameter] = state.pop(parameter)
                self._states_seen.add(id(parameter))

    @locked  # not the closure, whose backward runs on another thread
    @torch.no_grad()
    def _update_all(self) -> None:
        self._refuse_thawed()
        self._refuse_unknown()
        if self._states is not None:
            self._states.heed()
        for home in self._gradients.homes:
            for place in home.unit.trained:
                self._gradients.fold(place)
            if home.present or any(has_sparse_grad(place) for place in home.unit.trained):
                self._update(home, self._hyper_of(home.unit))
        if self._states is not None:
            self._states.count()
        others = [p for p in self._held() if id(p) not in self._place and p.grad is not None]
        if others:  # left on the device, added since, or not the model's
            self._shadow.run([(p, p) for p in others])
        if self._mode == "serial":
            self.join_all()
        self._parameters.end_step()
        self._parameters.load_ahead()

    def _refuse_thawed(self) -> None:
        """Parameters that were frozen when streaming began have no room for gradients and states."""
        for unit in self._units:
            for place in unit.places[len(unit.trained) :]:
                if real_grad(place) is not None and place.index in self._hyper_of(unit):
                    raise StormError(
                        f"Cannot update {place.name!r}: it was frozen when streaming began. Close the session and call "
                        "storm.stream again."
                    )

    def _refuse_unknown(self) -> None:
        """Our own kernels were chosen when streaming began; what they do not know has to be known by then."""
        setting = _beyond_our_adam(self.optimizer, self._place) if self._adam is not None else None
        if setting is not None:
            raise StormError(
                f"Cannot step: a parameter group with streamed parameters has {setting}. Streaming began without it, "
                "and with kernels that do not know it. Take it back, or close the session, set it then, and call "
                "storm.stream again."
            )

    def _held(self) -> list[nn.Parameter]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _update(self, home: GradHome, mine: dict[int, dict[str, Any]]) -> None:
        self.before_change(home.unit)
        if self._adam is not None:
            if any(has_sparse_grad(place) for place in home.unit.trained):
                raise StormError("Adam does not support sparse gradients. Use SparseAdam, SGD or Adagrad.")
            self._adam.update(home, mine)
            self._note_change(home, mine)
            return
        places: list[tuple[Place, torch.Tensor]] = []
        for place in home.unit.trained:
            grad = real_grad(place) if has_sparse_grad(place) else None
            if grad is None and place.index in home.present:
                grad = home.view(place)
            if grad is not None and place.index in mine:
                places.append((place, grad))
        if not places:
            return
        home.join()
        last_load = self._parameters.residences[home.unit.index].last_load
        if last_load is not None:
            last_load.synchronize()  # it may still be reading the weights
        self._generic.update(places)
        self._parameters.changed(home.unit, by_step=True)
        self._note_change(home, mine)

    def _note_change(self, home: GradHome, mine: dict[int, dict[str, Any]]) -> None:
        """For autograd: graphs that have saved these parameters, outside of the model, must not be run any more."""
        with without_torch_function():
            torch.autograd.graph.increment_version(
                [place.parameter for place in home.unit.trained if place.index in home.present and place.index in mine]
            )

    def _consume(self, home: GradHome) -> None:
        """For step="backward": update the unit now, from gradients that have just been sent home."""
        mine = self._consumable(home)
        if mine is not None:
            if self._states is not None:
                self._states.heed(home.unit)
            with torch.no_grad():
                self._update(home, mine)
            self._consumed(home)

    def _update_here(self, home: GradHome, bucket: torch.Tensor) -> bool:
        """For step="backward": update the unit now, on the device, if that is where it belongs."""
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
            if residence.updates != updates:  # perhaps in part, before an error: it cannot be taken back either
                self._note_change(home, mine)
                self._consumed(home)
        return True

    def _consumable(self, home: GradHome) -> dict[int, dict[str, Any]] | None:
        """The unit's hyperparameters; None if not all its gradients are the optimizer's: users may read them."""
        if not self._unstepped:  # before the first unit changes
            self._refuse_unknown()
        mine = self._hyper_of(home.unit)
        return mine if all(index in mine for index in home.present) else None

    def _consumed(self, home: GradHome) -> None:
        home.consumed_places |= home.present
        home.present.clear()
        home.norms.clear()
        home.consumed = self._unstepped = True

    def _hyper_of(self, unit: Unit) -> dict[int, dict[str, Any]]:
        """The parameter groups of a unit's parameters, by place, as they are now."""
        groups = self.optimizer.param_groups
        key = tuple(id(item) for group in groups for item in (group, *group["params"]))
        if key != self._groups_key:  # once, unless user code changes the groups: this runs for every unit of a backward
            self._group = {id(parameter): group for group in groups for parameter in group["params"]}
            self._groups_key = key
        found = ((place.index, self._group.get(id(place.parameter))) for place in unit.places)
        return {index: group for index, group in found if group is not None}

    # --- gradients

    def zero_grad(self, set_to_none: bool = True) -> None:
        """``optimizer.zero_grad``; with ``set_to_none`` it waits for nothing."""
        self.before_dropping()
        if not set_to_none:
            type(self.optimizer).zero_grad(self.optimizer, set_to_none=False)
            return
        held = {id(parameter): parameter for parameter in self._held()}
        everything = all(id(place.parameter) in held for unit in self._units for place in unit.trained)
        if everything:
            self._gradients.clear()
        else:
            self.apply_factor()  # the others keep their gradients
        for key, parameter in held.items():
            place = self._place.get(key)
            if place is None:
                parameter.grad = None
            elif not everything or (not place.trained and real_grad(place) is not None):
                self._gradients.set_grad(place, None)
        if self._adam is not None:
            self._adam.forget_factor()

    @locked
    def before_dropping(self) -> None:
        """Gradients that backward has used are to go. Without a step() before, that skips nothing: say so, once."""
        if not self._unstepped:
            return
        self._unstepped = False
        if self._states is not None:
            self._states.count()  # what was updated counts, if training goes on from here
        updated = sum(home.consumed for home in self._gradients.homes)
        raise StormError(
            f'step="backward" has updated {updated} of {len(self._units)} units while their gradients arrived, and '
            "optimizer.step() was not called since: the weights are those of a half-done step, and it cannot be "
            'taken back. Load a checkpoint, or call zero_grad() again to go on from here. Use step="forward" (what '
            '"auto" takes) to skip steps.'
        )

    def clip_grad_norm_(self, parameters: list[nn.Parameter], max_norm: float) -> torch.Tensor | None:
        """Clip without waiting, if that is possible; None if it is not."""
        if self._adam is None:
            return None
        if self._mode == "backward":
            raise StormError(
                'Cannot clip: step="backward" has used the gradients, unit by unit, before their norm was known. '
                'Use step="forward" (what "auto" takes) to clip.'
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
        self.before_change(unit)  # which is known only after we have been made

    def _take_state(self, _optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        if self.released:
            return None
        self.join_all()
        self.before_change(None)
        if self._masters is not None:
            return self._masters.take(self.optimizer, state_dict)
        if self._adam is None:
            return None
        streamed = {number for number, parameter in enumerate(self._held()) if id(parameter) in self._place}
        states = state_dict["state"]
        # torch would cast these to the parameters' dtype and device
        self._before_load = {number: state for number, state in states.items() if number in streamed}
        return {**state_dict, "state": {number: state for number, state in states.items() if number not in streamed}}

    def _install_state(self, optimizer: torch.optim.Optimizer) -> None:
        if self.released:
            return
        self._unstepped = False  # who loads begins anew
        if self._masters is not None:
            self._masters.install(optimizer)
        if self._states is None:
            return
        numbered = self._held()
        states = {numbered[key]: dict(value) for key, value in self._before_load.items()}
        self._before_load = {}
        for parameter, state in states.items():
            if not self._place[id(parameter)].trained:
                optimizer.state[parameter] = state
        self._states.take_all(states)

    # --- for checkpoints

    @locked
    def settle(self) -> None:
        """Block until home memory has the present weights and states, and what user code put into the state."""
        if self._states is not None:
            self._states.heed()
        self.join_all()

    def master(self, place: Place) -> torch.Tensor | None:
        """The master of a parameter that torch's own step updates, if it has one."""
        return self._generic.master(place)

    def new_master(self, place: Place) -> torch.Tensor | None:
        """The same, made where there is none yet; None if the parameter needs none."""
        return self._generic.new_master(place)

    def forget_master(self, place: Place) -> None:
        self._generic.forget_master(place)

    @locked
    def replace_states(self, states: dict[Any, dict[str, Any]]) -> None:
        """Make these the states. Where our own kernels run, moments and masters are in home memory already."""
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

    def join(self, unit: Unit, *, states: bool = False) -> None:
        """Block until the unit's weights at home are up to date; with ``states``, the optimizer's too."""
        if self._adam is not None:
            (self._adam.join_states if states else self._adam.join)(unit)

    def join_all(self) -> None:
        for unit in self._units:
            self.join(unit, states=True)

    def apply_factor(self) -> None:
        """Somebody looks at gradients that were clipped, but not yet scaled."""
        if self._adam is not None:
            self._adam.apply_factor()

    def forget_factor(self) -> None:
        """The gradients that were clipped are gone."""
        if self._adam is not None:
            self._adam.forget_factor()

    def before_rewrite(self, place: Place) -> None:
        """The user is about to change a parameter."""
        if self._adam is not None and place.trained and place.is_split:
            self._adam.join_states(place.unit)
            self._images_before[id(place.parameter)] = plain(place.parameter).detach().clone()

    def rewritten(self, place: Place) -> None:
        """The user has changed a parameter: masters follow, where the weight is another one now."""
        self._generic.rewritten(place)
        before = self._images_before.pop(id(place.parameter), None)
        if self._adam is not None and before is not None:
            image = plain(place.parameter).detach()
            master = self._adam.homes[place.unit.index].master(place)
            assert master is not None
            other = torch.zeros_like(master) if place.dtype == torch.bfloat16 else image.to(master.dtype)
            master.copy_(torch.where(image == before, master, other))

    def release(self) -> None:
        """Give the optimizer back, with its state in ordinary tensors of the parameters' dtypes."""
        if self.released:
            return
        self.released = True
        for hook in self._hooks:
            hook.remove()
        for name in _OWN:
            if name in self._previous:
                setattr(self.optimizer, name, self._previous[name])
            elif name in vars(self.optimizer):
                value = vars(self.optimizer)[name]
                if name == "_step_supports_amp_scaling" or isinstance(value, types.MethodType):
                    delattr(self.optimizer, name)  # a wrapper that a scheduler made stays, and falls through
        if self._states is not None:
            if self._unstepped:
                self._states.count()
            self._states.make_ordinary()
