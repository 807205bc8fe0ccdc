"""File formats: one module for each, and open.py, which recognises them."""
