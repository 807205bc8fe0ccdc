"""One case, in the process that runs it."""

from __future__ import annotations

import resource
import traceback
from pathlib import Path
from typing import Any

import torch
from benchmarks.training.measure import one_line
from torch import nn

from .build import CONFIGS, SD3, build, parameters_of
from .cases import Case
from .results import Result

_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def measure(case: Case, *, ready: Path) -> Result:
    """Whatever goes wrong is a result too: the reason in one line, and the memory it had taken by then.

    Creates ``ready`` when the case's time limit begins."""
    known: dict[str, Any] = {}
    device = torch.device("cuda", 0) if case.device == "cuda" else torch.device("cpu")
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
            torch.zeros(1, device=device)  # the context exists before a clock runs
        torch.manual_seed(0)
        ready.touch()
        _measure(case, device, known)
    except Exception as error:
        traceback.print_exc()
        known["failed"] = one_line(error) + (f" (after steps of {known['step_s']:.3f} s)" if "step_s" in known else "")
    if device.type == "cuda" and torch.cuda.is_initialized():
        known["vram_allocated_bytes"] = torch.cuda.max_memory_allocated()
        known["vram_reserved_bytes"] = torch.cuda.max_memory_reserved()
    # Linux counts in KiB; memory that was mapped and page-locked is in it.
    known["rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return Result(case=case, **known)


def _measure(case: Case, device: torch.device, known: dict[str, Any]) -> None:
    if case.generates:
        from .generation import generate

        generate(case, device, known)
        return
    model = _model(case)
    known["parameters"] = parameters_of(model)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    if case.method == "fsdp2" or CONFIGS[case.config][0] == SD3:
        from . import by_hand

        by_hand.train(case, model, device, known)
    else:
        from . import through_trainer

        through_trainer.train(case, model, device, known)


def _model(case: Case) -> nn.Module:
    model: Any = build(case.config, dtype=getattr(torch, case.dtype))
    if case.method == "fsdp2" and not case.adapts:
        model.float()  # it updates what it is given, and computes in bf16
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    if case.adapts:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=_TARGETS))
    made: nn.Module = model
    return made
