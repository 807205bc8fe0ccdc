"""Weights on the device: loaded ahead of use, evicted, found again in backward."""
