"""``weft tune``: search for the fastest tiles, transports and designs of ops on this machine."""
