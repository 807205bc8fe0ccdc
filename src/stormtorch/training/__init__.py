"""What is behind ``storm train``: settings, a model, text as rows, a loop, and runs that go on where they stopped."""
