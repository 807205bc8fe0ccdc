"""Text for training: turns documents in files into rows of tokens, with labels for the trained ones."""

from .prepare import Prepared, input_bytes, prepare
from .records import data_files

__all__ = ["Prepared", "data_files", "input_bytes", "prepare"]
