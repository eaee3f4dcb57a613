"""Plan of one forward pass: its recipe, chosen once, by the number of its tokens, with the reason.

What it depends on is asked of ``thresholds.py``.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from weft.ops.collectives.collective import of_world
from weft.parallel import fused as FUSED
from weft.parallel import plain as PLAIN
from weft.parallel.invariant import Invariant
from weft.parallel.modes import Mode, mode_named
from weft.parallel.recipe import StepPlan
from weft.parallel.reference import Reference
from weft.parallel.replicated import FusedNorm, Replicated
from weft.parallel.sequence_parallel import GatheredMLP, SequenceParallel
from weft.parallel.thresholds import (
    FUSED_NORM_TOKENS,
    SHARDED_TOKENS,
    defers_scale,
    norm_adds_up,
    overlaps,
    splits_tokens,
)

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


def plan_step(
    tokens: int, *, mode: Mode, hidden_size: int, dtype: torch.dtype, team: Team, fused: bool | None = None
) -> StepPlan:
    """Plan for a forward pass of `tokens` tokens, all sequences together.

    mode   "auto" becomes a mode other than "reference" and "invariant"
    fused  local work in weft's kernels, if not False. Mode "reference" never is
    """
    mode, reason, passed = mode_named(mode), "asked for", f"{tokens} token{'s' if tokens != 1 else ''}"
    if mode == "auto":
        if team.size == 1:
            mode, reason = "replicated", "one rank: nothing to send"
        elif splits_tokens(tokens):
            mode = "sequence_parallel"
            reason = f"{passed} >= {SHARDED_TOKENS}: the GEMMs hide gathering and scattering"
        else:
            mode, reason = "replicated", f"{passed} < {SHARDED_TOKENS}: too few to split over {team.size} ranks"
    row_bytes = hidden_size * dtype.itemsize
    if mode == "replicated" and norm_adds_up(tokens, row_bytes, team.size) and _local(team, fused) is FUSED:
        limit = of_world(FUSED_NORM_TOKENS, team.size)
        if team.size == 1:
            reason += f"; {passed} <= {limit}: the norm adds up a GEMM's parts"
        else:
            reason += f"; {passed} <= {limit}: a GEMM is too short to hide an all-reduce, so the norm takes it along"
        return StepPlan(recipe=FusedNorm(team=team, deferred_scale=defers_scale(dtype, team)), reason=reason)
    return replace(plan_layer(tokens, mode=mode, team=team, fused=fused), reason=reason)


def plan_layer(tokens: int, *, mode: Mode, team: Team, fused: bool | None = None) -> StepPlan:
    """Plan for a layer used by itself: ``plan_step``, but "auto" is "replicated"."""
    mode = mode_named(mode)
    if mode == "invariant":
        if fused is False:
            raise ValueError("fused=False beside mode='invariant': torch's operations have other bits; leave it out")
        return StepPlan(recipe=Invariant.of(team))
    if mode == "reference":
        return StepPlan(recipe=Reference(team=team))
    local = _local(team, fused)
    if mode != "sequence_parallel":
        return StepPlan(recipe=Replicated(team=team, local=local))
    recipe = GatheredMLP if local is FUSED and not overlaps(tokens, team.size) else SequenceParallel
    return StepPlan(recipe=recipe(team=team, local=local))


def _local(team: Team, fused: bool | None) -> ModuleType:
    """Local work as asked for; None: in weft's kernels."""
    return PLAIN if fused is False else FUSED
