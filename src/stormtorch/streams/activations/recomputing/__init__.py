"""Runs a block a second time in backward, so that it computes the same."""
