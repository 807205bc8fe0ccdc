"""Generates with the cases of ``benchmarks.inference``."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from benchmarks.inference.one import measure

from .cases import Case


def generate(case: Case, device: torch.device, known: dict[str, Any]) -> None:
    """Adds to ``known`` what was measured. A step is a token."""
    options = argparse.Namespace(
        size="tiny" if case.tiny else case.config.removeprefix("llama-"), tiny=device.type == "cpu", vram=case.vram,
        prompt=case.sequence, tokens=case.warm + case.steps, warm=case.warm,
    )  # fmt: skip
    found = measure(case.method, options)
    known |= {
        "parameters": found["parameters"], "step_s": found["token_s"], "setup_s": found["setup_s"],
        "answer": found["tokens"],
    }  # fmt: skip
    if "loaded_bytes" in found:
        known["limits"] = f"{found['loaded_bytes'] / 1e9:.3g} GB loaded a token"
