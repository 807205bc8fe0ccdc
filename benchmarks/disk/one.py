"""Runs one case in this process, between two measurements of the disk."""

from __future__ import annotations

import argparse
import importlib
import tempfile
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from benchmarks.training.measure import one_line

from stormtorch.planner.measure.disk import measure_disk

from .cases import Case
from .figures import Figures


def measure(case: Case, options: argparse.Namespace, ready: Path) -> dict[str, Any]:
    """Whatever goes wrong is a result too. ``ready``: a file to create when the case's own time begins."""
    try:
        return _measure(case, options, ready)
    except Exception as error:
        traceback.print_exc()
        return {"failed": one_line(error)}


def _measure(case: Case, options: argparse.Namespace, ready: Path) -> dict[str, Any]:
    way: Any = importlib.import_module(f"{__package__}.{case.way}")
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        folder = Path(name)
        if case.is_peer:
            way.prepare(case, options, folder)
        ready.touch()
        rates = [_rate(folder)] if case.part is not None else []
        figures: Figures = way.measure(case, options, folder)
        if case.part is not None:
            rates.append(_rate(folder))
    on_gpu = options.device == "cuda"
    return asdict(figures) | {
        "rate": max(rates, default=0.0),
        "vram_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0,
    }


def _rate(folder: Path) -> float:
    rates = measure_disk(folder).rates
    return 0.0 if rates is None else rates.mixed_bytes_per_s
