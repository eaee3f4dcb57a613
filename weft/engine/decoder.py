"""Interface through which the engine runs a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

if TYPE_CHECKING:
    from weft.layers.plan import Plan
    from weft.layers.step import PagedCache, Step
    from weft.layers.vocabulary import VocabParallelHead
    from weft.models.checkpoint import Checkpoint, Progress
    from weft.models.loading import ModelConfig
    from weft.runtime.team import Team


@runtime_checkable
class Decoder(Protocol):
    """Decoder over all ranks of `team`, its vocabulary split over them. Collective: all ranks call it with the same tokens.

    group   query heads of a KV head
    angles  [max_positions, head_dim] fp32, of the rotary embedding
    """

    config: ModelConfig
    team: Team
    dtype: torch.dtype
    lm_head: VocabParallelHead
    angles: torch.Tensor

    @property
    def group(self) -> int: ...

    def load(self, checkpoint: Checkpoint, progress: Progress | None = None) -> list[str]:
        """Read this rank's weights. Returns warnings, a line each."""
        ...

    def fill_dummy(self, seed: int = 0) -> Any:
        """Set random weights."""
        ...

    def plan(self, tokens: int) -> Plan:
        """How a forward pass of `tokens` tokens is computed."""
        ...

    def new_cache(self, pages: int, page_size: int) -> PagedCache: ...

    def decode_step(self, positions: torch.Tensor, pages: torch.Tensor, page_size: int) -> Step:
        """One new token of each sequence at positions[B] (-1: padding), with the page table pages[B, max_pages]."""
        ...

    def prefill_step(self, spans: Sequence[tuple[int, int]], pages: torch.Tensor, page_size: int) -> Step:
        """Sequence b goes on by `length` tokens after `before` cached ones; (before, length) = spans[b]."""
        ...

    def __call__(
        self, tokens: torch.Tensor, step: Step, cache: PagedCache, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """This rank's logits [n, V'/W] behind the tokens `rows` [n]; None: behind each token."""
        ...

    def fill_cache(self, tokens: torch.Tensor, step: Step, cache: PagedCache) -> None:
        """Write keys and values without computing logits."""
        ...
