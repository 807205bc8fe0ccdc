"""Models on the meta device: their parameters get a home when streaming begins, and their values afterwards.

A meta tensor cannot be given memory in place, so its parameter is exchanged for another object, in the modules and in
the optimizer. Values come by ``load_weights``, ``load_state_dict``, ``Session.load``, or any other write; a call of the
model that would compute with a parameter that nobody has written is refused."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from ..core.errors import SettingError, StormError
from .home import plain
from .unit import Place, Unit


class Exchange:
    """What stands in the places of a model's meta parameters."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self._optimizer = optimizer
        self._meta: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # by id of the new one: it, and the meta one
        self._places: list[tuple[nn.Module, str]] = []
        exchanged: dict[int, nn.Parameter] = {}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is None or not parameter.is_meta:
                    continue
                if id(parameter) not in exchanged:
                    zero = torch.zeros((), dtype=parameter.dtype, device="cpu").expand(parameter.shape)
                    new = exchanged[id(parameter)] = nn.Parameter(zero, parameter.requires_grad)
                    self._meta[id(new)] = new, parameter
                module._parameters[name] = exchanged[id(parameter)]
                self._places.append((module, name))
        self._put_into_groups(exchanged)

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._meta

    def undo(self) -> None:
        """Streaming could not begin: the model is on the meta device again, and can be streamed with other settings."""
        for module, name in self._places:
            found = module._parameters.get(name)
            if found is not None and found in self:
                module._parameters[name] = self._meta[id(found)][1]
        self._put_into_groups({new: meta for new, (_, meta) in self._meta.items()})

    def values(self, parameter: nn.Parameter, device: torch.device) -> torch.Tensor:
        """What a parameter that stays on the device begins with: its own values. NaN stands for those that are to come,
        since nobody tells of writes to an ordinary parameter."""
        if parameter not in self:
            return parameter.data.to(device)
        filling = math.nan if parameter.is_floating_point() else 0
        return torch.full(parameter.shape, filling, dtype=parameter.dtype, device=device)

    def mark(self, units: list[Unit]) -> None:
        """Note which parameters have no values yet."""
        for unit in units:
            for place in unit.places:
                place.written = place.parameter not in self or not place.count

    def unwritten(self, model: nn.Module, units: list[Unit], left: Iterable[nn.Parameter]) -> Unwritten | None:
        """Those that came from meta, streamed or ``left`` on the device; None where there are none."""
        places = [place for unit in units for place in unit.places if not place.written]
        ids = {id(parameter) for parameter in left if parameter in self and parameter.is_floating_point()}
        nan = {name: p for name, p in model.named_parameters() if id(p) in ids and p.numel()}
        return Unwritten(places, nan) if places or nan else None

    def _put_into_groups(self, others: dict[int, nn.Parameter]) -> None:
        if others and self._optimizer is not None:
            for group in self._optimizer.param_groups:
                group["params"] = [others.get(id(parameter), parameter) for parameter in group["params"]]


def give_substance(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Exchange:
    """Exchange meta parameters for ones that hold no memory yet; refuses meta buffers, which nothing would fill."""
    empty = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if empty:
        raise SettingError(
            f"The buffers {', '.join(empty[:4])}{', ...' if len(empty) > 4 else ''} are on the meta device; only "
            "parameters may be. Build the model under accelerate.init_empty_weights(include_buffers=False), or give "
            "each buffer its values before streaming: module.name = tensor."
        )
    return Exchange(model, optimizer)


class Unwritten:
    """Parameters that came from the meta device, until somebody has given them values.

    ``places`` say whether they were written. Where no one has told, bytes that are not zero any more do: somebody has
    found another way to the memory."""

    def __init__(self, places: list[Place], left: dict[str, nn.Parameter]) -> None:
        self._places, self._left = places, left

    def check(self, module: nn.Module) -> bool:
        """Raise if a call of ``module`` would compute with nothing; returns whether all have values by now."""
        # Whatever others have put in a parameter's place goes before it: functional_call does, and assign=True.
        there = {id(parameter) for parameter in module.parameters()}
        for place in self._places:
            if not place.written and id(place.parameter) in there:
                place.written = _is_touched(place)
        self._places = [place for place in self._places if not place.written]
        self._left = {name: p for name, p in self._left.items() if bool(p.detach().float().isnan().all())}
        empty = [place.name for place in self._places if id(place.parameter) in there]
        empty += [name for name, parameter in self._left.items() if id(parameter) in there]
        if empty:
            more = f" and {len(empty) - 1} more have" if len(empty) > 1 else " has"
            raise StormError(
                f"Cannot run the model: {empty[0]!r}{more} no values. The model came from the meta device, and nobody "
                "has written them since. Load weights first (storm.checkpoint.load_weights(model, folder), "
                "model.load_state_dict, session.load), or initialise them (nn.init, reset_parameters)."
            )
        return not self._places and not self._left


def _is_touched(place: Place) -> bool:
    """Whether home memory is not as it was when it was mapped."""
    flat = plain(place.parameter).detach().as_strided((place.count,), (1,))
    return bool(flat.view(torch.uint8).any())
