"""Regret of weft's choices: the time of a call by its plan over that of its best design."""
