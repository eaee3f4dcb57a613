"""Mixture of experts: the choice of experts, the order of their rows, and the GEMMs of each on its own rows."""
