"""Plan of one forward pass: its recipe, chosen once, by the number of its tokens, with the reason.

Recipes change where ``weft.costs.recipes`` predicts that a layer takes less time by the next one.
"""

from __future__ import annotations

import math
import operator
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from weft.costs.choice import told
from weft.costs.gpu import gpu_of, of_device
from weft.costs.recipes import FUSED_NORM, REPLICATED, SEQUENCE_PARALLEL, Changes, Layer, changes, times
from weft.ops.collectives.all_reduce_rms_norm import takes_rows
from weft.parallel import fused as FUSED
from weft.parallel import plain as PLAIN
from weft.parallel.invariant import Invariant
from weft.parallel.modes import Mode, mode_named
from weft.parallel.recipe import StepPlan
from weft.parallel.reference import Reference
from weft.parallel.replicated import FusedNorm, Replicated
from weft.parallel.sequence_parallel import GatheredMLP, SequenceParallel
from weft.plan.memo import remembered
from weft.runtime.capabilities import Capabilities

if TYPE_CHECKING:
    from weft.runtime.team.team import Team

# Width of the layer by whose times a layer used by itself is planned, whose sizes no caller names.
WIDTH = 4096


def plan_step(
    tokens: int,
    *,
    mode: Mode,
    hidden_size: int,
    dtype: torch.dtype,
    team: Team,
    fused: bool | None = None,
    layer: Layer | None = None,
) -> StepPlan:
    """Plan for a forward pass of `tokens` tokens, all sequences together.

    mode   "auto" becomes a mode other than "reference" and "invariant"
    fused  local work in weft's kernels, if not False. Mode "reference" never is
    layer  sizes of most layers of the model; None: as of a dense one of this width
    """
    mode, reason = mode_named(mode), "asked for"
    layer = layer or Layer.dense(hidden_size, team.size, dtype.itemsize)
    adds_up = takes_rows(hidden_size * dtype.itemsize) and _local(team, fused) is FUSED
    if mode == "auto":
        recipe, reason = _recipe(tokens, layer, _ranks(team), team.caps, adds_up)
        mode = "sequence_parallel" if recipe == SEQUENCE_PARALLEL else "replicated"
    elif mode == "replicated" and adds_up:
        recipe, reason = _replicated(tokens, layer, _ranks(team), team.caps)
    if mode == "replicated" and adds_up and recipe == FUSED_NORM:
        return StepPlan(recipe=FusedNorm(team=team, deferred_scale=defers_scale(dtype, team)), reason=reason)
    plan = plan_layer(tokens, mode=mode, team=team, fused=fused, layer=layer)
    if isinstance(plan.recipe, Invariant):
        plan = replace(plan, recipe=replace(plan.recipe, sums_in_norm=takes_rows(hidden_size * dtype.itemsize)))
    return replace(plan, reason=reason)


def plan_layer(
    tokens: int, *, mode: Mode, team: Team, fused: bool | None = None, layer: Layer | None = None
) -> StepPlan:
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
    most = 0
    if local is FUSED:
        most = _of_width(WIDTH, team)[1] if layer is None else _changes(layer, team).gathered
    recipe = GatheredMLP if tokens <= most else SequenceParallel
    return StepPlan(recipe=recipe(team=team, local=local))


def splits_tokens(tokens: int, hidden_size: int, team: Team) -> bool:
    """True if "auto" splits the tokens of a dense model of this width over the ranks."""
    return tokens >= _of_width(hidden_size, team)[0]


def defers_scale(dtype: torch.dtype, team: Team) -> bool:
    """True where the deferred RMS scale was measured to be faster. In fp16 it may overflow.

    Over nodes the norm is a further kernel, and needs none.
    """
    return team.rail is None and dtype == torch.bfloat16 and gpu_of(team.caps).limits.deferred_scale


def _of_width(hidden_size: int, team: Team) -> tuple[float, float]:
    """(tokens from which a dense layer is split, most tokens that it gathers before the MLP)."""
    caps = team.caps
    # One text: torch.compile knows its value, where of an attribute or a size it may know the name alone.
    numbers = map(operator.index, (hidden_size, team.size, _ranks(team), caps.sms))
    return _constant(" ".join([*map(str, numbers), caps.arch, caps.device_name]))


def _constant(asked: str) -> tuple[float, float]:
    """``_of_width`` by a text: torch.compile asks for it once, and traces no cost function."""
    *numbers, arch, device_name = asked.split(" ", 5)
    hidden_size, world_size, ranks, sms = map(int, numbers)
    at = changes(Layer.dense(hidden_size, world_size), ranks, of_device(device_name, arch, sms))
    return at.sharded, at.gathered


# As torch.compiler.assume_constant_result does, which imports torch's compiler.
_constant._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _changes(layer: Layer, team: Team) -> Changes:
    return changes(layer, _ranks(team), gpu_of(team.caps))


def _ranks(team: Team) -> int:
    """Ranks by whose links times are predicted: of several nodes one's, since no rail was measured."""
    return team.size if team.rail is None else max(2, team.node.size)


@remembered
def _recipe(tokens: int, layer: Layer, world_size: int, caps: Capabilities, adds_up: bool) -> tuple[str, str]:
    """(recipe in mode "auto", reason). adds_up: norms may add up over the ranks."""
    gpu, passed = gpu_of(caps), _passed(tokens)
    at = changes(layer, world_size, gpu)
    at = at if adds_up else at._replace(fused_norm=0)
    recipe = at.recipe(tokens)
    if world_size == 1:
        adds = f"; {passed} <= {at.fused_norm}: the norm adds up a GEMM's parts" if recipe == FUSED_NORM else ""
        return recipe, f"one rank: nothing to send{adds}"
    known = {name: us for name, us in times(tokens, layer, world_size, gpu).items() if adds_up or name != FUSED_NORM}
    limit = ", never split" if at.sharded == math.inf else f" {'<' if tokens < at.sharded else '>='} {at.sharded}"
    return recipe, f"{passed}{limit}: {told(recipe, known, caps, 'of a layer')}"


@remembered
def _replicated(tokens: int, layer: Layer, world_size: int, caps: Capabilities) -> tuple[str, str]:
    """(recipe in mode "replicated", reason)."""
    gpu = gpu_of(caps)
    most = changes(layer, world_size, gpu).fused_norm
    recipe = FUSED_NORM if tokens <= most else REPLICATED
    limit = f"asked for; {_passed(tokens)} {'<=' if tokens <= most else '>'} {most}"
    if world_size == 1:
        return recipe, f"{limit}: the norm adds up a GEMM's parts" if recipe == FUSED_NORM else "asked for"
    known = {name: us for name, us in times(tokens, layer, world_size, gpu).items() if name != SEQUENCE_PARALLEL}
    return recipe, f"{limit}: {told(recipe, known, caps, 'of a layer')}"


def _passed(tokens: int) -> str:
    return f"{tokens} token{'s' if tokens != 1 else ''}"


def _local(team: Team, fused: bool | None) -> ModuleType:
    """Local work as asked for; None: in weft's kernels."""
    return PLAIN if fused is False else FUSED
