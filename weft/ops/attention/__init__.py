"""Attention over a paged KV cache, and what prepares it."""
