"""The settings of a run: names, values, YAML, and the schedule that follows from them."""
