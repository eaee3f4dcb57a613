"""Plan of one forward pass: its recipe, chosen once, by the number of its tokens, with the reason.

Every threshold that recipes, layers and models depend on is a question asked here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Literal

import torch

from weft.arguments import quoted
from weft.ops.collectives.all_reduce_rms_norm import takes_rows
from weft.ops.collectives.collective import of_world
from weft.ops.gemm.small_m_rule import is_small
from weft.ops.overlap.sequential import rows_overlap
from weft.parallel import fused as FUSED
from weft.parallel import plain as PLAIN
from weft.parallel.reference import Reference
from weft.parallel.replicated import FusedNorm, Replicated
from weft.parallel.sequence_parallel import GatheredMLP, SequenceParallel
from weft.parallel.tensors import SequenceShard

if TYPE_CHECKING:
    from weft.parallel.step import Chunk
    from weft.runtime.team.team import Team

Mode = Literal["reference", "sequence_parallel", "replicated", "auto", "torch", "ag_rs", "gemm_ar"]
MODES = ("reference", "sequence_parallel", "replicated", "auto")
OLD_MODES = {"torch": "reference", "ag_rs": "sequence_parallel", "gemm_ar": "replicated"}
"""Old names of modes, which are accepted too."""

Recipe = FusedNorm | Replicated | SequenceParallel | Reference

# Tokens from which "auto" splits them over the ranks: the GEMMs are long enough to hide the communication. Figures of both
# limits: docs/decisions.md, "Modes".
SHARDED_TOKENS = 2048
# Tokens up to which the all-reduce waits for the next norm, by world size: the GEMM before it is too short to hide it. Measured
# on two.
FUSED_NORM_TOKENS = {2: 1024, 4: 512}
# Rows (heads times tokens) of new prompts of one length from which cuDNN's attention beats weft's prefill kernel on an H200
# (docs/decisions.md, "Attention").
CUDNN_ROWS = 65536


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
        return self.recipe.local is FUSED

    def given(self, x: torch.Tensor) -> torch.Tensor | SequenceShard:
        """The input of a layer used by itself, by its meaning."""
        return SequenceShard(x) if isinstance(self.recipe, SequenceParallel) else x

    def of_single_layers(self) -> StepPlan:
        """The same for layers used by themselves: no norm follows that could add up a result over the ranks."""
        if not isinstance(self.recipe, FusedNorm):
            return self
        return replace(self, recipe=Replicated(team=self.recipe.team, local=self.recipe.local))

    def of_head(self, rows: int) -> StepPlan:
        """The same for the last norm and the head: no kernel would divide logits by root mean squares."""
        if isinstance(self.recipe, FusedNorm) and not gemm_divides(rows):
            return replace(self, recipe=replace(self.recipe, deferred_scale=False))
        return self

    def __str__(self) -> str:
        return f"{self.recipe}: {self.reason}"


def plan_step(
    tokens: int, *, mode: Mode, hidden_size: int, dtype: torch.dtype, team: Team, fused: bool | None = None
) -> StepPlan:
    """Plan for a forward pass of `tokens` tokens, all sequences together.

    mode   "auto" is one of the others, but not "reference"
    fused  local work in weft's kernels; None: where the team is on GPUs. Mode "reference" never is
    """
    mode, reason = mode_named(mode), "asked for"
    if mode == "auto":
        if team.size == 1:
            mode, reason = "replicated", "one rank: nothing to send"
        elif splits_tokens(tokens):
            mode = "sequence_parallel"
            reason = f"{tokens} tokens >= {SHARDED_TOKENS}: the GEMMs hide gathering and scattering"
        else:
            mode, reason = "replicated", f"{tokens} tokens < {SHARDED_TOKENS}: too few to split over {team.size} ranks"
    row_bytes = hidden_size * dtype.itemsize
    if mode == "replicated" and norm_adds_up(tokens, row_bytes, team.size) and _local(team, fused) is FUSED:
        limit = of_world(FUSED_NORM_TOKENS, team.size)
        reason += f"; {tokens} tokens <= {limit}: a GEMM is too short to hide an all-reduce, so the norm takes it along"
        return StepPlan(recipe=FusedNorm(team=team, deferred_scale=defers_scale(dtype, team)), reason=reason)
    return replace(plan_layer(tokens, mode=mode, team=team, fused=fused), reason=reason)


def plan_layer(tokens: int, *, mode: Mode, team: Team, fused: bool | None = None) -> StepPlan:
    """Plan for a layer used by itself: ``plan_step``, but "auto" is "replicated"."""
    mode = mode_named(mode)
    if mode == "reference":
        return StepPlan(recipe=Reference(team=team))
    local = _local(team, fused)
    if mode != "sequence_parallel":
        return StepPlan(recipe=Replicated(team=team, local=local))
    recipe = GatheredMLP if local is FUSED and not overlaps(tokens, team.size) else SequenceParallel
    return StepPlan(recipe=recipe(team=team, local=local))


def _local(team: Team, fused: bool | None) -> ModuleType:
    """Local work as asked for; None: in weft's kernels where the team is on GPUs."""
    return FUSED if fused or (fused is None and not team.is_simulated) else PLAIN


def mode_named(mode: str) -> str:
    """The name of a mode, which may be given by its old one. ValueError for an unknown mode."""
    check_mode(mode)
    return OLD_MODES.get(mode, mode)


def check_mode(mode: str) -> None:
    """ValueError unless `mode` is one of MODES or its old name."""
    if not isinstance(mode, str) or (mode not in MODES and mode not in OLD_MODES):
        raise ValueError(f"mode={quoted(mode)} is unknown; choose one of {', '.join(MODES)}")


# --- questions -----------------------------------------------------------------------------------------------------------


def splits_tokens(tokens: int) -> bool:
    """True if the GEMMs of these tokens are long enough to hide gathering and scattering them."""
    return tokens >= SHARDED_TOKENS


def norm_adds_up(tokens: int, row_bytes: int, world_size: int) -> bool:
    """True if a fused all-reduce + norm takes such rows, and is faster than the all-reduce in the GEMM."""
    return world_size > 1 and takes_rows(row_bytes) and tokens <= of_world(FUSED_NORM_TOKENS, world_size)


def defers_scale(dtype: torch.dtype, team: Team) -> bool:
    """True where the deferred RMS scale was measured to be faster. In fp16 it may overflow."""
    return dtype == torch.bfloat16 and (team.is_simulated or team.caps.arch == "sm_90")


def gemm_divides(rows: int) -> bool:
    """True if a GEMM of this M applies a deferred RMS scale; a larger one leaves it to the next kernel."""
    return is_small(rows)


def overlaps(tokens: int, world_size: int) -> bool:
    """True if there are enough tokens, padded to a multiple of the world size, for an AG-GEMM to pay."""
    return rows_overlap(-(-tokens // world_size) * world_size)


def cudnn_attends(chunks: Sequence[Chunk], heads: int) -> bool:
    """True if cuDNN beats ``ops.paged_prefill_attention``: new prompts alone, of many rows."""
    return bool(chunks) and all(c.before == 0 and c.batch * c.length * heads >= CUDNN_ROWS for c in chunks)
