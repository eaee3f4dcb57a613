"""Ways to compute a decoder layer over the ranks of a team, and what they share."""
