"""Tensor-parallel layers in three modes: "torch", "ag_rs" (tokens sharded) and "gemm_ar" (tokens replicated)."""

from weft.layers.attention import TPAttention
from weft.layers.mlp import TPMLP
from weft.parallel.linear import ColumnParallelLinear, RowParallelLinear
from weft.parallel.norm import ResidualRMSNorm
from weft.parallel.rotary import rotary_angles
from weft.parallel.step import PagedCache, Step
from weft.parallel.step_plan import MODES, Mode, Plan, choose_plan
from weft.parallel.vocabulary import VocabParallelEmbedding, VocabParallelHead

__all__ = [
    "MODES",
    "TPMLP",
    "ColumnParallelLinear",
    "Mode",
    "PagedCache",
    "Plan",
    "ResidualRMSNorm",
    "RowParallelLinear",
    "Step",
    "TPAttention",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "choose_plan",
    "rotary_angles",
]
