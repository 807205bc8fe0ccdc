"""Masters in ``state_dict`` and ``load_state_dict`` of an optimizer that runs torch's own step.

torch casts the states that it loads to the parameter's dtype. Here they belong to the fp32 master, and stay as they
were saved; the master itself is one of them, as ``"master"``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .home import plain
from .torch_step import TorchStep
from .unit import Place, Unit

MASTER = "master"


class MasterStates:
    """The parameters of a session that have masters of their own, seen by torch's hooks."""

    def __init__(self, generic: TorchStep, units: list[Unit]) -> None:
        self._generic = generic
        self._place = {id(p.parameter): p for unit in units for p in unit.trained if p.is_split}
        self._taken: dict[int, dict[str, Any]] = {}

    def add(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        """After ``state_dict()``: the masters too."""
        for number, place in self._numbered(optimizer):
            master = self._generic.master(place)
            if master is not None:
                state_dict["state"][number] = {**state_dict["state"].get(number, {}), MASTER: master}

    def take(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Before ``load_state_dict``: what torch is not to see."""
        mine = {number for number, _ in self._numbered(optimizer)}
        states = state_dict["state"]
        self._taken = {number: states[number] for number in mine if number in states}
        return {**state_dict, "state": {number: state for number, state in states.items() if number not in mine}}

    def install(self, optimizer: torch.optim.Optimizer) -> None:
        """After it: what was taken."""
        taken, self._taken = self._taken, {}
        for number, place in self._numbered(optimizer):
            state = {key: _for_master(key, value) for key, value in taken.get(number, {}).items()}
            master = state.pop(MASTER, None)
            self._generic.forget_master(place)
            if master is not None:
                room = self._generic.new_master(place)
                assert room is not None
                with torch.no_grad():
                    room.copy_(master)
            optimizer.state.pop(place.parameter, None)
            if state:
                optimizer.state[place.parameter] = state

    def _numbered(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, Place]]:
        for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            if id(parameter) in self._place:
                yield number, self._place[id(parameter)]


def _for_master(key: str, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    value = plain(value).detach().to("cpu", copy=True)
    return value.float() if key != "step" and value.is_floating_point() else value
