"""Masters follow the weights that others write: user code in place, or a checkpoint.

A master is the fp32 weight behind a bf16 or fp16 image, kept by our own Adam in home memory or by torch's own step. An
update reads the master, not the image: without this, what was written there would be undone by the next step.

The optimizer's state dict may be loaded before the model's. The masters are then there already when the weights that
they belong to are written, and have to outlive that. An fp32 master tells by itself that it rounds to the new weight; a
16-bit remainder does not, so it is remembered that it was loaded while the weight was still an update's."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..home.parameter import plain
from ..units.unit import Place, Unit
from .adam import AdamStream
from .torch_step import TorchStep

MASTER = "master"  # its name among the states of a parameter, in state dicts and checkpoints


class Masters:
    """The masters of a session's parameters, whoever keeps them."""

    def __init__(self, adam: AdamStream | None, torch_step: TorchStep) -> None:
        self._adam, self._torch_step = adam, torch_step
        self._images_before: dict[int, torch.Tensor] = {}
        self._written_at: dict[int, int] = {}  # by parameter: its steps when user code last wrote it
        self._ahead_at: dict[int, int] = {}  # the same, when a master was loaded that is ahead of its weight

    def before_rewrite(self, place: Place) -> None:
        """The user is about to change a parameter."""
        if self._adam is not None and place.trained and place.is_split:
            self._adam.join_states(place.unit)
            self._images_before[id(place.parameter)] = plain(place.parameter).detach().clone()

    def rewritten(self, place: Place) -> None:
        """The user has changed a parameter: masters follow, where the weight is another one now."""
        self._torch_step.rewritten(place)
        before = self._images_before.pop(id(place.parameter), None)
        if self._adam is not None and before is not None:
            image = plain(place.parameter).detach()
            master = self._adam.homes[place.unit.index].master(place)
            assert master is not None
            steps = self._written_at[id(place.parameter)] = self._steps(place)
            if self._ahead_at.pop(id(place.parameter), None) == steps:
                return  # the weight that it belongs to has come
            if place.dtype == torch.bfloat16:
                master.copy_(torch.where(image == before, master, torch.zeros_like(master)))
            else:
                fits = (image == before) | (master.to(place.dtype) == image)
                master.copy_(torch.where(fits, master, image.to(master.dtype)))

    def loading(self, units: list[Unit]) -> set[int]:
        """An optimizer's state dict is about to be loaded. Returns the parameters, by ``id``, whose weights are an
        update's: what they belong to may come after their masters."""
        places = [place for unit in units for place in unit.trained if place.dtype == torch.bfloat16 and place.is_split]
        if self._adam is None:
            return set()
        return {id(p.parameter) for p in places if self._written_at.get(id(p.parameter)) != self._steps(p)}

    def loaded(self, places: Iterable[Place], not_written: set[int]) -> None:
        """The masters of ``places`` were in it; ``not_written`` is what `loading` returned."""
        steps = {id(place.parameter): self._steps(place) for place in places if place.trained}
        self._ahead_at = {key: count for key, count in steps.items() if key in not_written}
        self._written_at = {key: count for key, count in steps.items() if key not in not_written}

    def _steps(self, place: Place) -> int:
        assert self._adam is not None
        return self._adam.homes[place.unit.index].steps[place.index]

    def reset(self, place: Place) -> None:
        """The master is what the weight is."""
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
