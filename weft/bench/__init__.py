"""``weft bench``: every way to do an op, checked and then timed side by side (DESIGN.md, "How we measure")."""
