"""Where we touch torch and the interpreter: private interfaces, the lock, signal handlers, process groups."""
