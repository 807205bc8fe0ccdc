"""Copies beside compute, on the GPU or on threads, ordered by events and flags."""
