"""Datasets of any size at constant memory. ``storm.DataLoader`` is the way in; here are the sources it reads."""

from .delivery.transforms import Cast, Normalise
from .formats.arrays import raw
from .formats.open import open_source
from .formats.tokens import tokens

__all__ = ["Cast", "Normalise", "open_source", "raw", "tokens"]
