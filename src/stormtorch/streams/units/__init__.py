"""Units: how a model is cut into them, their order of use, and how much room they need."""
