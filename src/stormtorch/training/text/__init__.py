"""Text for training: documents in files become rows of tokens, with a label for each token that is to be learnt."""

from .prepare import Prepared, input_bytes, prepare
from .records import data_files

__all__ = ["Prepared", "data_files", "input_bytes", "prepare"]
