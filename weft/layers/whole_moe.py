"""Whole mixtures of experts of transformers: checked, and their weights by names of a checkpoint."""

from __future__ import annotations

import torch
from torch import nn

from weft.ops.moe.routing import Experts
from weft.parallel import plain
from weft.parallel.tensors import Gating, MLPWeights, MoEWeights


def checked(module: nn.Module) -> tuple[dict[str, torch.Tensor], Gating]:
    """(weights by their names in a checkpoint, gating) of a module.

    ValueError where it computes something else than MoE.
    """
    name, computes = f"module={type(module).__name__}", "MoE.from_module takes softmax routing to gated MLPs with silu"
    children, state = dict(module.named_children()), module.state_dict()
    wanted = _wanted(children, name, computes)
    if state.keys() != set(wanted):
        raise ValueError(f"{name} has weights {sorted(state)}; MoE.from_module takes {sorted(wanted)}")
    router, gate_up, down, *beside = (state[one] for one in wanted)
    k = getattr(children["gate"], "top_k", None)
    if type(k) is not int:
        raise ValueError(f"{name} has a gate without top_k; {computes}")
    shared = MLPWeights(torch.cat(beside[:2]), beside[2]) if "shared_expert" in children else None
    rows, experts = torch.cat([router, *beside[3:]]), Experts.slices(len(router))
    x = torch.randn(5, router.shape[1], generator=torch.Generator().manual_seed(0)).to(router)
    with torch.no_grad():
        result = module(x[None])
    result = (result[0] if isinstance(result, tuple) else result).reshape(x.shape).float()
    for renormalize in (True, False):
        gating = Gating(k, renormalize=renormalize)
        expected = plain.experts(x, MoEWeights(rows, None, gate_up, down, experts, gating, shared)).float()
        tolerance = 1e-3 if router.dtype in (torch.float32, torch.float64) else 5e-2
        if (result - expected).abs().max() <= tolerance * expected.abs().max():
            break
    else:
        raise ValueError(
            f"{name} gives another result than softmax routing to {len(router)} experts, {k} a token; {computes}"
        )
    tensors = {"gate.weight": router, **dict(zip(wanted[3:], beside, strict=True))}
    for e in range(len(router)):
        gate, up = gate_up[e].chunk(2)
        parts = {"gate": gate, "up": up, "down": down[e]}
        tensors |= {f"experts.{e}.{part}_proj.weight": weight for part, weight in parts.items()}
    return tensors, gating


def _wanted(children: dict[str, nn.Module], name: str, computes: str) -> list[str]:
    """Names of a mixture's weights. ValueError for a child that is missing or unknown."""
    if missing := [one for one in ("gate", "experts") if one not in children]:
        raise ValueError(f"{name} has no {', '.join(missing)}; {computes}")
    if unknown := sorted(children.keys() - {"gate", "experts", "shared_expert", "shared_expert_gate"}):
        raise ValueError(f"{name} has {', '.join(unknown)} beside its experts; {computes}")
    wanted = ["gate.weight", "experts.gate_up_proj", "experts.down_proj"]
    if "shared_expert" in children:
        wanted += [f"shared_expert.{part}_proj.weight" for part in ("gate", "up", "down")]
    if "shared_expert_gate" in children:
        wanted.append("shared_expert_gate.weight")
    return wanted
