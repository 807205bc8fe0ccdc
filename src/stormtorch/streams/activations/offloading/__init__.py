"""Sends saved tensors to RAM and brings them back ahead of backward."""
