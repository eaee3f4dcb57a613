"""qk_norm_rope against plain PyTorch in double, on a virtual rank and on a GPU."""

import pytest
import torch

from tests.ops.checking import assert_close, assert_identical
from tests.ops.layer_cases import (
    DEVICES,
    EPS,
    HEADS,
    changed,
    check_refused,
    deferred,
    everywhere,
    layer_arguments,
    random,
    rms_norm,
    rotate,
)
from weft import ops
from weft.ops.case import FP32


def check_qk_norm_rope(
    device, heads, tokens, position_dtype=torch.int32, padded=(), strided=False, parts=0, kept=False, squares=0
):
    D, pages, before = heads.D, tokens // heads.page_size + 3, 50
    all_heads = heads.q_heads + 2 * heads.kv_heads
    qkv = random((tokens, all_heads * D), heads.dtype, device, 1)
    q_weight, k_weight = (1 + random((D,), heads.dtype, device, seed) / 4 for seed in (2, 3))
    angles = random((before, D), FP32, device, 4)
    generator = torch.Generator().manual_seed(tokens)
    positions = torch.randint(before, (tokens,), generator=generator).to(device, position_dtype)
    slots = torch.randperm(pages * heads.page_size, generator=generator)[:tokens].to(device)
    slots[list(padded)] = -1
    keys, values = heads.cache(pages, device, 5)
    old_keys, old_values = keys.clone(), values.clone()

    source = torch.cat((qkv, qkv), dim=1)[:, : qkv.shape[1]] if strided else qkv
    if parts:
        source = random((parts, *qkv.shape), FP32, device, 6)
        qkv = sum(source.unbind())
    factor = torch.ones((tokens, 1), dtype=torch.float64, device=device)
    if squares:
        source, factor = deferred(source, squares)
    q = ops.qk_norm_rope(source, q_weight, k_weight, EPS, angles, positions, slots, keys, values, kept)

    qkv = qkv.double() * factor if squares else qkv
    x = qkv.double().view(tokens, all_heads, D)
    cos, sin = angles.double()[positions.long()].chunk(2, dim=-1)
    new_q = rotate(rms_norm(x[:, : heads.q_heads], q_weight.double()), cos, sin)
    new_keys = rotate(rms_norm(x[:, heads.q_heads : -heads.kv_heads], k_weight.double()), cos, sin)
    assert q.shape == (tokens, heads.q_heads + (heads.kv_heads if kept else 0), D) and q.is_contiguous()
    assert_close(q, torch.cat((new_q, new_keys), dim=1) if kept else new_q, D, what="q")
    new_values = qkv.view(tokens, all_heads, D)[:, -heads.kv_heads :]
    expected_keys, expected_values = old_keys.double(), old_values.double()
    written = torch.zeros(keys.shape[0], keys.shape[2], dtype=torch.bool, device=device)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            page, offset = divmod(slot, heads.page_size)
            expected_keys[page, :, offset] = new_keys[token]
            expected_values[page, :, offset] = new_values[token]
            written[page, offset] = True
    assert_close(keys, expected_keys, D, what="keys")
    elsewhere = ~written[:, None, :, None].expand_as(keys)
    assert_identical(keys[elsewhere], old_keys[elsewhere], what="keys that are not written")
    assert_identical(values[elsewhere], old_values[elsewhere], what="values that are not written")
    if squares:
        assert_close(values, expected_values, D, what="values")
    else:
        assert_identical(values, expected_values.to(heads.dtype), what="values")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_qk_norm_rope(heads, device):
    def check(device):
        check_qk_norm_rope(device, heads, 1)
        check_qk_norm_rope(device, heads, 7, torch.int64, padded=(0, 5), strided=True)
        check_qk_norm_rope(device, heads, 33, padded=(32,), kept=True)

    everywhere(check, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_qk_norm_rope_adds_split_k_partials(heads, device):
    def check(device):
        for tokens, parts in ((1, 1), (5, 2), (33, 7)):
            check_qk_norm_rope(device, heads, tokens, padded=(0,), parts=parts)

    everywhere(check, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_qk_norm_rope_applies_a_deferred_rms_scale(heads, device):
    def check(device):
        for tokens, squares in ((1, 1), (5, 20), (33, 3)):
            check_qk_norm_rope(device, heads, tokens, padded=(0,), squares=squares, kept=tokens == 5)

    everywhere(check, device)


@pytest.mark.parametrize("device", DEVICES)
def test_padding_writes_nothing_at_all(device):
    def check(device):
        check_qk_norm_rope(device, HEADS[0], 5, padded=range(5))
        check_qk_norm_rope(device, HEADS[0], 0)

    everywhere(check, device)


@pytest.mark.gpu(1)
def test_qk_norm_rope_of_a_prompt():
    check_qk_norm_rope("cuda", HEADS[0], 4096, padded=range(4000, 4096))


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
