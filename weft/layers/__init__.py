"""Tensor-parallel layers in three modes: "torch", "ag_rs" (tokens sharded) and "gemm_ar" (tokens replicated)."""

from weft.layers.attention import TPAttention
from weft.layers.mlp import TPMLP
from weft.layers.norm import ResidualRMSNorm
from weft.layers.parallel import ColumnParallelLinear, RowParallelLinear
from weft.layers.plan import MODES, Mode, Plan, choose_plan
from weft.layers.rotary import rotary_angles
from weft.layers.step import PagedCache, Step
from weft.layers.vocabulary import VocabParallelEmbedding, VocabParallelHead

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
