"""The device views with a graph node that the running pass has made, and what becomes of them without a device copy."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..bridge.torch_private import holders


class GraphTwins:
    """The twins with a graph in the running pass: one node for each unit, as a parameter is one leaf.

    Autograd adds up the gradients of a node use by use, from the last to the first. If a unit that left the device
    between two uses had two nodes, each would add up its own, and the rounding would depend on the budget. So twins
    outlive the device copy that they show: they let go of its memory and are pointed at the next one. A twin that user
    code or autograd holds as well keeps its memory until they release it.
    """

    def __init__(self, nothing: torch.Tensor) -> None:
        """``nothing``: an empty tensor on the device. Made beforehand: else it counts as an operation of a block."""
        self._nothing = nothing
        self._known: dict[int, dict[int, torch.Tensor]] = {}  # unit -> place -> twin
        self._away: set[int] = set()  # units whose twins show no device copy, or a dropped one
        self._held: list[tuple[int, int]] = []  # unit and place of twins that still show a dropped one

    def clear(self) -> None:
        """The pass has ended."""
        self._known.clear()
        self._away.clear()
        self._held.clear()

    def add(self, unit: int, twins: dict[int, torch.Tensor]) -> None:
        self._known[unit] = twins

    def find(self, unit: int, views: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """The unit's twins by place, pointed at ``views``; empty if it has none yet."""
        twins = self._known.get(unit, {})
        if unit in self._away:
            self._away.discard(unit)
            self._held = [held for held in self._held if held[0] != unit]
            for place, twin in twins.items():
                twin.data = views[place]
        return twins

    def let_go(self, unit: int) -> None:
        """Release the bytes of the unit's device copy, which is being dropped."""
        twins = self._known.get(unit)
        if twins is not None and unit not in self._away:
            self._away.add(unit)
            self._held += [(unit, place) for place in twins]
        self._held = [(number, place) for number, place in self._held if not self._emptied(self._known[number], place)]

    def _emptied(self, twins: dict[int, torch.Tensor], place: int) -> bool:
        if holders(twins, place) != _ALONE:
            return False
        with torch.inference_mode(False):
            twins[place].data = self._nothing.view(twins[place].dtype)
        return True


_ALONE = holders({0: torch.empty(0)}, 0)
