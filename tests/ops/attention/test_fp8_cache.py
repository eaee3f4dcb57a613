"""Caches in fp8: bytes as torch makes them, attention to them, over ranks too, the plain twins, refused arguments."""

import pytest
import torch

import weft
from tests.compiling import SHARED, stack_bytes
from tests.ops import test_compile_layer_kernels as layer
from tests.ops.checking import assert_close, assert_identical
from tests.ops.layer_cases import check_refused, random
from weft import ops
from weft.kernels.block_cyclic import local_lengths, local_slots
from weft.kernels.paged_cache import PagedCache
from weft.ops.attention.decoding import split_kv_for
from weft.ops.attention.fp8_cache import E4M3, read_back, to_bytes
from weft.ops.case import BF16, FP16, FP32
from weft.parallel import plain

HEADS, KV_HEADS, D, S = 4, 2, 16, 16
SCALES = {"k_scale": torch.tensor(0.004), "v_scale": torch.tensor([0.03])}


def empty_cache(pages):
    return tuple(torch.zeros(pages, KV_HEADS, S, D).to(E4M3) for _ in range(2))


def projected(tokens, dtype=BF16, seed=0):
    """A projection with values that saturate, a NaN and a -0.0, its norms and angles."""
    qkv = random((tokens, (HEADS + 2 * KV_HEADS) * D), dtype, "cpu", seed)
    qkv[0, -3:] = torch.tensor([1e4, torch.nan, -0.0])
    weight = 1 + random((D,), dtype, "cpu", seed + 1) / 4
    return qkv, weight, weight, 1e-6, random((90, D), FP32, "cpu", seed + 2)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_bytes_are_those_of_torch_and_other_slots_stay(dtype):
    def main(team):
        cache, (qkv, *head), slots = empty_cache(3), projected(9, dtype), torch.arange(9) * 5
        slots[4] = -1
        heads = ops.qk_norm_rope(qkv, *head, torch.arange(9), slots, *cache, with_keys=True, **SCALES)
        expected = empty_cache(3)
        new = heads[:, HEADS:], qkv.view(9, -1, D)[:, -KV_HEADS:]
        for pages, x, scale in zip(expected, new, SCALES.values(), strict=True):
            assert heads.dtype == dtype
            written = slots[slots >= 0]
            pages[written // S, :, written % S] = to_bytes(x, scale)[slots >= 0]
        for pages, wanted in zip(cache, expected, strict=True):
            assert_identical(pages.view(torch.int8), wanted.view(torch.int8))
        assert cache[1].float().nan_to_num().max() == 448 and cache[1].float().isnan().sum() == 1

    weft.simulate(main, 1)


def test_partials_and_biases_give_heads_of_the_weights_dtype():
    def main(team):
        cache, (qkv, *head) = empty_cache(2), projected(3)
        partials = torch.stack((qkv.float(), qkv.float()))
        one = ops.qk_norm_rope(partials, *head, torch.arange(3), torch.arange(3), *cache, **SCALES)
        assert one.dtype == BF16
        bias = torch.ones(qkv.shape[1], dtype=BF16)
        places = torch.arange(3), torch.arange(3), *cache
        assert ops.qk_norm_rope(partials, None, None, *head[2:], *places, bias=bias, **SCALES).dtype == BF16
        with pytest.raises(ValueError, match="an fp8 cache is for qkv of 16 bits, or for partials with weights"):
            ops.qk_norm_rope(partials, None, None, *head[2:], *places, **SCALES)

    weft.simulate(main, 1)


def test_decode_attention_writes_bytes_and_attends_to_them():
    def main(team):
        (qkv, *head), lengths = projected(3, seed=5), torch.tensor([20, 1, 0], dtype=torch.int32)
        qkv[0, -3:] = 1.0
        pages = torch.tensor([[0, 1], [2, 3], [4, 5]], dtype=torch.int32)
        cache = tuple(to_bytes(random((6, KV_HEADS, S, D), BF16, "cpu", i), s) for i, s in enumerate(SCALES.values()))
        separate = [x.clone() for x in cache]
        fused = ops.decode_attention(qkv, *head, *cache, pages, lengths, **SCALES)
        at, slots, *_ = ops.decode_metadata(lengths.long() - 1, pages, S, 0)
        q = ops.qk_norm_rope(qkv, *head, at, slots, *separate, **SCALES)
        assert fused.dtype == BF16
        for one, other in zip(cache, separate, strict=True):  # but for roundings in fp32
            assert (one.view(torch.int8) != other.view(torch.int8)).sum() <= 2
        by_two = ops.paged_attention(q, *separate, pages, lengths, **SCALES)
        by_torch = plain.attend_to_pages(q.double(), *read_back(*separate, *SCALES.values()), pages, lengths)
        of_bytes = plain.attend_to_pages(q, *separate, pages, lengths, **SCALES)
        for found in (fused, by_two, of_bytes):
            assert_close(found[:2], by_torch[:2], 20 + D, partials=1, by_row=True)
        assert not by_two[2].any()

    weft.simulate(main, 1)


@pytest.mark.parametrize("fp8", [False, True])
def test_tokens_written_by_their_owners_are_attended_to_over_ranks(fp8):
    """qk_norm_rope writes what its rank owns, and the ranks together attend as one does alone."""
    tokens, world_size = 37, 2
    scales = SCALES if fp8 else {}

    def main(team):
        (qkv, *head), token = projected(tokens), torch.arange(tokens)
        qkv[0, -3:] = 1.0
        table = torch.tensor([[3, 1, 0]], dtype=torch.int32)
        cache = empty_cache(4) if fp8 else tuple(torch.zeros(4, KV_HEADS, S, D, dtype=BF16) for _ in range(2))
        slots = local_slots(token, table.expand(tokens, 3), S, team.rank, team.size)
        q = ops.qk_norm_rope(qkv, *head, token, slots, *cache, **scales)
        metadata = ops.decode_metadata(token[-1:], table, S, 0, team.rank, team.size)
        assert torch.equal(metadata[1], slots[-1:]) and metadata[2].item() == tokens
        assert (slots >= 0).sum() == local_lengths(metadata[2], team.rank, team.size, S)
        return ops.sharded_decode_attention(q[-1:], *cache, table, metadata[2], team, **scales)

    (alone,), over_ranks = weft.simulate(main, 1), weft.simulate(main, world_size)
    assert_close(torch.cat(over_ranks, dim=1), alone.double(), tokens + D, partials=1, by_row=True)


def arguments(**changed):
    cache = empty_cache(4)
    pages, lengths = torch.zeros(1, 4, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    given = {"q": torch.ones(1, HEADS, D, dtype=BF16), "keys": cache[0], "values": cache[1]}
    return {**given, "pages": pages, "lengths": lengths, **SCALES, **changed}


@pytest.mark.parametrize(
    ("message", "changed"),
    [
        ("v_scale is None and the other scale is not; pass both", {"v_scale": None}),
        ("k_scale.dtype=torch.float64 is not one of float32", {"k_scale": torch.ones(1).double()}),
        ("k_scale has shape (2,); a layer has one scale of keys", {"k_scale": torch.ones(2)}),
        ("keys.dtype=torch.float8_e4m3fn is not one of bfloat16", {"k_scale": None, "v_scale": None}),
        ("values.dtype=torch.bfloat16 is not one of float8_e4m3fn", {"values": torch.ones(4, 2, S, D, dtype=BF16)}),
        ("q.dtype=torch.float32 with k_scale and v_scale", {"q": torch.ones(1, HEADS, D)}),
    ],
)
def test_wrong_scales_are_refused(message, changed):
    check_refused(lambda: ops.paged_attention(**arguments(**changed)), (), message)


SWEPT = (
    "qk_norm_rope", "qk_norm_rope_of_parts", "paged_attention", "paged_attention_whole", "paged_attention_window",
    "decode_attention", "decode_attention_of_parts", "paged_prefill_attention",
)  # fmt: skip


@pytest.mark.triton_internals
@pytest.mark.parametrize(
    ("name", "D"),
    [("paged_attention_whole", 64), *(pytest.param(name, 128, marks=pytest.mark.sweep) for name in SWEPT)],
)
def test_kernels_of_fp8_caches_fit_without_a_stack(name, D, monkeypatch, tmp_path):
    bytes_, scale = torch.zeros(16, dtype=E4M3), torch.zeros(1)
    monkeypatch.setattr(layer, "PagedCache", lambda *_: PagedCache(bytes_, bytes_, scale, scale))
    monkeypatch.setattr(layer, "split_kv_for", lambda call, caps: split_kv_for(call._replace(dtype=E4M3), caps))
    kernel = layer.built(name, "sm_90", D=D)
    assert kernel.metadata.shared <= SHARED["sm_90"] and stack_bytes(kernel, tmp_path) == 0
