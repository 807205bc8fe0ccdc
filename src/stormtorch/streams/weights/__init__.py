"""Weights on the device: prefetched, evicted, found again in backward."""
