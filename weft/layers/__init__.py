"""Parallel MLP, mixture of experts and attention: modules that call a recipe of weft.parallel.

mode               tokens between layers     recipe
reference          replicated [M, H]         torch and torch.distributed
sequence_parallel  sharded    [M/W, H]       all_gather_matmul, matmul_reduce_scatter
replicated         replicated [M, H]         matmul_all_reduce, or a fused all-reduce + norm after the GEMM
invariant          replicated [M, H]         GEMMs in slices of K, added up in one tree (docs/same-bits.md)
"""

from weft.layers.attention import TPAttention
from weft.layers.foreign import Replaced, replace
from weft.layers.invariant_model import token_logprobs
from weft.layers.mlp import TPMLP
from weft.layers.moe import MoE
from weft.parallel.modes import MODES, Mode
from weft.parallel.rotary import rotary_angles
from weft.parallel.sequences import Sequences
from weft.parallel.step import PagedCache, Step
from weft.parallel.step_plan import plan_layer, plan_step

__all__ = [
    "MODES",
    "TPMLP",
    "MoE",
    "Mode",
    "PagedCache",
    "Replaced",
    "Sequences",
    "Step",
    "TPAttention",
    "plan_layer",
    "plan_step",
    "replace",
    "rotary_angles",
    "token_logprobs",
]
