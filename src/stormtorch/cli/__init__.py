"""The ``storm`` command, one file per sub-command."""
