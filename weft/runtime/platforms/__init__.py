"""The platforms of a team behind one interface: GPUs, and virtual ranks."""
