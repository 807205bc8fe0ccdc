"""STORM: train neural networks that do not fit in VRAM, in the PyTorch loop you already wrote."""

import importlib
from typing import TYPE_CHECKING, Any

from .core.errors import InsideStep, LaneError, OutOfBudget, SettingError, StorageError, StormError

if TYPE_CHECKING:
    from .data.loader import DataLoader
    from .loss import linear_cross_entropy
    from .session.api import Session, stream
    from .session.offload import OffloadedActivations, offload_activations

__version__ = "0.1.0"

__all__ = [
    "DataLoader",
    "InsideStep",
    "LaneError",
    "OffloadedActivations",
    "OutOfBudget",
    "Session",
    "SettingError",
    "StorageError",
    "StormError",
    "__version__",
    "linear_cross_entropy",
    "offload_activations",
    "stream",
]
_HOMES = {
    "DataLoader": "data.loader",
    "OffloadedActivations": "session.offload",
    "Session": "session.api",
    "linear_cross_entropy": "loss",
    "offload_activations": "session.offload",
    "stream": "session.api",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "data"})


def __getattr__(name: str) -> Any:
    """Import names that need torch on first use: `storm --help` works without it."""
    if name == "data":
        return importlib.import_module(".data", __name__)
    if name in _HOMES:
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
