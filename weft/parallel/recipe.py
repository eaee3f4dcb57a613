"""Base of all recipes, and the plan of a forward pass: a recipe and the reason for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from weft.parallel.tensors import (
    AttentionWeights,
    LayerWeights,
    MLPWeights,
    MoEWeights,
    NextWeights,
    NormWeights,
    SequenceShard,
    VocabWeights,
    own_rows,
    rows_of,
)

if TYPE_CHECKING:
    from weft.runtime.team.team import Team

# Hidden states as a subclass passes them on; a Step or Sequences, which name plans and so lie above.
Hidden, Tokens = Any, Any
# Pages of a layer's keys and values, and of an fp8 cache their scales.
Cache = tuple[Tensor, ...] | None


class Recipe:
    """Way to run a decoder's parts on a team; subclasses define the tensors between the parts.

    team   ranks that run it
    local  weft.parallel.fused or weft.parallel.plain: what a rank computes between the GEMMs
    name   of the mode
    """

    __slots__ = ()
    team: Team
    local: ModuleType
    name: ClassVar[str]

    def decoder_layer(
        self,
        x: Hidden,
        residual: Hidden,
        w: LayerWeights,
        step: Tokens,
        cache: Cache,
        inputs: list[Hidden] | None = None,
    ) -> tuple[Hidden, Hidden]:
        """(output, residual) of one layer; residual None: the first layer.

        inputs  gets the hidden states that enter the layer, rows as ``whole_rows`` takes them; None: they are not asked for
        """
        normed, residual = self.add_norm(x, residual, w.input_norm, self.before_attention(w))
        if inputs is not None:
            inputs.append(residual)
        x = self.output(self.attention(normed, w.attention, step, cache), w.attention_out_norm, w)
        normed, residual = self.add_norm(x, residual, w.post_norm, self.before_mlp(w))
        return self.output(self.feed_forward(normed, w.mlp), w.mlp_out_norm, w), residual

    def add_norm(
        self, x: Hidden, residual: Hidden, norm: NormWeights | None, weight: NextWeights = None
    ) -> tuple[Hidden, Hidden]:
        """(normed, hidden): hidden = x + residual, normed in the form that the GEMM of ``weight`` takes."""
        return self.local.add_norm(x, residual, norm, weight)

    def before_attention(self, w: LayerWeights) -> NextWeights:
        """Weight that decides the form of the rows before attention, as of ``add_norm``."""
        return w.attention_matrix

    def before_mlp(self, w: LayerWeights) -> NextWeights:
        """Weight that decides the form of the rows before the MLP, as of ``add_norm``."""
        return w.first_matrix

    def whole_rows(self, x: Tensor, tokens: int) -> Tensor:
        """Rows of all tokens, from the rows of hidden states that this rank has; `tokens`: T."""
        return x

    def attention(self, x: Hidden, w: AttentionWeights, step: Tokens, cache: Cache) -> Hidden:
        raise NotImplementedError

    def feed_forward(self, x: Hidden, w: MLPWeights | MoEWeights) -> Hidden:
        return self.moe(x, w) if isinstance(w, MoEWeights) else self.mlp(x, w)

    def output(self, x: Hidden, norm: NormWeights | None, w: LayerWeights) -> Hidden:
        """Rows that attention or MLP give, as they are added to the residual."""
        return self.local.output(x, norm, w.residual_scale)

    def mlp(self, x: Hidden, w: MLPWeights) -> Hidden:
        raise NotImplementedError

    def moe(self, x: Hidden, w: MoEWeights) -> Hidden:
        raise NotImplementedError

    def embed(self, tokens: Tensor, table: VocabWeights) -> Hidden:
        raise NotImplementedError

    def hand_over(self, x: Hidden, residual: Hidden, w: LayerWeights) -> Tensor:
        """This rank's 1/W of the hidden states' rows, [ceil(T / W), H], for a model that goes on elsewhere.

        w  the last layer's, for recipes whose kernels norm what they add up
        """
        return own_rows(x + residual, self.team)

    def take_over(self, rows: Tensor, tokens: int) -> Hidden:
        """Input of a layer without a residual, from the rows that ``hand_over`` gave; `tokens`: T."""
        raise NotImplementedError

    def logits(
        self, x: Hidden, residual: Hidden, norm: NormWeights, head: VocabWeights, step: Tokens, rows: Tensor | None
    ) -> Tensor:
        """This rank's columns of the logits of ``rows``; None: of all tokens."""
        return self.local.logits(self.last_norm(x, residual, norm, step, rows), head)

    def last_norm(self, x: Hidden, residual: Hidden, norm: NormWeights, step: Tokens, rows: Tensor | None) -> Tensor:
        """Normed output of the last layer for ``rows``, or for all tokens: whole on each rank, for the head."""
        if rows is not None:
            x, residual = rows_of(x, rows), residual[rows]
        normed, _ = self.add_norm(x, residual, norm)
        return normed

    def given(self, x: Tensor) -> Tensor | SequenceShard:
        """The input of a layer used by itself, by its meaning."""
        return x

    def of_single_layers(self) -> Recipe:
        """The same for layers used by themselves: no norm follows that could add up a result over the ranks."""
        return self

    def without_deferred_scale(self) -> Recipe:
        """The same with whole norms before GEMMs."""
        return self

    def with_wire(self, wire: str) -> Recipe:
        """The same with sums over the ranks that travel as ``wire`` of ``weft.ops.all_reduce`` says."""
        raise ValueError(f"wire={wire!r}: sums of {self} travel in their dtype; leave it out")

    def of_head(self, rows: int) -> Recipe:
        """The same for the last norm and the head, of ``rows`` tokens."""
        return self


def wire_text(wire: str) -> str:
    """Part of a recipe's text that says how its sums travel."""
    return {"same": "", "fp8": ", sums travel in fp8", "auto": ", sums travel in fp8 where it pays"}[wire]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Recipe of one forward pass and the reason for it."""

    recipe: Recipe
    reason: str = "asked for"

    @property
    def mode(self) -> str:
        return self.recipe.name

    @property
    def invariant(self) -> bool:
        """True if a token's bits depend neither on the other tokens of the pass nor on the number of ranks."""
        return self.mode == "invariant"

    @property
    def fused(self) -> bool:
        """True if local work between the GEMMs runs in weft's kernels."""
        return self.recipe.local.FUSED

    def of_single_layers(self) -> StepPlan:
        return replace(self, recipe=self.recipe.of_single_layers())

    def __str__(self) -> str:
        return f"{self.recipe}: {self.reason}"
