"""Text for training: turns documents in files into rows of tokens, with labels for the trained ones."""

from .documents import data_files
from .prepare import Prepared, input_bytes, prepare

__all__ = ["Prepared", "data_files", "input_bytes", "prepare"]
