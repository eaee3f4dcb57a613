"""Recipe of the same bits: a token's results depend on no other token and on no number of ranks.

Every rank holds all tokens, [T, H]. Row-parallel GEMMs are cut into eight slices of K at every W, and added up in one tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

from torch import Tensor

from weft import ops
from weft.ops.collectives.all_reduce import all_reduce_nodes
from weft.ops.collectives.tree import WORLD_SIZES
from weft.parallel import invariant_local
from weft.parallel.replicated import Cache, Replicated
from weft.parallel.step import Step
from weft.parallel.tensors import AttentionWeights, LayerWeights, Matrix, MLPWeights, MoEWeights, VocabWeights
from weft.runtime.team.team import Team


@dataclass(frozen=True, slots=True, kw_only=True)
class Invariant(Replicated):
    """GEMM in slices and all-reduce in a tree, then the norm, for any number of tokens."""

    local: ModuleType = invariant_local
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

    def attention(self, x: Tensor, w: AttentionWeights, step: Step, cache: Cache) -> Tensor:
        attended = self.local.attend(self.local.project(x, w, step), w, step, cache)
        return w.with_o_bias(ops.matmul_all_reduce(attended, w.o, self.team, invariant=True))

    def mlp(self, x: Tensor, w: MLPWeights) -> Tensor:
        return ops.matmul_all_reduce(self.local.gated(x, w), w.down, self.team, invariant=True)

    def before_mlp(self, w: LayerWeights) -> Matrix | None:
        return w.first_matrix  # experts' GEMMs in slices round their rows

    def moe(self, x: Tensor, w: MoEWeights) -> Tensor:
        nodes, gate = self.local.experts(x, w, self.team)
        y = all_reduce_nodes(nodes, self.team)
        if w.shared is None:
            return y
        shared = self.mlp(x, w.shared)
        return y + (shared if gate is None else shared * gate.sigmoid()[:, None])

    def embed(self, tokens: Tensor, table: VocabWeights) -> Tensor:
        # Every row comes from one rank and is zero on all other ranks: exact, and -0.0 becomes 0.0 at every W.
        return ops.all_reduce(self.local.embed(tokens, table), self.team, invariant=True)
