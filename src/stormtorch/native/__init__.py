"""The C kernels with their worker, and the pure-torch fallback that stands in for them. No torch headers are needed."""
