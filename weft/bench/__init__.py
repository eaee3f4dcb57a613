"""``weft bench``: every way to do an op, checked and then timed side by side (docs/design.md, "How we measure")."""
