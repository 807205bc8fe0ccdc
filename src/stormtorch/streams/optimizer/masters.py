"""Updates masters when user code or a checkpoint writes the weights.

A master is the fp32 weight behind a bf16 or fp16 image, kept by our own Adam in home memory or by torch's own step. An
update reads the master, not the image: without this, the next step would undo what was written to the image.

The optimizer's state dict may be loaded before the model's. The loaded masters must then survive the write of the
weights that they belong to. An fp32 master shows by itself that it rounds to the new weight. A 16-bit remainder does
not, so we note that it was loaded while the weight was still the result of an update."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..home.parameter import plain
from ..units.unit import Place, Unit
from .adam import AdamStream
from .torch_step import TorchStep

MASTER = "master"  # its name among the states of a parameter, in state dicts and checkpoints


class Masters:
    """The masters of a session's parameters, kept by our own Adam or by torch's step."""

    def __init__(self, adam: AdamStream | None, torch_step: TorchStep) -> None:
        self._adam, self._torch_step = adam, torch_step
        self._images_before: dict[int, torch.Tensor] = {}
        self._written_at: dict[int, int] = {}  # by parameter: its steps when user code last wrote it
        self._ahead_at: dict[int, int] = {}  # the same, when a master was loaded whose weight is still to come

    def before_rewrite(self, place: Place) -> None:
        """Prepare for a write of user code to a parameter."""
        if self._adam is not None and place.trained and place.is_split:
            self._adam.join_states(place.unit)
            self._images_before[id(place.parameter)] = plain(place.parameter).detach().clone()

    def rewritten(self, place: Place) -> None:
        """Let masters follow a write of user code, where the weight has changed."""
        self._torch_step.rewritten(place)
        before = self._images_before.pop(id(place.parameter), None)
        if self._adam is not None and before is not None:
            image = plain(place.parameter).detach()
            master = self._adam.homes[place.unit.index].master(place)
            assert master is not None
            steps = self._written_at[id(place.parameter)] = self._steps(place)
            if self._ahead_at.pop(id(place.parameter), None) == steps:
                return  # this write brings the master's own weight
            if place.dtype == torch.bfloat16:
                master.copy_(torch.where(image == before, master, torch.zeros_like(master)))
            else:
                fits = (image == before) | (master.to(place.dtype) == image)
                master.copy_(torch.where(fits, master, image.to(master.dtype)))

    def loading(self, units: list[Unit]) -> set[int]:
        """Prepare for loading an optimizer's state dict. Returns the parameters, by ``id``, whose weights an update
        wrote last: their new weights may be loaded after their masters."""
        places = [place for unit in units for place in unit.trained if place.dtype == torch.bfloat16 and place.is_split]
        if self._adam is None:
            return set()
        return {id(p.parameter) for p in places if self._written_at.get(id(p.parameter)) != self._steps(p)}

    def loaded(self, places: Iterable[Place], not_written: set[int]) -> None:
        """Take note of ``places`` whose masters were loaded; ``not_written`` is what `loading` returned."""
        steps = {id(place.parameter): self._steps(place) for place in places if place.trained}
        self._ahead_at = {key: count for key, count in steps.items() if key in not_written}
        self._written_at = {key: count for key, count in steps.items() if key not in not_written}

    def _steps(self, place: Place) -> int:
        assert self._adam is not None
        return self._adam.homes[place.unit.index].steps[place.index]

    def reset(self, place: Place) -> None:
        """Make the master equal to the weight."""
        self._ahead_at.pop(id(place.parameter), None)
        if self._adam is not None and place.trained:
            master = self._adam.homes[place.unit.index].master(place)
            if master is not None:
                if place.dtype == torch.bfloat16:
                    master.zero_()
                else:
                    master.copy_(plain(place.parameter).detach())
        else:
            self._torch_step.forget_master(place)
