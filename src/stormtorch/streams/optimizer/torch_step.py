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
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ..bridge.torch_private import without_torch_function
from ..gradients.home import GradHome
from ..home.parameter import HomeParameter, alone
from ..home.torch_grad import has_sparse_grad, real_grad
from ..units.unit import Place
from ..weights.stream import ParameterStream
from .patch import users_own, without_hooks

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

    def __init__(self, optimizer: torch.optim.Optimizer, own_names: Iterable[str]) -> None:
        """``own_names``: attributes that streaming has put on the instance; the shadow must not have them."""
        self._optimizer, self._own_names = optimizer, frozenset(own_names)
        self._step: Callable[[Any], Any] = without_hooks(type(optimizer).step)  # hooks run once for the whole step

    def run(self, pairs: list[tuple[nn.Parameter, nn.Parameter]]) -> None:
        """Update the second of each pair with the state of the first."""
        optimizer = self._optimizer
        shadow: Any = object.__new__(type(optimizer))
        shadow.__dict__.update({k: v for k, v in vars(optimizer).items() if k not in self._own_names})
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


class TorchStep:
    """Runs a separable optimizer on home memory, on the calling thread."""

    def __init__(self, shadow: Shadow, parameters: ParameterStream, *, masters: bool) -> None:
        self._shadow, self._parameters, self._masters = shadow, parameters, masters
        self._stand_ins: dict[int, nn.Parameter] = {}

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
        """Let the master follow weights that user code has changed, where it differs."""
        stand_in = self._stand_ins.get(id(place.parameter))
        if stand_in is not None and stand_in.dtype != place.dtype:
            with torch.no_grad(), without_torch_function():
                image = place.parameter.data
                stand_in.copy_(torch.where(stand_in.to(place.dtype) == image, stand_in, image.to(stand_in.dtype)))

    def master(self, place: Place) -> torch.Tensor | None:
        """The parameter's master, made with its first update; None if it has none."""
        stand_in = self._stand_ins.get(id(place.parameter))
        return stand_in.detach() if stand_in is not None and stand_in.dtype != place.dtype else None

    def new_master(self, place: Place) -> torch.Tensor | None:
        """The parameter's master, made from the weights if there is none yet."""
        if not (self._masters and place.is_split):
            return None
        return self._stand_in(place).detach()

    def forget_master(self, place: Place) -> None:
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
    assert all(
        isinstance(p, (HomeParameter, nn.Parameter)) for group in optimizer.param_groups for p in group["params"]
    )
    step = own_step or functools.partial(without_hooks(type(optimizer).step), optimizer)
    return step(closure) if closure else step()
