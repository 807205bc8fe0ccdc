"""Formats whose rows lie in files as plain bytes: arrays, safetensors, packed folders, tokens."""
