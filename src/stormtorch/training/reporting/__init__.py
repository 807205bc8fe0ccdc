"""Reports of a run to its user: the plan, the pace, and the resources used."""
