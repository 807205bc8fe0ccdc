"""The C kernels with their worker, and the pure-torch fallback. Needs no torch headers."""
