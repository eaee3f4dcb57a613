"""Device code that several ops share, and what its operands must be. Nothing here chooses how a call runs."""
