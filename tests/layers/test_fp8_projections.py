"""Projections in fp8 whose rows a rank has in another order than a checkpoint: bytes * scales are the whole matrix's."""

from types import SimpleNamespace

import pytest
import torch

from tests.fp8_checkpoints import dequantized, quantized
from weft.kernels.fp8 import Fp8, quantized_weight
from weft.layers import TPAttention
from weft.parallel.quantized import Fp8Format
from weft.parallel.sharding import fill

HIDDEN = 192
SCALE = {"block": "weight_scale_inv", "channel": "weight_scale", "tensor": "weight_scale"}


def team_of(world_size, rank):
    return SimpleNamespace(rank=rank, size=world_size, device=torch.device("cpu"))


def checkpoint_of(shapes, scheme, stored):
    """(tensors by name as a checkpoint has them, matrices in fp32 of bytes * scales)"""
    generator, tensors, wide = torch.Generator().manual_seed(1), {}, {}
    for name, shape in shapes.items():
        # Blocks and rows have scales of their own.
        weight = torch.randn(shape, generator=generator) * torch.rand(shape[0], 1, generator=generator).exp()
        if stored:
            tensors[f"{name}.weight"], tensors[f"{name}.{SCALE[scheme]}"] = quantized(weight, scheme)
            data, scales = tensors[f"{name}.weight"], tensors[f"{name}.{SCALE[scheme]}"]
            wide[name] = dequantized(data, scales, scheme, wide=torch.float32)
        else:
            tensors[f"{name}.weight"] = weight
            wide[name] = quantized_weight(weight, scheme).dequantized(torch.float32)
    return tensors, wide


def formats_of(scheme, stored, *names):
    """Formats of these matrices; the rest is of 16 bits."""
    format = Fp8Format(scheme=scheme, scale=SCALE[scheme] if stored else None)
    return lambda asked: format if asked[0] in names else None


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(
    ("scheme", "stored", "D", "rotated", "rows"),
    [
        ("block", True, 256, 64, 32),  # Qwen3.5's heads
        ("block", False, 256, 64, 32),
        ("block", True, 128, None, 128),
        ("block", True, 96, None, 32),
        ("channel", True, 96, 24, 1),
        ("channel", False, 64, None, 1),
        ("tensor", True, 64, 16, 1),
    ],
)
def test_gated_attention_has_the_rows_of_the_whole_matrices(world_size, scheme, stored, D, rotated, rows):
    heads, kv_heads = 4, 2
    shapes = {"q_proj": (2 * heads * D, HIDDEN), "k_proj": (kv_heads * D, HIDDEN), "v_proj": (kv_heads * D, HIDDEN)}
    tensors, wide = checkpoint_of(shapes, scheme, stored)
    others = {"o_proj.weight": torch.zeros(HIDDEN, heads * D), "q_norm.weight": torch.ones(D)}
    others["k_norm.weight"] = others["q_norm.weight"]
    r = D if rotated is None else rotated
    # The kernels rotate i and i + D / 2.
    order = [*range(r // 2), *range(r, (D + r) // 2), *range(r // 2, r), *range((D + r) // 2, D)]
    queries, gates = wide["q_proj"].view(heads, 2, D, HIDDEN).unbind(1)
    keys, values = (wide[name].view(kv_heads, D, HIDDEN) for name in ("k_proj", "v_proj"))
    for rank in range(world_size):
        attention = TPAttention(
            hidden_size=HIDDEN, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=D, rms_norm_eps=1e-6,
            team=team_of(world_size, rank), mode="reference", dtype=torch.float32, rotated=rotated, gated=True,
            formats=formats_of(scheme, stored, *shapes),
        )  # fmt: skip
        fill(attention.shards(), tensors | others, "checkpoint")
        own, own_kv = (slice(rank * n // world_size, max(1, (rank + 1) * n // world_size)) for n in (heads, kv_heads))
        if world_size > kv_heads:
            own_kv = slice(rank // 2, rank // 2 + 1)
        expected = [gates[own], queries[own][:, order], keys[own_kv][:, order], values[own_kv]]
        matrix = attention.weights.qkv
        assert isinstance(matrix, Fp8) and matrix.scales.shape[0] * rows == matrix.shape[0]
        assert torch.equal(matrix.dequantized(torch.float32), torch.cat([part.flatten(0, 1) for part in expected]))
