"""Datasets of any size at constant memory. ``storm.DataLoader`` reads them; this package exports the sources."""

from .delivery.transforms import Cast, Normalise
from .formats.arrays import raw
from .formats.open import open_source
from .formats.tokens import tokens

__all__ = ["Cast", "Normalise", "open_source", "raw", "tokens"]
