"""Cost model: the predicted time of a call by each design, from a GPU's few constants (docs/costs.md)."""
