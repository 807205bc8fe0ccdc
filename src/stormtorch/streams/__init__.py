"""Streams units of parameters, their gradients and optimizer states, in the order of use."""
