"""Embedding and sampling over a sharded vocabulary."""
