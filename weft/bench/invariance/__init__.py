"""``weft bench invariance``: bits of tokens and log-probabilities in every configuration."""
