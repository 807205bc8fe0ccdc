"""The parts of a checkpoint: its tensors, their names, and the small files beside them."""
