"""Decides while a session runs: pool sizes, the optimizer's shares, which units stay on the device."""
