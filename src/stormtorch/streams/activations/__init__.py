"""Activations: kept, offloaded or recomputed, by a plan that timed steps confirm."""
