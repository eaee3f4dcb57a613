"""Collectives: by stores that carry their own arrival, or by copy engines."""
