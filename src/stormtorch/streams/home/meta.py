"""Streams models on the meta device: parameters get home memory when streaming begins, and their values afterwards.

A meta tensor cannot be given memory in place, so its parameter is replaced by another object, in the modules and in the
optimizer. Values come by ``load_weights``, ``load_state_dict``, ``Session.load``, or any other write. A call of the
model that would compute with an unwritten parameter is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ...core.errors import SettingError, StormError
from ...core.sizes import MiB
from ..units.unit import Place, Unit, is_dense
from .parameter import plain

_ONES = 0xFF
_AT_ONCE = 64 * MiB


class Exchange:
    """Replacements of a model's meta parameters."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self._optimizer = optimizer
        # By id of the new parameter: it, and the meta one.
        self._meta: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
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
        """Restore the meta parameters: streaming could not begin, and may be tried with other settings."""
        for module, name in self._places:
            found = module._parameters.get(name)
            if found is not None and found in self:
                module._parameters[name] = self._meta[id(found)][1]
        self._put_into_groups({new: meta for new, (_, meta) in self._meta.items()})

    def values(self, parameter: nn.Parameter, device: torch.device) -> torch.Tensor:
        """Initial values of a parameter that remains on the device: its own, if it has any. A meta parameter is filled
        with bytes of ones, which is NaN, until it is written: writes to an ordinary parameter are not reported."""
        if parameter not in self:
            return parameter.data.to(device)
        values = parameter.data.to(device).contiguous()  # one zero, expanded
        _bytes_of(values).fill_(_ONES)
        return values

    def unwritten(
        self,
        model: nn.Module,
        units: list[Unit],
        left: Iterable[nn.Parameter],
        found_written: Callable[[Place], None],
    ) -> Unwritten | None:
        """Meta parameters that have no values yet, streamed or ``left`` on the device; None if there are none."""
        places = [place for unit in units for place in unit.places if place.parameter in self and place.count]
        for place in places:
            place.written = False
        ids = {id(parameter) for parameter in left if parameter in self}
        others = {name: p for name, p in model.named_parameters() if id(p) in ids and p.numel()}
        return Unwritten(places, others, found_written) if places or others else None

    def _put_into_groups(self, others: dict[int, nn.Parameter]) -> None:
        if others and self._optimizer is not None:
            for group in self._optimizer.param_groups:
                group["params"] = [others.get(id(parameter), parameter) for parameter in group["params"]]


def give_substance(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Exchange:
    """Replace meta parameters by ones without memory; refuses meta buffers, which nothing would fill."""
    empty = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if empty:
        raise SettingError(
            f"The buffers {', '.join(empty[:4])}{', ...' if len(empty) > 4 else ''} are on the meta device; only "
            "parameters may be. Build the model under accelerate.init_empty_weights(include_buffers=False), or give "
            "each buffer its values before streaming: module.name = tensor."
        )
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise SettingError(f"The parameter {lazy[0]!r} has no shape yet. Call the model once before streaming.")
    return Exchange(model, optimizer)


class Unwritten:
    """Parameters from the meta device that have no values yet.

    ``places`` say whether they were written. For a write that was not reported, bytes that are no longer zero tell:
    user code has reached the memory another way, and ``found_written`` is called. Those ``left`` on the device are full
    of ones until they are written."""

    def __init__(
        self, places: list[Place], left: dict[str, nn.Parameter], found_written: Callable[[Place], None]
    ) -> None:
        self._places, self._left, self._found_written = places, left, found_written

    def check(self, module: nn.Module) -> bool:
        """Raise if a call of ``module`` would use parameters without values; returns whether all have values by now."""
        # A tensor that user code has put in a parameter's place is used instead of it, e.g. by functional_call or
        # assign=True.
        there = {id(parameter) for parameter in module.parameters()}
        for place in self._places:
            if not place.written and id(place.parameter) in there and not _is_all(plain(place.parameter), 0):
                self._found_written(place)
        self._places = [place for place in self._places if not place.written]
        empty = [place.name for place in self._places if id(place.parameter) in there]
        for name, parameter in list(self._left.items()):
            if id(parameter) in there:
                if _is_all(parameter, _ONES):
                    empty.append(name)
                else:
                    del self._left[name]
        if empty:
            more = f" and {len(empty) - 1} more have" if len(empty) > 1 else " has"
            raise StormError(
                f"Cannot run the model: {empty[0]!r}{more} no values: the model came from the meta device, and they "
                "were never written. Load weights first (storm.checkpoint.load_weights(model, folder), "
                "model.load_state_dict, session.load), or initialise them (nn.init, reset_parameters; p.zero_() for "
                "parameters that the model does not use)."
            )
        return not self._places and not self._left


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _is_all(tensor: torch.Tensor, byte: int) -> bool:
    """Whether memory is still full of ``byte``. The first bytes nearly always tell. Compares part by part: all at once
    would take as much memory again."""
    if tensor.numel() and not is_dense(tensor):
        return False  # user code has put another tensor in its place
    flat = _bytes_of(tensor)
    return all(bool((part == byte).all()) for part in (flat[:64], *flat.split(_AT_ONCE)))
