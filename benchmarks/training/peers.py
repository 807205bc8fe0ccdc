"""The peers, each with its best documented settings, and the list of all methods."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import deepspeed_ops
from .cases import Case
from .fsdp2 import alone_in_the_world, shard
from .methods import ADAMW, CLIP_NORM, Method, Training, Work, resident, storm
from .workload import loss_of


def fsdp2(work: Work) -> Training:
    """``fully_shard`` with fp32 parameters, their gradients and AdamW in RAM, bf16 on the device."""
    model = work.model
    shard((model.embed, *model.layers, [model.norm, model.head], model), work.device, work.dtype)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def step() -> Tensor:
        loss = work.loss()
        loss.backward()
        if work.case.clip:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Training(step=step, close=dist.destroy_process_group)


def _build_cpu_adam(case: Case) -> None:
    deepspeed_ops.build(case.device, "CPUAdamBuilder")


def ds3(work: Work) -> Training:
    """DeepSpeed ZeRO-3 with parameters and optimizer in RAM."""
    alone_in_the_world()
    in_ram = {"device": "cpu", "pin_memory": work.device.type == "cuda"}
    config = {
        "train_micro_batch_size_per_gpu": work.case.micro_batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIP_NORM if work.case.clip else 0.0,
        "bf16": {"enabled": work.dtype == torch.bfloat16},
        "zero_force_ds_cpu_optimizer": True,
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": in_ram,
            "offload_optimizer": in_ram,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 200_000_000,
            "stage3_prefetch_bucket_size": 200_000_000,
            "stage3_param_persistence_threshold": 100_000,
            "stage3_max_live_parameters": 400_000_000,
            "stage3_max_reuse_distance": 400_000_000,
        },
    }
    deepspeed: Any = importlib.import_module("deepspeed")
    engine, *_ = deepspeed.initialize(model=work.model, model_parameters=work.model.parameters(), config=config)

    def step() -> Tensor:
        loss = work.loss(engine)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return Training(step=step)


def ramtorch(work: Work) -> Training:
    """RamTorch's layer streaming; with an fp32 model the arithmetic is bf16 by autocast, as its documents say."""
    package: Any = importlib.import_module("ramtorch")
    plain = work.model
    chunks = [plain.embed, *plain.layers, nn.Sequential(plain.norm, plain.head)]
    model = package.OffloadModel(chunks, device=work.device, window=3, keep_activations="checkpoint")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    mixed = plain.head.weight.dtype != work.dtype

    def step() -> Tensor:
        with torch.autocast(work.device.type, work.dtype, enabled=mixed):
            result = model.step(work.tokens, targets=work.targets, loss_fn=loss_of)
        model.flush_grads()
        if work.case.clip:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        loss: Tensor = result.loss
        return loss.detach()

    return Training(step=step, close=model.close)


def _import_storm(_case: Case) -> None:
    _ = importlib.import_module("stormtorch").stream  # names are imported when they are used


def _import_ramtorch(_case: Case) -> None:
    importlib.import_module("ramtorch")


METHODS: dict[str, Method] = {
    "resident": Method(start=resident, on_device=True),
    "storm": Method(start=storm, prepare=_import_storm),
    "fsdp2": Method(start=fsdp2, full_precision=True),
    "ds3": Method(start=ds3, prepare=_build_cpu_adam),
    # RamTorch checkpoints each chunk itself; torch's checkpoint inside one would read the wrong weights.
    "ramtorch": Method(start=ramtorch, prepare=_import_ramtorch, full_precision=True, checkpointing=False),
    "ramtorch-bf16": Method(start=ramtorch, prepare=_import_ramtorch, checkpointing=False),
}
