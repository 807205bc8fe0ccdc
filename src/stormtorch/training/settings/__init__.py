"""The settings of a run: names, values, YAML, and the learning-rate schedule."""
