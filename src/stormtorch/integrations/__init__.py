"""STORM inside training loops of other libraries; each needs its own packages, and the core imports none of them."""
