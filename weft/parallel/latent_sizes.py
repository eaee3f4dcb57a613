"""Sizes of latent attention, without torch: tables of families have them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSizes:
    """Sizes of latent attention (MLA), under the names of config.json.

    scale            of scores
    q_lora_rank      width of the queries' latent; None: queries have none
    rope_interleave  the checkpoint's rotary embedding pairs neighbours
    """

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    scale: float
    q_lora_rank: int | None = None
    rope_interleave: bool = True

    @property
    def width(self) -> int:
        """Elements of a token in the cache."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def parameters(self, hidden_size: int, heads: int) -> int:
        """Number of weights in the matrices of a layer."""
        q = heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        of_q = hidden_size * q if self.q_lora_rank is None else self.q_lora_rank * (hidden_size + q)
        of_kv = hidden_size * self.width + self.kv_lora_rank * heads * (self.qk_nope_head_dim + self.v_head_dim)
        return of_q + of_kv + hidden_size * heads * self.v_head_dim
