"""Datasets of any size at constant memory. ``storm.DataLoader`` reads them; this package exports the sources."""

from .delivery.transforms import Cast, Normalise
from .formats.open import open_source
from .formats.plain.arrays import raw
from .formats.plain.tokens import tokens

__all__ = ["Cast", "Normalise", "open_source", "raw", "tokens"]
