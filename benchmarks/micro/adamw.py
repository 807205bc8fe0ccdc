"""AdamW on the CPU: our kernels against torch's fused one, and against the rate at which RAM can be copied.

Bytes a parameter, read and written: fp32 28 (weight, moments r+w, gradient r), split bf16 26 (hi, lo, moments r+w,
gradient r).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from stormtorch.native.adamw import AdamStep, AdamTensors, adamw_
from stormtorch.native.cores import usable_count
from stormtorch.native.worker import open_worker

from .rows import Row

_FP32_BYTES, _SPLIT_BYTES = 28, 26


def run(tiny: bool) -> list[Row]:
    count = 1 << 16 if tiny else 1 << 26
    threads = usable_count()
    torch.set_num_threads(threads)

    parameter = torch.nn.Parameter(torch.randn(count))
    parameter.grad = torch.randn(count)
    fused = torch.optim.AdamW([parameter], lr=1e-3, fused=True)
    full = AdamTensors(
        weight=torch.randn(count), exp_avg=torch.zeros(count), exp_avg_sq=torch.zeros(count), grad=torch.randn(count)
    )
    split = AdamTensors(
        weight=torch.randn(count).bfloat16(),
        master=torch.zeros(count, dtype=torch.int16),
        exp_avg=torch.zeros(count),
        exp_avg_sq=torch.zeros(count),
        grad=torch.randn(count).bfloat16(),
    )
    step = AdamStep(lr=1e-3, step=7)
    target, source = torch.empty(3 * count), torch.ones(3 * count)

    def on_worker() -> None:
        worker.submit(split, step)
        worker.drain()

    with open_worker() as worker:
        ways: dict[str, tuple[Callable[[], object], int]] = {
            "torch": (fused.step, _FP32_BYTES * count),
            "fp32": (lambda: adamw_(full, step, threads=threads), _FP32_BYTES * count),
            "split": (lambda: adamw_(split, step, threads=threads), _SPLIT_BYTES * count),
            "worker": (on_worker, _SPLIT_BYTES * count),
            "copy": (lambda: target.copy_(source), 2 * source.nbytes),
        }
        for call, _ in ways.values():
            call()
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(2 if tiny else 9):  # in turns, so that a machine that slows down does so for all
            for name, (call, _) in ways.items():
                start_s = time.perf_counter()
                call()
                seconds[name].append(time.perf_counter() - start_s)
        used = worker.threads
    rate = {name: size / statistics.median(seconds[name]) / 1e9 for name, (_, size) in ways.items()}
    elements = {name: count / statistics.median(seconds[name]) / 1e9 for name in ways}
    return [
        Row("adamw", f"fp32, {threads} threads", rate["fp32"], "GB/s", rate["torch"], "torch fused AdamW"),
        Row("adamw", f"fp32, {threads} threads", elements["fp32"], "Gparam/s", elements["torch"], "torch fused AdamW"),
        Row("adamw", f"split bf16, {threads} threads", rate["split"], "GB/s", rate["copy"], "RAM copy, read + write"),
        Row("adamw", f"split bf16, {threads} threads", elements["split"], "Gparam/s"),
        Row("adamw", f"split bf16, worker of {used}", elements["worker"], "Gparam/s"),
    ]
