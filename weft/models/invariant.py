"""Models that mode "invariant" computes: the rest is refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from weft.models.config import DecoderConfig


def check_invariant(config: DecoderConfig, dtype: torch.dtype, fused: bool | None) -> None:
    """ValueError for a part of the model whose sums have no order that is the same in every pass."""
    quantization, attention = config.quantization, config.attention
    scheme = None if quantization is None else quantization.format.name
    for refused, what, why in (
        (fused is False, "fused=False", "torch's operations choose an order of sums by the batch"),
        (dtype == torch.float32, f"dtype={dtype}", "it is for bfloat16 and float16"),
        (config.linear_attention is not None, "gated delta nets", "chunks of a prompt would be summed as they are cut"),
        (attention.latent is not None, "latent attention", "prompts and decode steps multiply other matrices"),
        (attention.norm_all_heads, "norms over all heads", "ranks would sum their heads' squares"),
        (
            attention.norm_after_rotary,
            "norms after the rotary embedding",
            "no test compares the bits of its two launches",
        ),
        (config.block.residual_scale is not None, "scaled residuals", "they are not rounded alike on all ranks"),
        (
            quantization is not None and getattr(quantization.format, "scheme", None) != "block",
            f"weights in {scheme}",
            "it is for weights of 16 bits and for fp8 in blocks of 128",
        ),
    ):
        if refused:
            raise ValueError(
                f"mode='invariant' of {config.family.name} with {what}: {why}; choose another mode or model"
            )
