"""Names of the ways to compute a layer over ranks. Without torch: the command line checks them first."""

from __future__ import annotations

from typing import Literal

from weft.arguments import did_you_mean, quoted

Mode = Literal["reference", "sequence_parallel", "replicated", "auto", "invariant", "torch", "ag_rs", "gemm_ar"]
MODES = ("reference", "sequence_parallel", "replicated", "auto", "invariant")
OLD_MODES = {"torch": "reference", "ag_rs": "sequence_parallel", "gemm_ar": "replicated"}
"""Old names of modes, which are accepted too."""


def mode_named(mode: str) -> str:
    """The name of a mode, which may be given by its old one. ValueError for an unknown mode."""
    check_mode(mode)
    return OLD_MODES.get(mode, mode)


def check_mode(mode: str) -> None:
    """ValueError unless `mode` is one of MODES or its old name."""
    if not isinstance(mode, str) or (mode not in MODES and mode not in OLD_MODES):
        known = did_you_mean(mode, (*MODES, *OLD_MODES))
        raise ValueError(f"mode={quoted(mode)} is unknown; choose one of {', '.join(MODES)}{known}")
