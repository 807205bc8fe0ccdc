"""Loads checkpoints and plain folders of weights into a model."""
