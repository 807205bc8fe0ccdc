"""DeepSpeed ZeRO-Infinity: ZeRO-3 with the optimizer's states on disk, and on request the weights.

Its documented settings; where they are to be tuned, what it advises: access to files by the fastest of some settings on
this very disk, updates in smaller parts than its 10⁹ elements, which overlap with reads and writes.
"""

from __future__ import annotations

import argparse
import importlib
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.training import deepspeed_ops
from benchmarks.training.fsdp2 import alone_in_the_world
from benchmarks.training.methods import ADAMW
from benchmarks.training.workload import SIZES, batch, build, loss_of

from .cases import Case
from .figures import Figures, anonymous_bytes, moved_bytes

_STATE_BYTES, _WEIGHT_BYTES = 16, 2  # on disk for a parameter: fp32 weight, two moments and gradient; bf16 weight
_SUB_GROUP = 100_000_000
_TRIAL_BYTES = 512 * 2**20
# Block size, queue depth, threads: the default, and what the search of its tutorial goes through.
_ACCESS = ((2**20, 8, 1), (2**20, 32, 8), (8 * 2**20, 32, 8))


def prepare(case: Case, options: argparse.Namespace, folder: Path) -> None:
    """Refuse what the disk has no room for, then compile."""
    count = SIZES[options.size].parameters
    needed = count * (_STATE_BYTES + (_WEIGHT_BYTES if case.weights_on_disk else 0))
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(
            f"ZeRO-Infinity needs {needed / 1e9:.0f} GB of disk for {count:,} parameters; {options.directory} has "
            f"{free / 1e9:.0f} free. --size, --directory"
        )
    if options.device == "cuda":
        torch.zeros(1, device="cuda")
    alone_in_the_world()
    deepspeed_ops.build(options.device, "CPUAdamBuilder", "AsyncIOBuilder")


def measure(case: Case, options: argparse.Namespace, folder: Path) -> Figures:
    device, size = torch.device(options.device), SIZES[options.size]
    dtype = _dtype(case, options)
    access = _fastest_access(folder)
    model = build(size, dtype=dtype, device=torch.device("cpu"), checkpointing=True)
    largest = max(parameter.numel() for parameter in model.parameters())
    config = _config(case, options, folder, access, largest)
    print(config, flush=True)
    deepspeed: Any = importlib.import_module("deepspeed")
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    batches = [batch(size, options.micro_batch, device) for _ in range(options.accumulate)]
    losses, times, moved = list[float](), list[float](), list[tuple[int, int]]()
    for _ in range(options.warm + options.steps):
        start_s = time.perf_counter()
        total = torch.zeros((), device=device)
        for tokens, targets in batches:
            loss = loss_of(engine(tokens), targets)
            engine.backward(loss)
            engine.step()
            total += loss.detach() / options.accumulate
        losses.append(float(total))
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start_s)
        moved.append(moved_bytes())
        print(f"{times[-1]:.2f} s, loss {losses[-1]:.4f}", flush=True)
    read, written = ((moved[-1][kind] - moved[options.warm - 1][kind]) / options.steps for kind in (0, 1))
    return Figures(
        parameters=size.parameters,
        tokens=options.accumulate * options.micro_batch * size.sequence,
        step_s=statistics.mean(times[options.warm :]),
        times=times,
        losses=losses,
        read_bytes=read,
        written_bytes=written,
        anonymous_bytes=anonymous_bytes(),
    )


def _config(
    case: Case, options: argparse.Namespace, folder: Path, access: dict[str, Any], largest: int
) -> dict[str, Any]:
    pinned = {"pin_memory": True}
    on_disk = {"device": "nvme", "nvme_path": str(folder), **pinned}
    weights = {**on_disk, "buffer_count": 5, "buffer_size": max(100_000_000, largest), "max_in_cpu": 0}
    return {
        "train_micro_batch_size_per_gpu": options.micro_batch,
        "gradient_accumulation_steps": options.accumulate,
        "bf16": {"enabled": _dtype(case, options) == torch.bfloat16},
        "zero_force_ds_cpu_optimizer": True,
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},
        "aio": access,
        "zero_optimization": {
            "stage": 3,
            "offload_param": weights if case.weights_on_disk else {"device": "cpu", **pinned},
            # A sub-group takes four buffers: three states and the gradient. One is read, one updated, one written.
            "offload_optimizer": {**on_disk, "buffer_count": 12, "pipeline_read": True, "pipeline_write": True},
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": _SUB_GROUP,
            "stage3_prefetch_bucket_size": 200_000_000,
            "stage3_param_persistence_threshold": 100_000,
            "stage3_max_live_parameters": 400_000_000,
            # A weight from disk keeps one of the five buffers as long as it is on the device.
            "stage3_max_reuse_distance": 0 if case.weights_on_disk else 400_000_000,
        },
    }


def _fastest_access(folder: Path) -> dict[str, Any]:
    """Of the settings tried, the one that writes and reads a file in the least time."""
    op: Any = importlib.import_module("deepspeed.ops.op_builder").AsyncIOBuilder().load()
    file, took_s = folder / "trial", list[tuple[float, dict[str, Any]]]()
    for block, depth, threads in _ACCESS:
        access = {
            "block_size": block,
            "queue_depth": depth,
            "single_submit": False,
            "overlap_events": True,
            "intra_op_parallelism": threads,
        }
        handle = op.aio_handle(**access)
        content = handle.new_cpu_locked_tensor(_TRIAL_BYTES, torch.empty(0, dtype=torch.uint8))
        start_s = time.perf_counter()
        handle.sync_pwrite(content, str(file), 0)
        handle.sync_pread(content, str(file), 0)
        took_s.append((time.perf_counter() - start_s, access))
        handle.free_cpu_locked_tensor(content)
        file.unlink()
        print(f"{2 * _TRIAL_BYTES / took_s[-1][0] / 1e9:.2f} GB/s with {access}", flush=True)
    return min(took_s, key=lambda found: found[0])[1]


def _dtype(case: Case, options: argparse.Namespace) -> torch.dtype:
    """On the CPU, DeepSpeed reads weights from files as bf16, whatever they are."""
    return torch.bfloat16 if options.device == "cuda" or case.weights_on_disk else torch.float32
