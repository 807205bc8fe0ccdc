"""Activations: kept, offloaded or recomputed, by a plan that steps have to confirm."""
