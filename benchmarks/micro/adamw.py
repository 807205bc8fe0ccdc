"""AdamW on the CPU: our kernels against torch's fused one, and against the rate at which RAM can be copied.

Bytes a parameter, read and written: fp32 28 (weight, moments r+w, gradient r), split bf16 26 (hi, lo, moments r+w,
gradient r).
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

import torch

from stormtorch.core.sizes import GiB
from stormtorch.memory.books.limits import host_available_bytes
from stormtorch.native.adamw import adamw_
from stormtorch.native.cores import usable_count
from stormtorch.native.update import AdamStep, AdamTensors
from stormtorch.native.worker.open import open_worker

from .rows import Row

_FP32_BYTES, _SPLIT_BYTES = 28, 26


def run(tiny: bool) -> list[Row]:
    # Two sizes: on a CPU with 300 MiB of cache, what the case before left there can decide about 2^26 elements.
    powers = (16,) if tiny else (26, 28) if host_available_bytes() > 48 * GiB else (26,)
    return [row for power in powers for row in _measured(power, 2 if tiny else 9)]


def _measured(power: int, rounds: int) -> list[Row]:
    count = 1 << power
    threads = usable_count()
    torch.set_num_threads(threads)

    def filled(dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(count, dtype=dtype).fill_(0.01)

    parameter = torch.nn.Parameter(filled())
    parameter.grad = filled()
    fused = torch.optim.AdamW([parameter], lr=1e-3, fused=True)
    full = AdamTensors(weight=filled(), exp_avg=filled(), exp_avg_sq=filled(), grad=filled())
    split = AdamTensors(
        weight=filled(torch.bfloat16),
        master=torch.zeros(count, dtype=torch.int16),
        exp_avg=filled(),
        exp_avg_sq=filled(),
        grad=filled(torch.bfloat16),
    )
    step = AdamStep(lr=1e-3, step=7)
    target, source = filled(), filled()

    def on_worker(tensors: AdamTensors) -> None:
        worker.submit(tensors, step)
        while worker.stats().pending:
            time.sleep(1e-4)

    with open_worker() as worker:
        ways: dict[str, tuple[Callable[[], object], int]] = {
            "torch": (fused.step, _FP32_BYTES * count),
            "fp32": (lambda: adamw_(full, step, threads=threads), _FP32_BYTES * count),
            "split": (lambda: adamw_(split, step, threads=threads), _SPLIT_BYTES * count),
            "worker": (lambda: on_worker(split), _SPLIT_BYTES * count),
            "copy": (lambda: target.copy_(source), 2 * source.nbytes),
        }
        for call, _ in ways.values():
            call()
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        order, chance = list(ways), random.Random(0)
        for _ in range(rounds):
            # In turns and in changing order: a slow minute, or a warm cache, is everyone's.
            chance.shuffle(order)
            for name in order:
                start_s = time.perf_counter()
                ways[name][0]()
                seconds[name].append(time.perf_counter() - start_s)
        used = worker.threads
    what = f"2^{power}, {threads} threads"
    rate = {name: size / statistics.median(seconds[name]) / 1e9 for name, (_, size) in ways.items()}
    elements = {name: count / statistics.median(seconds[name]) / 1e9 for name in ways}
    return [
        Row("adamw", f"fp32, {what}", rate["fp32"], "GB/s", rate["torch"], "torch fused AdamW"),
        Row("adamw", f"fp32, {what}", elements["fp32"], "Gparam/s", elements["torch"], "torch fused AdamW"),
        Row("adamw", f"split bf16, {what}", rate["split"], "GB/s", rate["copy"], "RAM copy, read + write"),
        Row("adamw", f"split bf16, {what}", elements["split"], "Gparam/s"),
        Row("adamw", f"split bf16, 2^{power}, worker of {used}", elements["worker"], "Gparam/s"),
    ]
