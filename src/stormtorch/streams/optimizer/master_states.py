"""Masters in ``state_dict`` and ``load_state_dict`` of an optimizer that runs torch's own step.

torch casts the states that it loads to the parameter's dtype. In a session they belong to the fp32 master and keep the
dtype in which they were saved; the master itself is one of them, as ``"master"``. States from before the session, and
those that torch will use after it, have the parameter's dtype and are cast."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..home.parameter import plain
from ..units.unit import Place, Unit
from .masters import MASTER
from .param_groups import ParamGroups
from .torch_step import TorchStep

_NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})  # beside the states of NAdam, ASGD and others: torch's fp32


class MasterStates:
    """The parameters of a session that have masters of their own, for torch's hooks."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, torch_step: TorchStep, groups: ParamGroups, units: list[Unit]
    ) -> None:
        self._optimizer, self._torch_step, self._groups = optimizer, torch_step, groups
        self._place = {id(p.parameter): p for unit in units for p in unit.trained if p.is_split}
        self._taken: dict[int, dict[str, Any]] = {}

    def take_all(self) -> None:
        """Convert existing states to fp32, for the masters."""
        for parameter, state in self._present():
            self._optimizer.state[parameter] = {key: _for_master(key, value) for key, value in state.items()}

    def make_ordinary(self) -> None:
        """Convert states back to the parameters' dtypes, one parameter at a time: both forms together may not fit."""
        for parameter, state in self._present():
            for key, value in state.items():
                if key not in _NUMBERS and isinstance(value, torch.Tensor) and value.is_floating_point():
                    state[key] = value.to(parameter.dtype)

    def _present(self) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
        for place in self._place.values():
            if state := self._optimizer.state.get(place.parameter):
                yield place.parameter, state

    def after_saving(self, state_dict: dict[str, Any]) -> None:
        """Add the masters to a dict that ``state_dict`` has made."""
        for number, place in self._numbered():
            master = self._torch_step.master(place)
            if master is not None:
                state_dict["state"][number] = {**state_dict["state"].get(number, {}), MASTER: master}

    def before_loading(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Hide the masters' states from ``load_state_dict``."""
        mine = {number for number, _ in self._numbered()}
        states = state_dict["state"]
        self._taken = {number: states[number] for number in mine if number in states}
        return {**state_dict, "state": {number: state for number, state in states.items() if number not in mine}}

    def after_loading(self) -> list[Place]:
        """Install the hidden states. Returns no places: weights written later do not affect these masters."""
        taken, self._taken = self._taken, {}
        for number, place in self._numbered():
            state = {key: _for_master(key, value) for key, value in taken.get(number, {}).items()}
            master = state.pop(MASTER, None)
            self._torch_step.forget_master(place)
            if master is not None:
                room = self._torch_step.new_master(place)
                assert room is not None
                with torch.no_grad():
                    room.copy_(master)
            self._optimizer.state.pop(place.parameter, None)
            if state:
                self._optimizer.state[place.parameter] = state
        return []

    def _numbered(self) -> Iterator[tuple[int, Place]]:
        for number, parameter in enumerate(self._groups.parameters()):
            if id(parameter) in self._place:
                yield number, self._place[id(parameter)]


def _for_master(key: str, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    value = plain(value).detach().to("cpu", copy=True)
    return value.float() if key != "step" and value.is_floating_point() else value
