"""Speculation of ``weft bench generate``: drafts of a step, and a stated number of accepted tokens."""

from __future__ import annotations

from weft.engine.speculation.options import SpeculativeConfig


def speculation_of(words: str) -> SpeculativeConfig:
    """Options of speculation by --speculate DRAFTS:TOKENS. ValueError for other words."""
    drafts, _, tokens = words.partition(":")
    try:
        count, length = int(drafts), float(tokens)
    except ValueError:
        raise ValueError(f"--speculate {words} is not DRAFTS:TOKENS, such as 3:2.5") from None
    return SpeculativeConfig(
        num_speculative_tokens=count,
        adaptive=False,
        rejection_sample_method="synthetic",
        synthetic_acceptance_length=length,
    )
