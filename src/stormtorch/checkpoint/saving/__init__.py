"""Writes a checkpoint: a draft beside its final place, filled at once or in the background."""
