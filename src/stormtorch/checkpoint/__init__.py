"""Crash-safe checkpoints: written under another name and renamed, with checksums, readable by ``from_pretrained``."""

from .folder import all_complete, complete, newest, prune, sweep
from .weights import load_weights

__all__ = ["all_complete", "complete", "load_weights", "newest", "prune", "sweep"]
