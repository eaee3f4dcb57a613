"""Benchmark of a decoder layer's forward and backward in the sequence-parallel recipe."""
