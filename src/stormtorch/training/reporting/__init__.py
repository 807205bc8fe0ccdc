"""What a run tells its user: the plan, the pace, and what it used."""
