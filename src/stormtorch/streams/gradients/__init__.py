"""Gradients: from backward on the device to RAM."""
