"""Detector of races, misused signals and deadlocks, which observes a simulated machine.

Reading order: ``vector_clocks`` and ``thread_clocks`` (what a thread of execution knows), ``happens_before`` (edges between
them), ``races`` (shadow memory), ``signals``, ``residency``, ``host_operations`` (accesses of host code), ``findings``.
``detector`` receives the machine's events.
"""
