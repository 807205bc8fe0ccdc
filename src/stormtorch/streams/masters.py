"""Masters follow the weights that others write: user code in place, or a checkpoint.

A master is the fp32 weight behind a bf16 or fp16 image, kept by our own Adam in home memory or by torch's own step. An
update reads the master, not the image: without this, what was written there would be undone by the next step."""

from __future__ import annotations

import torch

from .adam import AdamStream
from .home import plain
from .torch_step import TorchStep
from .unit import Place


class Masters:
    """The masters of a session's parameters, whoever keeps them."""

    def __init__(self, adam: AdamStream | None, torch_step: TorchStep) -> None:
        self._adam, self._torch_step = adam, torch_step
        self._images_before: dict[int, torch.Tensor] = {}

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
            other = torch.zeros_like(master) if place.dtype == torch.bfloat16 else image.to(master.dtype)
            master.copy_(torch.where(image == before, master, other))

    def reset(self, place: Place) -> None:
        """The master is what the weight is."""
        if self._adam is not None and place.trained:
            master = self._adam.homes[place.unit.index].master(place)
            if master is not None:
                if place.dtype == torch.bfloat16:
                    master.zero_()
                else:
                    master.copy_(plain(place.parameter).detach())
        else:
            self._torch_step.forget_master(place)
