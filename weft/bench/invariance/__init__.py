"""Proof that tokens and log-probabilities have the same bits in every configuration: ``weft bench invariance``."""
