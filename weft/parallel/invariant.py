"""Recipe of the same bits: a token's results depend on no other token and on no number of ranks.

Every rank holds all tokens, [T, H]. Row-parallel GEMMs are cut into eight slices of K at every W, and added up in one tree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from weft import ops
from weft.ops.collectives.all_reduce import all_reduce_nodes
from weft.ops.collectives.tree import WORLD_SIZES
from weft.ops.overlap.matmul_all_reduce import matmul_nodes
from weft.parallel import invariant_local
from weft.parallel.quantized import rows_for
from weft.parallel.recipe import Cache
from weft.parallel.replicated import Replicated
from weft.parallel.step import Step
from weft.parallel.tensors import (
    AttentionWeights,
    LayerWeights,
    Matrix,
    MLPWeights,
    MoEWeights,
    NextWeights,
    NormWeights,
    SliceNodes,
    VocabWeights,
    own_rows,
)
from weft.runtime.team.team import Team

if TYPE_CHECKING:
    from weft.kernels.fp8 import Fp8, RowsBeside


@dataclass(frozen=True, slots=True, kw_only=True)
class Invariant(Replicated):
    """GEMM in slices and all-reduce in a tree, then the norm, for any number of tokens.

    sums_in_norm  the all-reduce comes with the norm after it, of the same bits; where there is none, or a bias, a norm of the
                  sum or a scale before it, it is a launch by itself
    """

    local: ModuleType = invariant_local
    sums_in_norm: bool = False
    name: ClassVar[str] = "invariant"

    @classmethod
    def of(cls, team: Team) -> Invariant:
        """The recipe of ``team``. ValueError where no tree spans its ranks."""
        if team.size not in WORLD_SIZES or team.rail is not None:
            raise ValueError(
                f"mode='invariant' on {team.size} ranks ({team.shape}): a tree of eight slices spans 1, 2, 4 or 8 ranks of one "
                f"node; use such a number of GPUs"
            )
        return cls(team=team)

    def of_single_layers(self) -> Invariant:
        return replace(self, sums_in_norm=False)

    def attention(self, x: Tensor, w: AttentionWeights, step: Step, cache: Cache) -> Tensor | SliceNodes:
        attended = self.local.attend(self.local.project(x, w, step), w, step, cache)
        if self.sums_in_norm and w.o_bias is None:
            return SliceNodes(matmul_nodes(attended, w.o, self.team))
        return w.with_o_bias(ops.matmul_all_reduce(attended, w.o, self.team, invariant=True))

    def mlp(self, x: Tensor, w: MLPWeights) -> Tensor | SliceNodes:
        gated = self.local.gated(x, w)
        if self.sums_in_norm:
            return SliceNodes(matmul_nodes(gated, w.down, self.team))
        return ops.matmul_all_reduce(gated, w.down, self.team, invariant=True)

    def before_mlp(self, w: LayerWeights) -> Matrix | None:
        return w.first_matrix  # experts' GEMMs in slices round their rows

    def moe(self, x: Tensor, w: MoEWeights) -> Tensor | SliceNodes:
        nodes, gate = self.local.experts(x, w, self.team)
        if self.sums_in_norm and w.shared is None:
            return SliceNodes(nodes)
        y = all_reduce_nodes(nodes, self.team)
        if w.shared is None:
            return y
        shared = self.of_single_layers().mlp(x, w.shared)
        return y + (shared if gate is None else shared * gate.sigmoid()[:, None])

    def output(self, x: Tensor | SliceNodes, norm: NormWeights | None, w: LayerWeights) -> Tensor | SliceNodes:
        if norm is None and w.residual_scale is None:
            return x
        return self.local.output(self.whole(x), norm, w.residual_scale)

    def add_norm(
        self, x: Tensor | SliceNodes, residual: Tensor | None, norm: NormWeights | None, weight: NextWeights = None
    ) -> tuple[Tensor | Fp8 | RowsBeside, Tensor]:
        if not isinstance(x, SliceNodes) or residual is None or norm is None:
            return self.local.add_norm(self.whole(x), residual, norm, weight)
        options = {"fp8": rows_for(weight, residual.dtype), "invariant": True}
        return ops.all_reduce_rms_norm(x.nodes, residual, norm.weight, norm.eps, self.team, **options)

    def hand_over(self, x: Tensor | SliceNodes, residual: Tensor, w: LayerWeights) -> Tensor:
        return own_rows(self.whole(x) + residual, self.team)

    def whole(self, x: Tensor | SliceNodes) -> Tensor:
        """The sum over the ranks."""
        return all_reduce_nodes(x.nodes, self.team) if isinstance(x, SliceNodes) else x

    def embed(self, tokens: Tensor, table: VocabWeights) -> Tensor:
        # Every row comes from one rank and is zero on all other ranks: exact, and -0.0 becomes 0.0 at every W.
        return ops.all_reduce(self.local.embed(tokens, table), self.team, invariant=True)
