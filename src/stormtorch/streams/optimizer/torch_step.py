"""Runs every optimizer other than Adam: the user's own, unit by unit on home memory.

The optimizer's class does the arithmetic, on tensors of the parameters' own shapes, so that matrix optimizers see
matrices. It works on a *shadow* of the user's optimizer: the same attributes and the same state, but only one unit's
parameters. For models in bf16 or fp16 these are fp32 masters, from which the image is rounded afterwards.

The update of a parameter must not depend on other parameters. That holds for all of ``torch.optim`` except LBFGS.
LBFGS, unknown optimizers and those whose ``step`` the user has set are called as they are, on all parameters.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..bridge.torch_private import without_torch_function
from ..gradients.home import GradHome
from ..home.parameter import Access, alone
from ..home.torch_grad import has_sparse_grad, real_grad
from ..units.unit import Place, Unit
from ..weights.stream import ParameterStream
from .master_states import MasterStates
from .param_groups import ParamGroups
from .patch import PUT_ON, users_own, without_hooks
from .updater import MASTER, ShownStates, Snapshot, Updater

_WHEN = ("pre", "post")


def is_whole(optimizer: object) -> bool:
    """Whether it has all that ``Optimizer.__init__`` gives: some optimizers that wrap another do not."""
    hooks = (f"_optimizer_{kind}_{when}_hooks" for kind in ("step", "state_dict", "load_state_dict") for when in _WHEN)
    needed = ("param_groups", "state", *hooks)
    return isinstance(optimizer, torch.optim.Optimizer) and all(hasattr(optimizer, name) for name in needed)


def is_separable(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it may run one unit at a time. Call this before our own step is put on it."""
    known = type(optimizer).__module__.startswith("torch.optim") and not isinstance(optimizer, torch.optim.LBFGS)
    return known and users_own(optimizer, "step") is None


class Shadow:
    """The user's optimizer, restricted to some parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._step: Callable[[Any], Any] = without_hooks(type(optimizer).step)  # hooks run once for the whole step

    def run(self, pairs: list[tuple[nn.Parameter, nn.Parameter]]) -> None:
        """Update the second of each pair with the state of the first."""
        optimizer = self._optimizer
        shadow: Any = object.__new__(type(optimizer))
        shadow.__dict__.update({k: v for k, v in vars(optimizer).items() if k not in PUT_ON})
        shadow._optimizer_step_pre_hooks = OrderedDict()
        shadow._optimizer_step_post_hooks = OrderedDict()
        stand_in = {id(parameter): other for parameter, other in pairs}
        shadow.param_groups = [
            {**group, "params": [stand_in[id(p)] for p in group["params"] if id(p) in stand_in]}
            for group in optimizer.param_groups
        ]
        shadow.param_groups = [group for group in shadow.param_groups if group["params"]]
        for group in shadow.param_groups:
            if group.get("capturable") and all(p.device.type == "cpu" for p in group["params"]):
                group["capturable"] = False  # only for CUDA graphs; torch refuses it in RAM
        shadow.state = defaultdict(dict)
        for parameter, other in pairs:
            if parameter in optimizer.state:
                shadow.state[other] = optimizer.state[parameter]
        self._step(shadow)
        for parameter, other in pairs:
            if other in shadow.state:
                optimizer.state[parameter] = shadow.state[other]


class TorchStep(Updater):
    """Runs a separable optimizer on home memory, on the calling thread."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, units: list[Unit], parameters: ParameterStream, *, masters: bool
    ) -> None:
        self._shadow, self._units, self._parameters, self._masters = Shadow(optimizer), units, parameters, masters
        self._stand_ins: dict[int, nn.Parameter] = {}
        self.by_unit = is_separable(optimizer)

    def states(self, groups: ParamGroups, _access: Access, _snapshot: Snapshot) -> ShownStates:
        return MasterStates(self, groups, self._units) if self._masters else ShownStates()

    def update(self, grads: GradHome, hyper: dict[int, dict[str, Any]]) -> None:
        """Update the unit's parameters that have a gradient and are in ``hyper`` (by index), and wait for it."""
        places: list[tuple[Place, torch.Tensor]] = []
        for place in grads.unit.trained:
            grad = real_grad(place) if has_sparse_grad(place) else None
            if grad is None and place.index in grads.present:
                grad = grads.view(place)
            if grad is not None and place.index in hyper:
                places.append((place, grad))
        if not places:
            return
        grads.join()
        last_load = self._parameters.residences[grads.unit.index].last_load
        if last_load is not None:
            last_load.synchronize()  # it may still read the weights
        self._run(places)
        self._parameters.changed(grads.unit, by_step=True)

    def _run(self, places: list[tuple[Place, torch.Tensor]]) -> None:
        pairs = []
        for place, grad in places:
            stand_in = self._stand_in(place)
            stand_in.grad = grad.to(stand_in.dtype) if grad.dtype != stand_in.dtype else grad
            pairs.append((place.parameter, stand_in))
        self._shadow.run(pairs)
        for place, _ in places:
            stand_in = self._stand_ins[id(place.parameter)]
            stand_in.grad = None
            if stand_in.dtype != place.dtype:
                with torch.no_grad(), without_torch_function():
                    place.parameter.data.copy_(stand_in)

    def rewritten(self, place: Place) -> None:
        stand_in = self._stand_ins.get(id(place.parameter))
        if stand_in is not None and stand_in.dtype != place.dtype:
            with torch.no_grad(), without_torch_function():
                image = place.parameter.data
                stand_in.copy_(torch.where(stand_in.to(place.dtype) == image, stand_in, image.to(stand_in.dtype)))

    def state_of(self, place: Place, shown: dict[str, Any] | None) -> dict[str, Any] | None:
        stand_in = self._stand_ins.get(id(place.parameter))
        if stand_in is None or stand_in.dtype == place.dtype:
            return shown
        return {**(shown or {}), MASTER: stand_in.detach()}

    def new_master(self, place: Place) -> torch.Tensor | None:
        if not (self._masters and place.is_split):
            return None
        return self._stand_in(place).detach()

    def reset_master(self, place: Place) -> None:
        """Drop the master; the next update makes a new one from the weights."""
        self._stand_ins.pop(id(place.parameter), None)

    def _stand_in(self, place: Place) -> nn.Parameter:
        key = id(place.parameter)
        if key not in self._stand_ins:
            with without_torch_function():
                home = place.parameter.data
                if self._masters and place.is_split:
                    home = home.float()
                elif home.is_contiguous():
                    home = alone(home)  # torch's add of some sparse tensors counts a view's offset twice
                self._stand_ins[key] = nn.Parameter(home)
        return self._stand_ins[key]


def as_is(
    optimizer: torch.optim.Optimizer, own_step: Callable[..., Any] | None, closure: Callable[[], Any] | None
) -> Any:
    """Run the step of the optimizer's class, or the one that the user has set, on the streamed parameters themselves:
    each access waits for pending work."""
    step = own_step or functools.partial(without_hooks(type(optimizer).step), optimizer)
    return step(closure) if closure else step()
