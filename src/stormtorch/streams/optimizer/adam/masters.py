"""Updates the masters of our own Adam when user code or a checkpoint writes the weights.

A master is the fp32 weight behind a bf16 or fp16 image. An update reads the master, not the image: without this, the
next step would undo what was written to the image.

The optimizer's state dict may be loaded before the model's. The loaded masters must then survive the write of the
weights that they belong to. An fp32 master shows by itself that it rounds to the new weight. A 16-bit remainder does
not, so we note that it was loaded while the weight was still the result of an update."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ...home.parameter import plain
from ...units.unit import Place
from ..updater import MASTER, Updater
from .home import AdamHome
from .state_home import StateHome


class Masters:
    """The masters of a session's parameters, in home memory."""

    def __init__(self, homes: list[AdamHome], state_home: StateHome, updater: Updater) -> None:
        self._homes, self._state_home, self._updater = homes, state_home, updater
        self._images_before: dict[int, torch.Tensor] = {}
        self._written_at: dict[int, int] = {}  # by parameter: its steps when user code last wrote it
        self._ahead_at: dict[int, int] = {}  # the same, when a master was loaded whose weight is still to come

    def before_rewrite(self, place: Place) -> None:
        """Prepare for a write of user code to a parameter."""
        if place.trained and place.is_split:
            self._updater.join_states(place.unit)
            self._images_before[id(place.parameter)] = plain(place.parameter).detach().clone()

    def rewritten(self, place: Place) -> None:
        """Let masters follow a write of user code, where the weight has changed."""
        before = self._images_before.pop(id(place.parameter), None)
        if before is not None:
            image = plain(place.parameter).detach()
            master = self._state_home.shown(place)[MASTER]
            steps = self._written_at[id(place.parameter)] = self._steps(place)
            if self._ahead_at.pop(id(place.parameter), None) == steps:
                return  # this write brings the master's own weight
            if place.dtype == torch.bfloat16:
                master.copy_(torch.where(image == before, master, torch.zeros_like(master)))
            else:
                fits = (image == before) | (master.to(place.dtype) == image)
                master.copy_(torch.where(fits, master, image.to(master.dtype)))
            self._state_home.written(place)

    def is_ahead(self, place: Place) -> bool:
        """Whether the master says more than the weight, which is then not all of an update's result."""
        master, image = self._state_home.shown(place)[MASTER], plain(place.parameter).detach()
        ahead = master != 0 if place.dtype == torch.bfloat16 else master != image.to(master.dtype)
        return bool(ahead.any())

    def loading(self) -> set[int]:
        """Prepare for loading an optimizer's state dict. Returns the parameters, by ``id``, whose weights an update
        wrote last: their new weights may be loaded after their masters."""
        places = [place for home in self._homes for place in home.unit.trained if place.dtype == torch.bfloat16]
        return {id(p.parameter) for p in places if self._written_at.get(id(p.parameter)) != self._steps(p)}

    def loaded(self, places: Iterable[Place], not_written: set[int]) -> None:
        """Take note of ``places`` whose masters were loaded; ``not_written`` is what `loading` returned."""
        steps = {id(place.parameter): self._steps(place) for place in places if place.trained}
        self._ahead_at = {key: count for key, count in steps.items() if key in not_written}
        self._written_at = {key: count for key, count in steps.items() if key not in not_written}

    def _steps(self, place: Place) -> int:
        return self._homes[place.unit.index].steps[place.index]

    def reset(self, place: Place) -> None:
        """Make the master equal to the weight."""
        self._ahead_at.pop(id(place.parameter), None)
        if place.trained and place.is_split:
            master = self._state_home.shown(place)[MASTER]
            if place.dtype == torch.bfloat16:
                master.zero_()
            else:
                master.copy_(plain(place.parameter).detach())
            self._state_home.written(place)
