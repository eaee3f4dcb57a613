"""Local work of the invariant recipe, in weft's kernels.

A token's bits depend neither on the other tokens nor on the ranks.

The functions are the same as in weft.parallel.fused. Kernels that take a row in one program, with one shape of block, are the
same too; GEMMs are in slices of K (weft.ops.gemm.sliced), and results are whole tensors of 16 bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from weft import ops
from weft.kernels.slices import SLICES
from weft.ops.gemm.matmul import matmul_column_nodes
from weft.ops.moe.grouped_matmul import products_of_slices
from weft.ops.moe.moe_sum import moe_nodes
from weft.ops.moe.route import LONE_TOKENS
from weft.parallel import fused
from weft.parallel.fused import activated, embed
from weft.parallel.invariant_attention import attend
from weft.parallel.plain import adjusted_logits, scaled
from weft.parallel.quantized import rows_between
from weft.parallel.sequences import Sequences
from weft.parallel.tensors import (
    AttentionWeights,
    DeltaWeights,
    MLAWeights,
    MLPWeights,
    MoEWeights,
    NextWeights,
    NormWeights,
    SplitK,
    VocabWeights,
)

if TYPE_CHECKING:
    from weft.kernels.fp8 import Fp8, RowsBeside
    from weft.parallel.step import Step
    from weft.runtime.team.team import Team

NAME, FUSED = "invariant", True
__all__ = ["activated", "add_norm", "attend", "embed", "experts", "gated", "logits", "output", "project"]


def project(
    x: Tensor | Fp8, w: AttentionWeights | MLAWeights | DeltaWeights, step: Step | Sequences
) -> Tensor | SplitK:
    """Queries, keys and values of all tokens: [T, (heads + 2 kv_heads) * head_dim], for ``attend``.

    Of few tokens its two nodes, which the next kernel adds up, where norms or a bias of 16 bits say to what it rounds them.
    """
    if not isinstance(w, AttentionWeights):
        raise ValueError(
            f"mode='invariant': {type(w).__name__} has no invariant design; use a model with plain attention"
        )
    if w.norm_all_heads:
        raise ValueError("mode='invariant': norms over the heads of all ranks have no invariant design")
    if w.unrotated is not None:
        raise ValueError("mode='invariant': norms after the rotary embedding have no invariant design")
    says_dtype = any(one is not None and one.itemsize == 2 for one in (w.q_norm, w.bias))
    if w.gated or isinstance(step, Sequences) or not says_dtype:
        return ops.matmul(x, w.qkv, invariant=True)
    product = matmul_column_nodes(x, w.qkv)
    return SplitK(product) if product.dim() == 3 else product


def add_norm(
    x: Tensor, residual: Tensor | None, norm: NormWeights | None, weight: NextWeights = None
) -> tuple[Tensor | Fp8 | RowsBeside, Tensor]:
    """``weft.parallel.fused.add_norm`` with the bits of a norm that comes with the sum over the ranks."""
    return fused.add_norm(x, residual, norm, weight, invariant=True)


def output(x: Tensor, norm: NormWeights | None, scale: float | None) -> Tensor:
    """Rows of attention or MLP as they are added to the residual: normed, then scaled, a launch each."""
    return scaled(x if norm is None else add_norm(x, None, norm)[0], scale)


def gated(x: Tensor, w: MLPWeights) -> Tensor:
    """silu(x @ gate.T) * (x @ up.T), or by another activation: two launches.

    ``ops.matmul_silu_mul`` would save one with weights of 16 bits; no GPU has run its invariant design.
    """
    return activated(ops.matmul(x, w.gate_up, invariant=True), w)


def experts(x: Tensor, w: MoEWeights, team: Team) -> tuple[Tensor, Tensor | None]:
    """(nodes of what this rank's experts add to x's rows, logits of the shared expert's gate or None).

    A node is of an eighth of all experts, or where ranks hold slices, of the features of each. It adds up a token's choices in
    their order, in fp32, and rounds once.
    """
    count, held = SLICES // team.size, w.experts
    if not w.slices and (held.total % SLICES or held.count * team.size != held.total):
        raise ValueError(
            f"mode='invariant': {held.count} of {held.total} experts on each of {team.size} ranks; use expert_layout='whole' "
            f"with a number of experts that {SLICES} divides, or 'slices'"
        )
    if w.down_bias is not None:
        raise ValueError("mode='invariant': experts with a bias after the second GEMM have no invariant design")
    logits, gate = w.logits(ops.matmul(x, w.router, invariant=True))
    parts = [ops.route(rows, bias=w.bias, **w.gating._asdict()) for rows in logits.split(LONE_TOKENS)]
    routing = parts[0] if len(parts) == 1 else ops.Routing(*map(torch.cat, zip(*parts, strict=True)))
    schedule = ops.moe_schedule(routing.ids, held, tickets=w.tickets)
    format = rows_between(w.gate_up, w.down, x.dtype)
    h = ops.grouped_matmul_silu_mul(x, w.gate_up, schedule, fp8=format, **w.of_first, invariant=True)
    if w.slices:
        ys = products_of_slices(h, w.down, schedule, count, SLICES)
        return moe_nodes(ys.unbind(), routing, [(0, held.total)] * count), gate
    y, width = ops.grouped_matmul(h, w.down, schedule, invariant=True), held.count // count
    return moe_nodes([y] * count, routing, [(held.first + part * width, width) for part in range(count)]), gate


def logits(x: Tensor, head: VocabWeights) -> Tensor:
    """This rank's logits in x's dtype; -inf for padding of the vocabulary."""
    return adjusted_logits(ops.matmul(x, head.weight, invariant=True), head)
