"""The optimizer step: our Adam, torch's own step, and where optimizer states lie."""
