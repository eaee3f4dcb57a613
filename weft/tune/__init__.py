"""``weft tune``: which tiles, transports and designs an op should take on this machine, measured and written down."""
