"""The state of all random generators: Python's, numpy's, torch's on the CPU and on every GPU."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """The state as data that torch reads back without running code. Draws nothing."""
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [str(kind), [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "cuda": [],
    }
    if torch.cuda.is_initialized():  # not is_available(), which loads the driver
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Restore the state; of the GPUs, as many as this machine has."""
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    kind, words, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(words, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        for device, one in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(one, device)
