"""``weft bench``: all providers of an op, checked and then timed side by side."""
