"""Local work of the invariant recipe, in weft's kernels: a token's bits depend neither on the other tokens nor on the ranks.

The functions are the same as in weft.parallel.fused. Kernels that take a row in one program, with one shape of block, are the
same too; GEMMs are in slices of K (weft.ops.gemm.sliced), and results are whole tensors of 16 bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from weft import ops
from weft.parallel.fused import add_norm, embed, output, silu_mul
from weft.parallel.invariant_attention import attend
from weft.parallel.plain import adjusted_logits
from weft.parallel.tensors import AttentionWeights, DeltaWeights, MLAWeights, MLPWeights, MoEWeights, VocabWeights

if TYPE_CHECKING:
    from weft.parallel.step import Step

NAME, FUSED = "invariant", True
__all__ = ["add_norm", "attend", "embed", "experts", "gated", "logits", "output", "project", "silu_mul"]


def project(x: Tensor, w: AttentionWeights | MLAWeights | DeltaWeights, step: Step) -> Tensor:
    """Queries, keys and values of all tokens: [T, (heads + 2 kv_heads) * head_dim], for ``attend``."""
    if not isinstance(w, AttentionWeights):
        raise ValueError(
            f"mode='invariant': {type(w).__name__} has no invariant design; use a model with plain attention"
        )
    if w.norm_all_heads:
        raise ValueError("mode='invariant': norms over the heads of all ranks have no invariant design")
    return ops.matmul(x, w.qkv, invariant=True)


def gated(x: Tensor, w: MLPWeights) -> Tensor:
    """silu(x @ gate.T) * (x @ up.T), or by another activation: two launches."""
    return silu_mul(ops.matmul(x, w.gate_up, invariant=True), w.down, w.activation)


def experts(x: Tensor, w: MoEWeights) -> Tensor:
    raise ValueError("mode='invariant': mixtures of experts have no invariant design; use a dense model")


def logits(x: Tensor, head: VocabWeights) -> Tensor:
    """This rank's logits in x's dtype; -inf for padding of the vocabulary."""
    columns = adjusted_logits(ops.matmul(x, head.weight, invariant=True), head)
    if head.real < head.weight.shape[0]:
        columns[:, head.real :] = float("-inf")
    return columns
