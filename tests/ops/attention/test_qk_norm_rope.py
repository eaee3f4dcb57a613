"""qk_norm_rope: cells that it must leave alone, and refused arguments; its cases run with all others."""

import pytest
import torch

import weft
from tests.ops.checking import assert_identical
from tests.ops.gemm.test_sliced import operands
from tests.ops.layer_cases import DEVICES, changed, check_refused, everywhere, layer_arguments, mutated, random
from weft import ops
from weft.kernels.fp8 import E4M3
from weft.ops.attention import qk_norm_rope
from weft.ops.attention.qk_norm_rope import QK_NORM_ROPE as OP
from weft.ops.case import BF16, FP32, Draw
from weft.ops.gemm.matmul import matmul_column_nodes


def unwritten(slots, cache):
    """Mask of the cells that no slot names."""
    mask = torch.ones(cache.shape[0] * cache.shape[2], dtype=torch.bool, device=cache.device)
    mask[slots[slots >= 0]] = False
    return mask.view(cache.shape[0], 1, cache.shape[2], 1).expand_as(cache)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", list(OP.cases()), ids=str)
def test_other_cells_stay_and_values_are_only_rounded(case, device):
    """Bit for bit; values with a deferred RMS scale or a bias are computed, so the cases alone judge them."""

    def check(device):
        before, after = (OP.inputs(case, 0, Draw(case, 0, 0, device)) for _ in range(2))
        _, keys, values = OP.call(case, None, *after)
        for old, new in ((before[2], keys), (before[3], values)):
            elsewhere = unwritten(before[1], old)
            assert_identical(new[elsewhere], old[elsewhere], what="cells that no slot names")
        if case.field("squares") is None and not case.field("bias"):
            slots, qkv, heads = before[1], before[4], case.sizes[1]
            summed = sum(qkv.unbind()) if qkv.dim() == 3 else qkv
            new = summed.view(summed.shape[0], summed.shape[1] // case.sizes[2], case.sizes[2])[:, -heads:]
            written = slots >= 0
            page, offset = slots[written] // case.sizes[3], slots[written] % case.sizes[3]
            assert_identical(values[page, :, offset], new[written].to(case.dtype), what="values")

    everywhere(check, device)


def heads_of(qkv, D, kv_heads, dtype, bias, with_keys=False):
    """(queries, keys, values) of an invariant call, one token a slot."""
    tokens, device = qkv.shape[-2], qkv.device
    keys, values = torch.zeros((2, -(-tokens // 16), kv_heads, 16, D), device=device).to(dtype)
    scales = dict.fromkeys(("k_scale", "v_scale"), torch.full((1,), 0.37, device=device)) if dtype == E4M3 else {}
    norms, angles = random((2, D), BF16, device, 1), random((tokens, D), FP32, device, 2)
    at = torch.arange(tokens, device=device)
    q = ops.qk_norm_rope(qkv, *norms, 1e-6, angles, at, at, keys, values, with_keys, bias, **scales, invariant=True)
    return q, keys.view(torch.uint8), values.view(torch.uint8)


def check_nodes(device, sizes, shapes):
    """Nodes of a projection give the heads, keys and values of their sum, among any other rows."""
    for heads, kv_heads, D in shapes:
        x, w = operands(max(sizes), (heads + 2 * kv_heads) * D, 256, device=device)
        for bias in (None, random((w.shape[0],), BF16, device, 3)):
            for dtype in (BF16, E4M3):
                for M in sizes:
                    nodes, whole = matmul_column_nodes(x[:M], w), ops.matmul(x[:M], w, invariant=True)
                    assert nodes.shape == (2, *whole.shape)
                    expected = heads_of(whole, D, kv_heads, dtype, bias, with_keys=M > 1)
                    for actual, wanted in zip(heads_of(nodes, D, kv_heads, dtype, bias, M > 1), expected, strict=True):
                        assert_identical(actual, wanted, what=f"M={M} of {heads, kv_heads, D}")


@pytest.mark.parametrize("sizes", [(1, 33), pytest.param((1, 2, 17, 33, 128), marks=pytest.mark.sweep)])
def test_nodes_of_a_projection_give_the_bits_of_their_sum(sizes):
    weft.simulate(lambda team: check_nodes("cpu", sizes, ((4, 1, 32), (3, 1, 64))), 1)


@pytest.mark.gpu(1)
def test_on_a_gpu_nodes_of_a_projection_give_the_bits_of_their_sum():
    check_nodes("cuda", (1, 2, 17, 33, 128), ((16, 4, 128), (4, 1, 64), (32, 4, 128)))


ROUNDED = "low, high = low.to(q.dtype.element_ty), high.to(q.dtype.element_ty)"


@pytest.mark.parametrize(
    "mistake",
    [
        (ROUNDED, "low, high = low, high"),  # not rounded
        (ROUNDED, "low, high = low.to(q.dtype.element_ty), high"),  # one half is not rounded
    ],
)
def test_nodes_that_are_not_rounded_show(mistake, tmp_path, monkeypatch):
    mutant = mutated(qk_norm_rope, *mistake, f"nodes_mutant_{len(mistake[1])}", tmp_path)
    monkeypatch.setattr(qk_norm_rope, "qk_norm_rope_kernel", mutant.qk_norm_rope_kernel)
    with pytest.raises(AssertionError):
        weft.simulate(lambda team: check_nodes("cpu", (9,), ((4, 1, 32),)), 1)


def test_invariant_heads_are_of_16_bits():
    check_refused(
        lambda *given: ops.qk_norm_rope(*given, invariant=True),
        layer_arguments()[0],
        "invariant=True with heads of torch.float32",
    )


@pytest.mark.parametrize(
    ("message", "position", "value"),
    [
        ("qkv has shape (3, 300); with keys of (40, 1, 16, 64) it must be [T, (Hq + 2) * 64]", 0, torch.ones(3, 300)),
        ("qkv has shape (3, 128)", 0, torch.ones(3, 128)),
        ("qkv has shape (0, 3, 384)", 0, torch.ones(0, 3, 384)),
        ("qkv.dtype=torch.bfloat16 is not one of float32", 0, torch.ones(2, 3, 384).bfloat16()),
        ("keys.dtype=torch.float32 is not one of float16", 0, torch.ones(3, 384).half()),
        ("q_weight has shape (32,); it must be (64,)", 1, torch.ones(32)),
        ("angles has shape (9, 32); it must be (max_positions, 64)", 4, torch.ones(9, 32)),
        ("angles.dtype=torch.float16 is not one of float32", 4, torch.ones(9, 64).half()),
        ("positions has shape (4,); it must be (3,)", 5, torch.zeros(4, dtype=torch.int64)),
        ("positions.dtype=torch.float32 is not one of int32, int64", 5, torch.ones(3)),
        ("slots.dtype=torch.int32 is not one of int64", 6, torch.zeros(3, dtype=torch.int32)),
        ("keys has shape (40, 16, 64); it must be (pages, kv_heads, page_size, head_dim)", 7, torch.ones(40, 16, 64)),
        ("a head_dim of 16, 32, 64, 128, 256", 7, torch.ones(40, 1, 16, 48)),
        ("values has shape (41, 1, 16, 64); it must be (40, 1, 16, 64)", 8, torch.ones(41, 1, 16, 64)),
        ("values has strides", 8, torch.ones(40, 1, 64, 16).transpose(2, 3)),
    ],
)
def test_wrong_arguments_are_refused(message, position, value):
    check_refused(ops.qk_norm_rope, changed(position, value, layer_arguments()[0]), message)
