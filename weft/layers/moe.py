"""Mixture of gated MLPs, its experts or their intermediate features split over the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from weft.arguments import check_bool, check_int, is_integer, positive, quoted
from weft.layers.gradients import SummedGradient, with_gradients
from weft.layers.mlp import TPMLP
from weft.layers.whole_moe import checked
from weft.ops.moe.route import MAX_EXPERTS, check_gating
from weft.ops.moe.routing import MAX_CHOICES, ClampedSwiGLU, Experts
from weft.parallel.linear import (
    check_layer,
    check_rows,
    empty_parameter,
    matrix_parameter,
    scales_beside,
    split_evenly,
)
from weft.parallel.modes import Mode, mode_named
from weft.parallel.quantized import Formats, formats_under
from weft.parallel.recipe import StepPlan
from weft.parallel.sharding import Shard, VectorShard, fill, under, whole
from weft.parallel.step_plan import plan_layer
from weft.parallel.tensors import Gating, MoEWeights, tensor_of

if TYPE_CHECKING:
    from weft.runtime.team.team import Team

Layout = Literal["whole", "slices"] | tuple[int, int]
LAYOUTS = ("whole", "slices")


def check_layout(name: str, layout: Layout, world_size: int | None = None) -> None:
    """ValueError unless ``layout`` is one of LAYOUTS, or (ep, tp) whose product is W if it is given."""
    if isinstance(layout, tuple):
        if len(layout) != 2 or not all(is_integer(one) and one >= 1 for one in layout):
            raise ValueError(f"{name}={quoted(layout)} is not (ep, tp): ep groups of tp ranks, two positive integers")
        ep, tp = layout
        if world_size is not None and ep * tp != world_size:
            raise ValueError(
                f"{name}={layout} is for {ep * tp} ranks, not for world_size={world_size}; ep groups of tp ranks are all"
            )
    elif not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(f"{name}={quoted(layout)} is not one of {', '.join(map(repr, LAYOUTS))} or a tuple (ep, tp)")


def _share(num_experts: int, features: int, layout: Layout, team: Team) -> tuple[Experts, int, int]:
    """This rank's experts, the index of its slice of their features, and the size of that slice."""
    if layout == "whole":
        return Experts.whole(num_experts, team.rank, team.size), 0, features
    if layout == "slices":
        return Experts.slices(num_experts), team.rank, split_evenly("intermediate_size", features, team)
    ep, tp = layout
    if features % tp:
        raise ValueError(f"intermediate_size={features} is not divisible by tp={tp} of layout={layout}")
    return Experts.grouped(num_experts, team.rank, ep, tp), team.rank % tp, features // tp


class MoE(nn.Module):
    """y[t] = sum over t's k experts of weight[t, e] * mlp[e](x[t]) + shared(x[t])

    with mlp[e](x) = down[e](silu(gate[e](x)) * up[e](x)); shared is such an MLP too, or 0

    x, y: [M, hidden] or [batch, length, hidden] on every rank; in mode "sequence_parallel" this rank's 1/W of the rows, as many
    as every other rank's.

    layout  "whole": each rank holds num_experts / W experts (expert parallel); "slices": 1/W of the intermediate features of
            all experts (tensor parallel), so that ranks have equal work whatever tokens choose; (ep, tp): of ep groups of tp
            neighbouring ranks each holds num_experts / ep experts, a rank 1/tp of their features

    scoring, norm_topk_prob, router_bias, groups, group_limit, scale
            how tokens choose by the router's logits: arguments of ``weft.ops.route``, norm_topk_prob its ``renormalize``
    shared_intermediate_size
            features of a gated MLP of all tokens, split over the ranks in every layout; None: there is none. With
            ``shared_gate`` its result is times sigmoid(x @ shared_expert_gate.T)

    formats      of the experts' and the shared one's weights; None: they are in `dtype`. Quantized ones have no gradients:
                 RuntimeError. The router is in `dtype`
    projections  a checkpoint's names of gate, up and down of the experts that tokens choose
    router_name, router_bias_name, shared_name
                 a checkpoint's names of the router, of the tensor of its bias and of the expert of all tokens

    bias, logit_bias  biases of the experts' gate, up and down; of the router, added to its logits
    clamped_swiglu    (alpha, limit) of ``weft.ops.moe.routing.ClampedSwiGLU`` in place of silu(gate) * up. With these three a
                      mixture has no gradients

    No token is dropped. ValueError where W, ep or tp does not divide what it is to split.

    Its weights carry no gradients before ``moe.requires_grad_()``. Then gradients are of the sum of all ranks' losses: where
    all ranks have all tokens and the same loss, each divides it by W. The router's is summed over the ranks in the backward, so
    that it stays the same on all; x.grad belongs to this rank's x. Not in mode "reference": RuntimeError.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        num_experts_per_tok: int,
        norm_topk_prob: bool = True,
        scoring: str = "softmax",
        router_bias: bool = False,
        groups: int = 1,
        group_limit: int = 1,
        scale: float = 1.0,
        shared_intermediate_size: int | None = None,
        shared_gate: bool = False,
        layout: Layout = "whole",
        team: Team,
        mode: Mode,
        dtype: torch.dtype,
        formats: Formats | None = None,
        projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        router_name: str = "gate",
        router_bias_name: str = "gate.e_score_correction_bias",
        shared_name: str = "shared_expert",
        bias: bool = False,
        logit_bias: bool = False,
        clamped_swiglu: tuple[float, float] | None = None,
    ) -> None:
        super().__init__()
        check_layer(
            team, mode, dtype, hidden_size=hidden_size, intermediate_size=intermediate_size, num_experts=num_experts
        )
        check_int("num_experts", num_experts, 1, MAX_EXPERTS)
        check_int("num_experts_per_tok", num_experts_per_tok, 1, min(num_experts, MAX_CHOICES))
        check_bool("router_bias", router_bias)
        check_bool("shared_gate", shared_gate)
        self.gating = Gating(num_experts_per_tok, scoring, norm_topk_prob, groups, group_limit, scale)
        check_gating("MoE", num_experts, self.gating)
        if shared_gate and shared_intermediate_size is None:
            raise ValueError("shared_gate=True without shared_intermediate_size; pass both, or neither")
        check_layout("layout", layout, team.size)
        self.team, self.mode, self.layout, self.features = team, mode_named(mode), layout, intermediate_size
        self.experts, self.slice, features = _share(num_experts, intermediate_size, layout, team)
        # One GEMM gives the experts' logits and the gate's.
        self.router = empty_parameter(num_experts + shared_gate, hidden_size, team=team, dtype=dtype)
        self.router_bias = empty_parameter(num_experts, team=team, dtype=torch.float32) if router_bias else None
        self.projections, self.shared_name = projections, shared_name
        self.router_name, self.router_bias_name = router_name, router_bias_name
        names = [[f"experts.{e}.{name}" for e in range(num_experts)] for name in projections]
        first, second = (None, None) if formats is None else (formats(names[0] + names[1]), formats(names[2]))
        options = {"team": team, "dtype": dtype}
        self.gate_up = matrix_parameter(self.experts.count, 2 * features, hidden_size, format=first, **options)
        self.gate_up_scales = scales_beside(self.gate_up, hidden_size, first, row_edges=[features])
        self.down = matrix_parameter(self.experts.count, hidden_size, features, format=second, **options)
        cut = [features] if features < intermediate_size else []
        self.down_scales = scales_beside(self.down, features, second, column_edges=cut)
        self.local_features = features
        self.logit_bias = empty_parameter(num_experts, **options) if logit_bias else None
        self.gate_up_bias = self.down_bias = None
        if bias:
            self.gate_up_bias = empty_parameter(self.experts.count, 2 * features, **options)
            self.down_bias = empty_parameter(self.experts.count, hidden_size, **options)
            if self.slice:
                # Slices are summed: the first one has the bias.
                self.down_bias.data.zero_()
        self.swiglu = None if clamped_swiglu is None else ClampedSwiGLU(*clamped_swiglu)
        self.register_buffer("tickets", torch.zeros(1, dtype=torch.int32, device=team.device), persistent=False)
        self.shared_expert = None
        if shared_intermediate_size is not None:
            split_evenly(
                "shared_intermediate_size", positive("shared_intermediate_size", shared_intermediate_size), team
            )
            sizes = {"hidden_size": hidden_size, "intermediate_size": shared_intermediate_size}
            self.shared_expert = TPMLP(
                **sizes, team=team, mode=mode, dtype=dtype, formats=formats_under(shared_name, formats)
            )

    @classmethod
    def from_module(cls, module: nn.Module, team: Team, mode: Mode, layout: Layout = "whole") -> MoE:
        """This rank's share of a whole mixture, as transformers' Qwen3MoeSparseMoeBlock.

        Or Qwen2MoeSparseMoeBlock or MixtralSparseMoeBlock. ValueError, with the difference, for any other function.
        """
        tensors, gating = checked(module)
        num_experts, hidden_size = tensors["gate.weight"].shape
        shared = tensors.get("shared_expert.gate_proj.weight")
        moe = cls(
            hidden_size=hidden_size,
            intermediate_size=tensors["experts.0.gate_proj.weight"].shape[0],
            num_experts=num_experts,
            num_experts_per_tok=gating.k,
            norm_topk_prob=gating.renormalize,
            shared_intermediate_size=None if shared is None else len(shared),
            shared_gate="shared_expert_gate.weight" in tensors,
            layout=layout,
            team=team,
            mode=mode,
            dtype=tensors["gate.weight"].dtype,
        )
        shards = moe.shards()
        names = shards.keys() | {
            f"experts.{e}.{name}_proj.weight" for e in range(num_experts) for name in ("gate", "up", "down")
        }
        if unknown := sorted(tensors.keys() - names):
            raise ValueError(f"module={type(module).__name__} has {unknown[:3]} that MoE does not use")
        fill(shards, {name: tensors[name] for name in shards}, type(module).__name__)
        return moe

    @property
    def weights(self) -> MoEWeights:
        shared = None if self.shared_expert is None else self.shared_expert.weights
        gate_up = self.gate_up if self.gate_up_scales is None else self.gate_up_scales.matrix(self.gate_up)
        down = self.down if self.down_scales is None else self.down_scales.matrix(self.down)
        tensors = self.router, self.router_bias, gate_up, down
        beside = self.logit_bias, self.gate_up_bias, self.down_bias, self.swiglu
        slices = self.layout == "slices"
        return MoEWeights(*tensors, self.experts, self.gating, shared, self.tickets, *beside, slices=slices)

    def shards(self) -> dict[str, Shard]:
        """Shards of the router, of this rank's experts and of the shared one."""
        router, gate = self.router.data.split([self.experts.total, len(self.router) - self.experts.total])
        shards = {f"{self.router_name}.weight": whole(router)}
        if self.router_bias is not None:
            shards[self.router_bias_name] = VectorShard.of(self.router_bias)
        if self.logit_bias is not None:
            shards[f"{self.router_name}.bias"] = whole(self.logit_bias)
        if self.shared_expert is not None:
            shards |= under(self.shared_name, self.shared_expert.shards())
        if len(gate):
            shards["shared_expert_gate.weight"] = whole(gate)
        hidden, features = self.down.shape[1], self.local_features
        first = self.slice * features
        for local in range(self.experts.count):
            gate, up = self.gate_up.data[local].chunk(2)
            rows = {"shape": (self.features, hidden), "start": first}
            columns = {"shape": (hidden, self.features), "dim": 1, "start": first}
            parts = (
                (Shard(target=gate, **rows), self.gate_up_scales, 0),
                (Shard(target=up, **rows), self.gate_up_scales, features),
                (Shard(target=self.down.data[local], **columns), self.down_scales, 0),
            )
            for projection, (shard, scales, begin) in zip(self.projections, parts, strict=True):
                name = f"experts.{self.experts.first + local}.{projection}"
                scaled = None if scales is None else scales.shards(name, shard, begin, local)
                shards |= {f"{name}.weight": shard} if scaled is None else scaled
            if self.gate_up_bias is not None:
                shards |= self._bias_shards(local)
        # One scale for the inputs of all experts, also of other ranks.
        for projection, scales in zip(self.projections, (self.gate_up_scales,) * 2 + (self.down_scales,), strict=True):
            for expert in range(self.experts.total if scales is not None else 0):
                shards |= scales.input_shards(f"experts.{expert}.{projection}")
        return shards

    def _bias_shards(self, local: int) -> dict[str, Shard]:
        """Shards of the biases of an expert here."""
        prefix, (gate, up, down) = f"experts.{self.experts.first + local}", self.projections
        rows = {"shape": (self.features,), "start": self.slice * self.local_features}
        of_gate, of_up = self.gate_up_bias.data[local].chunk(2)
        shards = {
            f"{prefix}.{gate}.bias": Shard(target=of_gate, **rows),
            f"{prefix}.{up}.bias": Shard(target=of_up, **rows),
        }
        if self.slice == 0:
            of_down = self.down_bias.data[local]
            shards[f"{prefix}.{down}.bias"] = Shard(target=of_down, shape=tuple(of_down.shape))
        return shards

    def forward(self, x: torch.Tensor, plan: StepPlan | None = None) -> torch.Tensor:
        """If the plan's norms add up over the ranks, y is this rank's summand."""
        check_rows("MoE", x, self.router)
        rows = x.flatten(0, -2)
        if plan is None:
            shards = self.team.size if self.mode == "sequence_parallel" else 1
            plan = plan_layer(len(rows) * shards, mode=self.mode, team=self.team)
        weights = self.weights
        if with_gradients(self, x, plan):
            if plan.invariant:
                raise RuntimeError(
                    "mode='invariant' has no gradients of experts; use mode='replicated', or torch.no_grad()"
                )
            weights = weights._replace(router=SummedGradient.apply(self.router, self.team))
        y = tensor_of(plan.recipe.moe(plan.recipe.given(rows), weights))
        return y.unflatten(-2, x.shape[:-1]) if x.dim() == 3 else y
