"""Harness: what is equal for all workloads of a benchmark."""
