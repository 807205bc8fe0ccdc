"""STORM: train neural networks that do not fit in VRAM, in the PyTorch loop you already wrote."""

from typing import TYPE_CHECKING, Any

from .core.errors import LaneError, OutOfBudget, SettingError, StorageError, StormError

if TYPE_CHECKING:
    from .api import Session, stream

__version__ = "0.1.0"

__all__ = ["LaneError", "OutOfBudget", "Session", "SettingError", "StorageError", "StormError", "__version__", "stream"]


def __getattr__(name: str) -> Any:
    """Names that need torch are imported when they are asked for: `storm --help` answers without it."""
    if name in ("Session", "stream"):
        from . import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
