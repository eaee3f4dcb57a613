"""Projections in fp8 whose rows a rank has in another order than a checkpoint: bytes * scales are the whole matrix's."""

from types import SimpleNamespace

import pytest
import torch

from tests.fp8_checkpoints import dequantized, quantized
from weft.kernels.fp8 import Fp8, quantized_weight
from weft.layers import TPAttention
from weft.layers.delta_net import TPGatedDeltaNet
from weft.ops.linear_attention.delta_rule import DeltaSizes
from weft.parallel.delta_net import parts_of
from weft.parallel.quantized import Fp8Format
from weft.parallel.sharding import fill
from weft.parallel.tensors import DeltaColumns

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


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(
    ("joined", "scheme", "stored", "sizes", "rows"),
    [
        (True, "block", True, DeltaSizes(4, 8, 128, 128), 128),  # the published heads
        (False, "block", True, DeltaSizes(4, 8, 128, 128), 128),
        (True, "block", False, DeltaSizes(4, 4, 32, 64), 32),
        (False, "block", False, DeltaSizes(4, 8, 32, 16), 32),  # all four heads make a whole block
        (True, "channel", True, DeltaSizes(4, 8, 16, 32), 1),
        (False, "channel", False, DeltaSizes(4, 8, 16, 32), 1),
        (False, "tensor", True, DeltaSizes(4, 8, 16, 32), 1),
    ],
)
@pytest.mark.parametrize("rates_in_fp8", [False, True])
def test_delta_nets_have_the_rows_of_the_whole_matrices(world_size, joined, scheme, stored, sizes, rows, rates_in_fp8):
    keys, heads, K, V = sizes
    group = heads // keys
    shapes = {"in_proj_qkv": (2 * keys * K + heads * V, HIDDEN), "in_proj_z": (heads * V, HIDDEN)}
    of_rates = {"in_proj_b": (heads, HIDDEN), "in_proj_a": (heads, HIDDEN)}
    if joined:
        shapes, of_rates = {"in_proj_qkvz": (keys * 2 * (K + group * V), HIDDEN)}, {"in_proj_ba": (2 * heads, HIDDEN)}
    tensors, wide = checkpoint_of(shapes, scheme, stored)
    if rates_in_fp8 and stored:
        more, wide_rates = checkpoint_of(of_rates, scheme, stored)
    else:
        wide_rates = {name: torch.randn(shape) for name, shape in of_rates.items()}
        more = {f"{name}.weight": rate for name, rate in wide_rates.items()}
    convolution = torch.randn(sizes.columns, 1, 4)
    others = {"out_proj.weight": torch.zeros(HIDDEN, heads * V), "conv1d.weight": convolution}
    others |= {"norm.weight": torch.ones(V), "A_log": torch.zeros(heads), "dt_bias": torch.zeros(heads)}
    if joined:
        of_head = wide["in_proj_qkvz"].view(keys, -1, HIDDEN).split([K, K, group * V, group * V], dim=1)
        q, k, v, z = (part.flatten(0, 1) for part in of_head)
        b, a = (part.flatten(0, 1) for part in wide_rates["in_proj_ba"].view(keys, 2, group, HIDDEN).unbind(1))
    else:
        q, k, v = wide["in_proj_qkv"].split([keys * K, keys * K, heads * V])
        z, b, a = wide["in_proj_z"], wide_rates["in_proj_b"], wide_rates["in_proj_a"]
    by_rank = [part.chunk(world_size) for part in (q, k, v, z)]
    of_conv = [part.chunk(world_size) for part in convolution.flatten(1).split([keys * K, keys * K, heads * V])]
    for rank in range(world_size):
        names = (*shapes, *(of_rates if rates_in_fp8 else ()))
        net = TPGatedDeltaNet(
            hidden_size=HIDDEN, whole=sizes, taps=4, rms_norm_eps=1e-6, joined=joined, dtype=torch.float32,
            team=team_of(world_size, rank), formats=formats_of(scheme, stored, *names),
        )  # fmt: skip
        fill(net.shards(), tensors | more | others, "checkpoint")
        w = net.weights
        block = min(rows * (4 // world_size), 128) if not joined and scheme == "block" else rows
        assert isinstance(w.qkv, Fp8) and w.qkv.scales.shape[0] * block == w.qkv.shape[0]
        assert torch.equal(w.qkv.dequantized(torch.float32), torch.cat([part[rank] for part in by_rank]))
        assert torch.equal(w.rates, torch.cat((b, a))) and w.rates.dtype == torch.float32
        assert torch.equal(w.conv, torch.cat([part[rank] for part in of_conv]))
        x = torch.eye(HIDDEN)
        gates = parts_of(DeltaColumns(x @ w.qkv.dequantized(torch.float32).T, x @ w.rates.T), w)[2]
        assert torch.equal(gates.b, b.chunk(world_size)[rank].T) and torch.equal(gates.a, a.chunk(world_size)[rank].T)
