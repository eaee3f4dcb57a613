"""Thresholds that recipes, layers and models depend on, each as a question."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from weft.ops.collectives.all_reduce_rms_norm import takes_rows
from weft.ops.collectives.collective import of_world
from weft.ops.gemm.small_m_rule import is_small
from weft.ops.overlap.sequential import rows_overlap

if TYPE_CHECKING:
    from weft.parallel.tensors import Matrix
    from weft.runtime.team.team import Team

# Tokens from which "auto" splits them over the ranks: the GEMMs are long enough to hide the communication. Two H200s,
# Qwen3-32B, 2,048 tokens: 110 ms, not split 115 (lab/h200-x2-modes.json@4c5a438; `weft bench model --run-type prefill`).
SHARDED_TOKENS = 2048
# Tokens up to which the all-reduce waits for the next norm, by world size: the GEMM before it is too short to hide it. Two
# H200s, 1,024 tokens: 56.7 ms, with the all-reduce in the GEMM 58.2 (lab/h200-x2-modes.json@4c5a438). One rank sends nothing:
# there the norm adds up the GEMM's split-K partials, and a token of Qwen3-0.6B takes 0.83 ms in place of 1.18 on an H200
# (lab/h200-engines/weft-qwen3-0.6b.json@cc3baf2, before lab/h200-engines/weft-qwen3-0.6b.json@9c4321d).
FUSED_NORM_TOKENS = {1: 128, 2: 1024, 4: 512}
# Rows (heads times tokens) of new prompts of one length from which cuDNN's attention beats weft's prefill kernel, though it
# needs the keys outside the cache, a memset and a pause. One H200, 2,048 tokens by weft's kernel: 48.8 us, by cuDNN 60.4
# (lab/h200-prefill-attention.json@4c5a438).
CUDNN_ROWS = 65536
# Cached tokens before new ones from which cuDNN's attention pays too. Their keys are then copied out of the pages, which for
# 4 KV heads of 128 and 4,096 new tokens is 2 % of the attention, and parts are merged. The limit is arithmetic; with it the
# first token of 131,072 of Qwen3-8B on two H200s comes after 6.94 s in place of 8.08
# (benchmarks/lab/h200-x2-spread-prompts.json, before h200-x2-spread-prompts-1083d8c.json; spread_prompts.py).
CUDNN_CACHED = 16384


def splits_tokens(tokens: int) -> bool:
    """True if the GEMMs of these tokens are long enough to hide gathering and scattering them."""
    return tokens >= SHARDED_TOKENS


def norm_adds_up(tokens: int, row_bytes: int, world_size: int) -> bool:
    """True if a fused all-reduce + norm takes such rows, and is faster than the all-reduce in the GEMM."""
    return takes_rows(row_bytes) and tokens <= of_world(FUSED_NORM_TOKENS, world_size)


def defers_scale(dtype: torch.dtype, team: Team) -> bool:
    """True where the deferred RMS scale was measured to be faster. In fp16 it may overflow.

    Over nodes the norm is a further kernel, and needs none.
    """
    return team.rail is None and dtype == torch.bfloat16 and team.caps.arch == "sm_90"


def gemm_divides(rows: int) -> bool:
    """True if a GEMM of this M applies a deferred RMS scale; a larger one leaves it to the next kernel."""
    return is_small(rows)


def overlaps(tokens: int, world_size: int) -> bool:
    """True if there are enough tokens, padded to a multiple of the world size, for an AG-GEMM to pay."""
    return rows_overlap(-(-tokens // world_size) * world_size)


def cudnn_attends(rows: int) -> bool:
    """True if cuDNN beats ``ops.paged_prefill_attention`` for new prompts of one length.

    rows  query heads times tokens, in all
    """
    return rows >= CUDNN_ROWS


def cudnn_attends_after(rows: int, cached: int, weight: Matrix, head_dim: int) -> bool:
    """True if cuDNN beats ``ops.paged_prefill_attention`` for new tokens after ``cached`` ones.

    rows    query heads times new tokens of the sequence
    weight  of the projection: cuDNN takes 16 bits, on NVIDIA GPUs, as the activations of quantized weights are there
    """
    takes = (
        (not isinstance(weight, torch.Tensor) or weight.itemsize == 2) and head_dim <= 128 and torch.version.hip is None
    )
    return takes and cached >= CUDNN_CACHED and cudnn_attends(rows)
