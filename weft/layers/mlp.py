"""MLPs with a gate or without, their intermediate features split over the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

from weft.arguments import check_choice
from weft.layers.gradients import plan_for, replicated_plan, with_gradients
from weft.layers.same_bits import with_backward
from weft.parallel.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    Rows,
    check_layer,
    check_rows,
    empty_parameter,
)
from weft.parallel.modes import Mode, mode_named
from weft.parallel.plain import ACTIVATIONS, UNGATED
from weft.parallel.quantized import Formats
from weft.parallel.recipe import StepPlan
from weft.parallel.sharding import Shard, VectorShard, fill_from_module, under
from weft.parallel.tensors import MLPWeights, tensor_of

if TYPE_CHECKING:
    from weft.runtime.team.team import Team

XIELU = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
"""Tensor of ``xielu`` → its shape in a checkpoint."""


class TPMLP(nn.Module):
    """y = (silu(x @ gate.T) * (x @ up.T)) @ down.T

    activation: in place of silu, a key of ``ACTIVATIONS`` in weft.parallel.plain. With a key of ``UNGATED`` there is no gate:
    y = activation(x @ up.T) @ down.T. "xielu" has four further tensors below `act_fn`, and no gradients: RuntimeError.
    x, y: [M, hidden] or [batch, length, hidden] on every rank; in mode "sequence_parallel" this rank's 1/W of the rows, as many
    as every other rank's. ValueError where W does not divide `intermediate_size`.
    formats: of the weights; None: they are in `dtype`. Quantized ones have no gradients: RuntimeError.

    Its weights carry no gradients before ``mlp.requires_grad_()``. Then gradients are of the sum of all ranks' losses: where
    all ranks have all tokens and the same loss, each divides it by W, and what every rank holds (x, norms) has the sum over the
    ranks as its gradient. Not in mode "reference": RuntimeError.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        intermediate_size: int,
        team: Team,
        mode: Mode,
        dtype: torch.dtype,
        formats: Formats | None = None,
        activation: str = "silu",
    ) -> None:
        super().__init__()
        check_choice("activation", activation, (*ACTIVATIONS, *UNGATED))
        check_layer(team, mode, dtype, hidden_size=hidden_size, intermediate_size=intermediate_size)
        self.team, self.mode, self.activation = team, mode_named(mode), activation
        rows = Rows.even("intermediate_size", intermediate_size, team)
        options = {"team": team, "dtype": dtype, "formats": formats}
        parts = {"up_proj": rows} if activation in UNGATED else {"gate_proj": rows, "up_proj": rows}
        self.gate_up_proj = ColumnParallelLinear(hidden_size, parts, **options)
        self.down_proj = RowParallelLinear("down_proj", intermediate_size, hidden_size, **options)
        shapes = XIELU if activation == "xielu" else {}
        self.act_fn = nn.ParameterDict(
            {name: empty_parameter(*shape, team=team, dtype=dtype) for name, shape in shapes.items()}
        )

    @classmethod
    def from_module(cls, module: nn.Module, team: Team, mode: Mode) -> TPMLP:
        """This rank's share of a whole MLP: `gate_proj`, `up_proj`, `down_proj`, as in transformers' Qwen3MLP.

        ValueError, with the difference, for one that computes anything else.
        """
        _check_module(module)
        intermediate_size, hidden_size = module.gate_proj.weight.shape
        mlp = cls(
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            team=team,
            mode=mode,
            dtype=module.gate_proj.weight.dtype,
        )
        fill_from_module(mlp.shards(), module)
        return mlp

    @property
    def weights(self) -> MLPWeights:
        gate_up, down = self.gate_up_proj, self.down_proj
        # A ParameterDict has an order of its keys, not of XIELU.
        further = tuple(self.act_fn[name] for name in XIELU) if self.act_fn else ()
        return MLPWeights(gate_up.matrix, down.matrix, self.activation, gate_up.lora, down.lora, further)

    def shards(self) -> dict[str, Shard]:
        of_activation = {name: VectorShard.of(parameter) for name, parameter in self.act_fn.items()}
        return self.gate_up_proj.shards() | self.down_proj.shards() | under("act_fn", of_activation)

    def forward(self, x: torch.Tensor, plan: StepPlan | None = None) -> torch.Tensor:
        """If the plan's norms add up over the ranks, y is this rank's summand, or split-K partials of it."""
        check_rows("TPMLP", x, self.gate_up_proj.matrix)
        rows = x.flatten(0, -2)
        if plan is None:
            plan = plan_for(self, x, len(rows) * (self.team.size if self.mode == "sequence_parallel" else 1))
        recorded = with_gradients(self, x, plan)
        if recorded and self.act_fn:
            raise RuntimeError(f"TPMLP: activation={self.activation!r} has no gradients; use torch.no_grad()")
        if recorded and plan.mode == "invariant":
            again = replicated_plan(plan)
            return with_backward(self, x, lambda x: self(x, plan), lambda x: self(x, again))
        y = tensor_of(plan.recipe.mlp(plan.recipe.given(rows), self.weights))
        return y.unflatten(-2, x.shape[:-1]) if x.dim() == 3 else y


def _check_module(module: nn.Module) -> None:
    """ValueError where `module` computes something else than TPMLP."""
    name = f"module={type(module).__name__}"
    computes = "TPMLP computes silu(gate) * up and nothing else"
    children = dict(module.named_children())
    if "gate_up_proj" in children:
        raise ValueError(f"{name} has a fused gate_up_proj; split it into gate_proj and up_proj")
    if missing := [one for one in ("gate_proj", "up_proj", "down_proj") if one not in children]:
        raise ValueError(f"{name} has no {', '.join(missing)}; {computes}")
    act_fn = getattr(module, "act_fn", None)
    points = torch.linspace(-4, 4, 9)
    if act_fn is None or not torch.allclose(act_fn(points), F.silu(points)):
        function = "no act_fn" if act_fn is None else f"act_fn={type(act_fn).__name__}"
        raise ValueError(f"{name} has {function}; {computes}")
    weights = [getattr(children[one], "weight", None) for one in ("gate_proj", "up_proj", "down_proj")]
    if not all(isinstance(weight, torch.Tensor) and weight.is_floating_point() for weight in weights):
        raise ValueError(f"{name} has projections without weights of floating point; {computes}")
    if [*module.state_dict()] != ["gate_proj.weight", "up_proj.weight", "down_proj.weight"]:
        return  # a bias, or a weight more: fill_from_module names it
    gate, up, down = weights
    x = torch.randn(2, gate.shape[1], generator=torch.Generator().manual_seed(0)).to(gate)
    with torch.no_grad():
        result, expected = module(x).float(), F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down).float()
    tolerance = 1e-3 if gate.dtype in (torch.float32, torch.float64) else 5e-2
    if not (result - expected).abs().max() <= tolerance * expected.abs().max():
        raise ValueError(
            f"{name} gives another result than down(silu(gate(x)) * up(x)), by a multiplier perhaps; {computes}"
        )
