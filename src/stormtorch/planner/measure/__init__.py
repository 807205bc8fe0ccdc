"""Measures what this machine can do. Each measurement is bounded in time and bytes, and leaves nothing behind."""
