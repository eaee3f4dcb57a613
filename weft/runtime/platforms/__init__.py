"""The platforms of a team, with one interface: GPUs, and virtual ranks."""
