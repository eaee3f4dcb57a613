"""Tensor-parallel layers in three modes: "torch", "ag_rs" (tokens sharded) and "gemm_ar" (tokens replicated)."""

from weft.layers.attention import Step, TPAttention
from weft.layers.mlp import TPMLP
from weft.layers.parallel import MODES, ColumnParallelLinear, Mode, RowParallelLinear
from weft.layers.vocabulary import VocabParallelEmbedding, VocabParallelHead

__all__ = [
    "MODES",
    "TPMLP",
    "ColumnParallelLinear",
    "Mode",
    "RowParallelLinear",
    "Step",
    "TPAttention",
    "VocabParallelEmbedding",
    "VocabParallelHead",
]
