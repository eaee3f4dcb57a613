"""Base of all recipes, and the plan of a forward pass: one of them, with the reason."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, ClassVar

from torch import Tensor

from weft.parallel.tensors import (
    AttentionWeights,
    LayerWeights,
    MLPWeights,
    MoEWeights,
    NormWeights,
    SequenceShard,
    VocabWeights,
)


class Recipe:
    """Way to run a decoder's parts on a team; subclasses define the tensors between them.

    local  weft.parallel.fused or weft.parallel.plain: what a rank computes between the GEMMs
    name   of the mode
    """

    __slots__ = ()
    local: ModuleType
    name: ClassVar[str]

    def decoder_layer(self, x: Any, residual: Any, w: LayerWeights, step: Any, cache: Any) -> tuple[Any, Any]:
        """(output, residual) of one layer; residual None: the first layer."""
        raise NotImplementedError

    def attention(self, x: Any, w: AttentionWeights, step: Any, cache: Any) -> Any:
        raise NotImplementedError

    def feed_forward(self, x: Any, w: MLPWeights | MoEWeights) -> Any:
        return self.moe(x, w) if isinstance(w, MoEWeights) else self.mlp(x, w)

    def mlp(self, x: Any, w: MLPWeights) -> Any:
        raise NotImplementedError

    def moe(self, x: Any, w: MoEWeights) -> Any:
        raise NotImplementedError

    def embed(self, tokens: Tensor, table: VocabWeights) -> Any:
        raise NotImplementedError

    def hand_over(self, x: Any, residual: Any, w: LayerWeights) -> Tensor:
        """This rank's 1/W of the hidden states' rows, [ceil(T / W), H], for a model that goes on elsewhere.

        w  the last layer's, for recipes whose kernels norm what they add up
        """
        raise NotImplementedError

    def take_over(self, rows: Tensor, tokens: int) -> Any:
        """Input of a layer without a residual, from the rows that ``hand_over`` gave; `tokens`: T."""
        raise NotImplementedError

    def logits(
        self, x: Any, residual: Any, norm: NormWeights, head: VocabWeights, step: Any, rows: Tensor | None
    ) -> Tensor:
        """This rank's columns of the logits of ``rows``; None: of all tokens."""
        raise NotImplementedError

    def given(self, x: Tensor) -> Tensor | SequenceShard:
        """The input of a layer used by itself, by its meaning."""
        return x

    def of_single_layers(self) -> Recipe:
        """The same for layers used by themselves: no norm follows that could add up a result over the ranks."""
        return self

    def without_deferred_scale(self) -> Recipe:
        """The same with whole norms before GEMMs."""
        return self

    def of_head(self, rows: int) -> Recipe:
        """The same for the last norm and the head, of ``rows`` tokens."""
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Recipe of one forward pass and the reason for it."""

    recipe: Recipe
    reason: str = "asked for"

    @property
    def mode(self) -> str:
        return self.recipe.name

    @property
    def fused(self) -> bool:
        """True if local work between the GEMMs runs in weft's kernels."""
        return self.recipe.local.FUSED

    def of_single_layers(self) -> StepPlan:
        return replace(self, recipe=self.recipe.of_single_layers())

    def __str__(self) -> str:
        return f"{self.recipe}: {self.reason}"
