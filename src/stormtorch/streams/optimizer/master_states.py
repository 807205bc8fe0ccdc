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
from .param_groups import ParamGroups
from .updater import MASTER, ShownStates, Updater

_NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})  # beside the states of NAdam, ASGD and others: torch's fp32


class MasterStates(ShownStates):
    """The parameters of a session that have masters of their own, for torch's hooks."""

    def __init__(self, updater: Updater, groups: ParamGroups, units: list[Unit]) -> None:
        self._optimizer, self._updater, self._groups = groups.optimizer, updater, groups
        self._place = {id(p.parameter): p for unit in units for p in unit.trained if p.is_split}
        self._taken: dict[nn.Parameter, dict[str, Any]] = {}

    def take_over(self) -> None:
        """Convert existing states to fp32, for the masters."""
        for parameter, state in self._present():
            self._optimizer.state[parameter] = {key: _for_master(key, value) for key, value in state.items()}

    def before_release(self) -> None:
        """Convert states back to the parameters' dtypes, one parameter at a time: both forms together may not fit."""
        for parameter, state in self._present():
            for key, value in state.items():
                if key not in _NUMBERS and isinstance(value, torch.Tensor) and value.is_floating_point():
                    state[key] = value.to(parameter.dtype)

    def _present(self) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
        for place in self._place.values() if self._updater.by_unit else ():  # otherwise torch uses them as they are
            if state := self._optimizer.state.get(place.parameter):
                yield place.parameter, state

    def after_saving(self, state_dict: dict[str, Any]) -> None:
        """Add the masters to a dict that ``state_dict`` has made."""
        for number, place in self._numbered():
            state = self._updater.state_of(place, state_dict["state"].get(number))
            if state is not None:
                state_dict["state"][number] = state

    def before_loading(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Hide the masters' states from ``load_state_dict``."""
        rest, self._taken = self._groups.without(state_dict, self._place)
        return rest

    def after_loading(self) -> None:
        taken, self._taken = self._taken, {}
        for _, place in self._numbered():
            state = {key: _for_master(key, value) for key, value in taken.get(place.parameter, {}).items()}
            master = state.pop(MASTER, None)
            self._updater.reset_master(place)
            if master is not None:
                room = self._updater.new_master(place)
                assert room is not None
                with torch.no_grad():
                    room.copy_(master)
            self._optimizer.state.pop(place.parameter, None)
            if state:
                self._optimizer.state[place.parameter] = state

    def _numbered(self) -> Iterator[tuple[int, Place]]:
        for number, parameter in enumerate(self._groups.parameters()):
            if id(parameter) in self._place:
                yield number, self._place[id(parameter)]


def _for_master(key: str, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    value = plain(value).detach().to("cpu", copy=True)
    return value.float() if key != "step" and value.is_floating_point() else value
