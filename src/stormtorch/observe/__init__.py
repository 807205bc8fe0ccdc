"""Sees: what happened, as data, and its text form."""
