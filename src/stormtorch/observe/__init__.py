"""Records what a session does, and reports it as data and as text."""
