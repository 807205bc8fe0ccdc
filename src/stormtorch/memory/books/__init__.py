"""Who has how much: budgets, limits, and free space by address."""
