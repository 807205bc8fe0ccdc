"""The implementation of ``storm train``: settings, a model, text as rows, a loop, and runs that can be resumed."""
