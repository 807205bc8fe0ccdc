"""The state that a session and the process give a checkpoint, kept unchanged while it is written."""
