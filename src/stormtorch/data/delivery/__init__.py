"""Batches: prefetched, copied to the device, given in order; and the state of a loader."""
