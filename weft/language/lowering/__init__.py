"""Lowerings of the primitives: stock Triton, PTX and CDNA3 assembly, the simulator.

No file but ``ptx`` and ``gcn`` contains assembly.
"""
