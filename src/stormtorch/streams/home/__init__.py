"""A parameter in RAM: its class, access by user code, and how it gets there."""
