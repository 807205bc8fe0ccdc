"""STORM: train neural networks that do not fit in VRAM, in the PyTorch loop you already wrote."""

from .core.errors import LaneError, OutOfBudget, SettingError, StorageError, StormError

__version__ = "0.1.0"

__all__ = ["LaneError", "OutOfBudget", "SettingError", "StorageError", "StormError", "__version__"]
