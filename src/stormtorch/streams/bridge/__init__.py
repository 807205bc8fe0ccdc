"""Contact with torch's internals and the interpreter: private interfaces, the lock, signal handlers, process groups."""
