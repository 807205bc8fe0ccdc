"""Ties the streams to a model: its calls, its parameters as user code sees them."""
