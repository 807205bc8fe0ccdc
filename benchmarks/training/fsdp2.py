"""FSDP2 in a process group of one, with parameters, gradients and optimizer in RAM."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard


def alone_in_the_world() -> None:
    """The environment of a process group of one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")


def shard(parts: Iterable[Any], device: torch.device, dtype: torch.dtype) -> None:
    """``fully_shard`` each part, the whole model last. ``dtype`` is the arithmetic's. Ends with
    ``dist.destroy_process_group``."""
    gpu = device.type == "cuda"
    alone_in_the_world()
    if gpu:
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    policies: dict[str, Any] = {
        "mesh": dist.device_mesh.init_device_mesh(device.type, (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype),
        "offload_policy": CPUOffloadPolicy(pin_memory=gpu),
    }
    for part in parts:
        fully_shard(part, **policies)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The members of the model's lists of blocks, without lists inside of blocks."""
    found: list[nn.Module] = []
    for child in model.children():
        found += list(child) if isinstance(child, nn.ModuleList) and len(child) > 1 else blocks_of(child)
    return found
