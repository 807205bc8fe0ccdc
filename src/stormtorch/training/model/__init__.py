"""The model, tokenizer, loss and optimizer of a run, built from its settings."""
