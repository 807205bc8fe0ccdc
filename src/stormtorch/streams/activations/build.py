"""Builds what decides about a model's activations, on existing lanes and ledgers."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from ...core.tags import Tag
from ...memory.pools.host import HostPool
from ..settings import Trial
from ..units.partition import blocks_of
from .offloading.stream import SMALL_BYTES, ActivationStream
from .plans.room import WAY, Gauge, Surroundings
from .runner import Saving


def open_saving(
    model: nn.Module | None,
    mode: str,
    around: Surroundings,
    weights: Callable[[], Iterable[torch.Tensor]],
    trial: Trial,
) -> tuple[Saving, Callable[[], None]]:
    """Handle the activations of ``model`` by ``mode``; returns its `Saving`, and a call to end it when lanes are empty.

    ``weights``: parameters and buffers that are permanently on the device."""
    slabs = HostPool(
        ledger=around.ledger,
        tag=Tag.ACTIVATIONS,
        page_lock=around.page_lock,
        pageable=around.lanes.ring is not None,
        poison=around.lanes.store if trial.poison else None,
    )
    stream = ActivationStream(
        lanes=around.lanes,
        slabs=slabs,
        waits=around.waits,
        lock=around.lock,
        weights=weights,
        window_bytes=around.limit_bytes // WAY,
        ahead_bytes=around.limit_bytes // WAY,
        small_bytes=SMALL_BYTES if trial.small_bytes is None else trial.small_bytes,
    )
    stream.must_leave = mode == "offload"
    blocks = blocks_of(model) if model is not None else []
    saving = Saving(blocks, mode=mode, stream=stream, gauge=Gauge(around, trial.activation_room), around=around)

    def end() -> None:
        saving.detach()
        stream.close()

    return saving, end
