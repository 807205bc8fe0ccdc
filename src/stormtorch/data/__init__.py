"""Datasets of any size at constant memory. ``storm.DataLoader`` is the way in; here are the sources it reads."""

from .arrays import raw
from .open import open_source
from .tokens import tokens
from .transforms import Cast, Normalise

__all__ = ["Cast", "Normalise", "open_source", "raw", "tokens"]
