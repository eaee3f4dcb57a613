"""Pictures of the README, as SVG without external tools: ``python -m benchmarks.pictures`` writes docs/pictures.

timeline  an AG-GEMM of four virtual ranks, by weft.trace in virtual time
check     what ``weft check examples/scales_after_rows.py`` prints, line after line
badges    version, Pythons, Triton and license, from pyproject.toml
engines   milliseconds a token beside other engines, from benchmarks/lab; ``python -m benchmarks.performance`` writes it too
"""
