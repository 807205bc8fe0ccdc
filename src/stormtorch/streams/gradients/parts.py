"""Sends a unit's gradients home part by part, where the device has no room for them in one piece.

The table of a large vocabulary is ten times as large as a block. In parts, its gradients need a bucket for a block,
also where they are added to earlier ones: a part of those is loaded, the sum is made in the bucket and stored."""

from __future__ import annotations

import torch

from ...core.sizes import round_down, round_up
from ...core.tags import Tag
from ...memory.lanes.build import Lanes
from ...memory.lanes.waits import WaitMeter
from ..units.unit import ALIGNMENT, Place
from .buckets import Buckets
from .home import GradHome


class Parts:
    """Uses the buckets in turn: one part is made while the other is on its way home."""

    def __init__(self, buckets: Buckets, lanes: Lanes, waits: WaitMeter) -> None:
        self._buckets, self._lanes, self._waits = buckets, lanes, waits

    def send(self, home: GradHome, grads: dict[int, torch.Tensor], target: torch.Tensor, *, to_wide: bool) -> None:
        """Write the unit's gradients with ``grads`` added to ``target``, its bytes at home. The caller has made the
        store lane wait for those that still read them."""
        unit, before, lanes = home.unit, home.present, self._lanes
        if before and home.stored is not None:
            lanes.load.wait(home.stored)
        for index in sorted(before | grads.keys()):
            if index not in grads and to_wide == home.is_wide:
                continue  # it is there
            place = unit.places[index]
            old = _flat(place, home.view(place)) if index in before else None
            new = _flat(place, place.gradient(target, wide=to_wide))
            self._send(place, new, old, _flat(place, grads[index]) if index in grads else None)
        home.arrivals += 1
        lanes.store.write_flag(home.arrived, home.arrivals)
        home.stored, home.ready = lanes.store.record(), lanes.compute.record()

    def _send(self, place: Place, new: torch.Tensor, old: torch.Tensor | None, grad: torch.Tensor | None) -> None:
        lanes, unit = self._lanes, place.unit.index
        each = new.itemsize + (old.itemsize if old is not None else 0)
        most = max(ALIGNMENT, round_down((self._buckets.size - ALIGNMENT) // each, ALIGNMENT))
        for start in range(0, place.count, most):
            stop = min(start + most, place.count)
            end = (stop - start) * new.itemsize
            earlier_at = round_up(end, ALIGNMENT)
            bucket = self._buckets.lend(earlier_at + (stop - start) * (each - new.itemsize), for_load=old is not None)
            part = bucket[:end].view(new.dtype)
            if old is not None:
                earlier = bucket[earlier_at:].view(old.dtype)
                lanes.load.copy(earlier, old[start:stop], Tag.GRADIENTS, unit)
                self._waits.wait(lanes.load.record(), "gradients", unit)
                part.copy_(earlier)
            if grad is not None and old is not None:
                part.add_(grad[start:stop])
            elif grad is not None:
                part.copy_(grad[start:stop])
            lanes.store.wait(lanes.compute.record())
            lanes.store.copy(new[start:stop], part, Tag.GRADIENTS, unit)
            self._buckets.take_back(lanes.store.record())


def laid_out(place: Place, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with the strides of the parameter, as ``p.grad`` has them."""
    if tensor.stride() == place.stride:
        return tensor
    return torch.empty_strided(place.shape, place.stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _flat(place: Place, tensor: torch.Tensor) -> torch.Tensor:
    """The elements in the order of the parameter's memory; ``tensor`` is laid out like it."""
    return tensor.as_strided((place.count,), (1,))
