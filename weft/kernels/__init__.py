"""Device code that several ops share, and its operands. No plan is chosen here."""
