"""STORM's vocabulary: sizes, tiers, tags, budgets, records, errors. Pure data; imports nothing else of ours."""
