"""Crash-safe checkpoints: written under another name and renamed, with checksums, readable by ``from_pretrained``."""

from .folders.folder import all_complete, complete, newest, prune, sweep
from .loading.weights import load_weights

__all__ = ["all_complete", "complete", "load_weights", "newest", "prune", "sweep"]
