"""Pictures of README and tutorials, as SVG without external tools: ``python -m benchmarks.pictures`` writes docs/pictures.

timeline  an AG-GEMM of four virtual ranks, by weft.trace in virtual time
check     what ``weft check examples/scales_after_rows.py`` prints, line after line
badges    version, Pythons, Triton and license, from pyproject.toml
double-buffering  why a half may be written again two calls later (docs/tutorials/2_all_gather.md)
engines   milliseconds a token beside other engines, from benchmarks/lab; ``python -m benchmarks.performance`` writes it too
"""
