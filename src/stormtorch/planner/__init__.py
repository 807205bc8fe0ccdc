"""Decides while a session runs: pool sizes, the optimizer's shares, which units remain on the device."""
