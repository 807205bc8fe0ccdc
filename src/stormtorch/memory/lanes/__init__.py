"""Copies beside compute, on the GPU or on threads, and what orders them."""
