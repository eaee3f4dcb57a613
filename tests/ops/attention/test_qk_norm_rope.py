"""qk_norm_rope: cells that it must leave alone, and refused arguments; its cases run with all others."""

import pytest
import torch

from tests.ops.checking import assert_identical
from tests.ops.layer_cases import DEVICES, changed, check_refused, everywhere, layer_arguments
from weft import ops
from weft.ops.attention.qk_norm_rope import QK_NORM_ROPE as OP
from weft.ops.case import Draw


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
