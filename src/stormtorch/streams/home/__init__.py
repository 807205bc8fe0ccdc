"""A parameter in RAM: its class, what user code may do with it, and how it gets there."""
