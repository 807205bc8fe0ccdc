"""The folder of a run: checkpoints, metrics, and resuming from them."""
