"""Benchmarks of ops: shapes, providers and baselines."""
