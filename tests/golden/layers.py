"""TPMLP and TPAttention of random modules in each mode: a prefill of ragged prompts, two decode steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import weft
from weft.layers import TPMLP, PagedCache, Step, TPAttention, plan_step, rotary_angles

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, PAGE = 64, 8, 4, 16, 16
ANGLES = rotary_angles(64, HEAD_DIM, 50.0, torch.device("cpu"))
CONFIG = SimpleNamespace(
    hidden_size=HIDDEN,
    intermediate_size=96,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    rms_norm_eps=1e-6,
)
# (mode, fused kernels); "gemm_ar" with fused kernels leaves the sum over the ranks to the norm that follows.
PLANS = (("torch", False), ("gemm_ar", False), ("gemm_ar", True), ("ag_rs", False), ("ag_rs", True))


def modules(dtype: torch.dtype) -> tuple[nn.Module, nn.Module, Any]:
    """An MLP and an attention of Qwen3 with random weights, and their configuration."""
    from transformers.models.qwen3 import modeling_qwen3

    full = modeling_qwen3.Qwen3Config(
        **vars(CONFIG), num_hidden_layers=1, rope_parameters={"rope_type": "default", "rope_theta": 50.0}
    )
    made = modeling_qwen3.Qwen3MLP(full), modeling_qwen3.Qwen3Attention(full, layer_idx=0)
    generator = torch.Generator().manual_seed(5)
    for module in made:
        for weight in module.to(dtype).requires_grad_(False).parameters():
            weight.data = (0.3 * torch.randn(weight.shape, generator=generator)).to(dtype)
    return *made, full


def share(x: torch.Tensor, team: Any, mode: str) -> torch.Tensor:
    """The tokens that this rank is given."""
    if mode != "ag_rs":
        return x
    return nn.functional.pad(x, (0, 0, 0, -len(x) % team.size)).chunk(team.size)[team.rank]


def run(team: Any, mode: str, fused: bool, dtype: torch.dtype) -> list[torch.Tensor]:
    mlp, attention, config = modules(dtype)
    tp_mlp = TPMLP.from_module(mlp, team, mode)
    tp_attention = TPAttention.from_module(attention, config, team, mode)
    generator = torch.Generator().manual_seed(9)
    lengths = (5, 20, 1)
    pages = 1 + torch.randperm(6, generator=generator).to(torch.int32).view(3, 2)
    cache = PagedCache(1, 7, tp_attention.num_kv_heads, PAGE, HEAD_DIM, dtype=dtype, device="cpu").layer(0)

    def plan(tokens: int) -> Any:
        return plan_step(tokens, mode=mode, hidden_size=HIDDEN, dtype=dtype, team=team, fused=fused)

    def both(x: torch.Tensor, step: Step) -> list[torch.Tensor]:
        mine = share(x, team, mode)
        return [tp_attention(mine, step, cache), tp_mlp(mine, step.plan)]

    x = torch.randn((sum(lengths), HIDDEN), generator=generator).to(dtype)
    group = tp_attention.num_heads // tp_attention.num_kv_heads
    spans = [(0, length) for length in lengths]
    found = both(x, Step.prefill(spans, pages, PAGE, ANGLES, plan(len(x)), group, dtype))
    for step in range(2):
        x = torch.randn((4, HIDDEN), generator=generator).to(dtype)
        positions = torch.tensor([*(length + step for length in lengths), -1])
        table = torch.cat((pages, torch.zeros(1, 2, dtype=torch.int32)))
        found += both(x, Step.decode(positions, table, PAGE, ANGLES, plan(4), tp_attention.num_kv_heads))
    return [*found, *cache]


def cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    for world_size in (1, 2, 4):
        for mode, fused in PLANS:
            for dtype in (torch.float32, torch.bfloat16):
                name = f"layers/{mode}{'-fused' if fused else ''}-{str(dtype).removeprefix('torch.')}-W{world_size}"
                yield name, lambda w=world_size, args=(mode, fused, dtype): weft.simulate(run, w, args=args)
