"""The worker that runs AdamW beside the training, in C or in Python."""
