"""``train``: opens model and data, runs the loop, and stops cleanly."""
