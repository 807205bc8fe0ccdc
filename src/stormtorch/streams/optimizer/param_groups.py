"""The current parameter groups of the user's optimizer: user code adds groups and parameters at any time."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import nn

from ..units.unit import Unit


class ParamGroups:
    """Which parameters an optimizer holds, and in which group each is."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._group: dict[int, dict[str, Any]] = {}  # by parameter
        self._key: list[list[int]] = []

    def parameters(self) -> list[nn.Parameter]:
        """All of them, in the order of their numbers in a state dict."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def without(
        self, state_dict: dict[str, Any], mine: Container[int]
    ) -> tuple[dict[str, Any], dict[nn.Parameter, dict[str, Any]]]:
        """A state dict without the states of ``mine``, parameters by id; and these states by parameter."""
        states, taken = dict(state_dict["state"]), {}
        for number, parameter in enumerate(self.parameters()):
            if id(parameter) in mine and number in states:
                taken[parameter] = states.pop(number)
        return {**state_dict, "state": states}, taken

    def of(self, unit: Unit) -> dict[int, dict[str, Any]]:
        """The groups of a unit's parameters, by place; without parameters that the optimizer does not have."""
        groups = self.optimizer.param_groups
        key = [list(map(id, (group, *group["params"]))) for group in groups]
        if key != self._key:  # once, unless user code changes the groups: this runs for every unit of a backward
            self._group = {id(parameter): group for group in groups for parameter in group["params"]}
            self._key = key
        found = ((place.index, self._group.get(id(place.parameter))) for place in unit.places)
        return {index: group for index, group in found if group is not None}
