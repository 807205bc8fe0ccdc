"""STORM inside other people's training loops; each needs its own packages, and none is imported by the core."""
