"""Accounts of memory: budgets, limits, and free space by address."""
