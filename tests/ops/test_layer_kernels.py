"""What a decode layer computes on one rank, against plain PyTorch in double: on a virtual rank, and the same on a GPU.

paged_attention by itself: test_paged_attention.py.
"""

import importlib

import pytest
import torch

import weft
import weft.check
from tests.ops.cases import BF16, FP16, FP32
from tests.ops.closeness import assert_close, assert_identical
from tests.ops.layer_cases import DEVICES, HEADS, SMALL, everywhere, random, undivided
from weft import ops
from weft.kernels.deferred_norm import DeferredNorm
from weft.kernels.paged_cache import PagedCache, Sequences
from weft.runtime.arithmetic import cdiv

attention = importlib.import_module("weft.ops.attention.paged_attention")

EPS = 1e-6


def rms_norm(x, weight):
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


# --- silu_mul --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [FP16, BF16, FP32])
def test_silu_mul(dtype, device):
    def check(device):
        for shape in ((1, 1), (1, 1024), (2, 513), (3, 300), (130, 257), (0, 8), (5, 0)):
            gate_up = 3 * random((shape[0], 2 * shape[1]), dtype, device)
            wide = torch.cat((gate_up, gate_up), dim=1)
            gate, up = gate_up.double()[:, : shape[1]], gate_up.double()[:, shape[1] :]
            expected = gate * torch.sigmoid(gate) * up
            for x in (gate_up, wide[:, : 2 * shape[1]], gate_up.t().contiguous().t()):
                actual = ops.silu_mul(x)
                assert actual.is_contiguous() and actual.dtype == dtype
                assert_close(actual, expected, 4, what=f"silu_mul {shape}")

    everywhere(check, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [FP16, BF16, FP32])
def test_silu_mul_divides_a_product_of_a_factored_norm(dtype, device):
    def check(device):
        for M, N, parts in ((1, 1, 1), (5, 513, 20), (130, 257, 3), (0, 8, 2)):
            gate_up = 3 * random((M, 2 * N), dtype, device)
            norm, factor = undivided(gate_up, parts)
            gate, up = (gate_up.double() * factor).chunk(2, dim=1)
            expected = gate * torch.sigmoid(gate) * up
            wide = torch.cat((gate_up, gate_up), dim=1)[:, : 2 * N]
            strided = torch.cat((norm.squares, norm.squares), dim=1)[:, :parts]
            for x, squares in ((gate_up, norm.squares), (wide, strided)):
                actual = ops.silu_mul(DeferredNorm(x, squares, EPS))
                assert actual.is_contiguous() and actual.dtype == dtype
                # Factor, product and exponential are rounded one after the other.
                rtol = max(torch.finfo(dtype).eps, 8 * torch.finfo(FP32).eps)
                torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=1e-7)

    everywhere(check, device)


@pytest.mark.parametrize("device", DEVICES)
def test_silu_mul_of_the_largest_and_smallest(device):
    def check(device):
        gate = torch.tensor([[-3e38, -200.0, -0.0, 0.0, 200.0, torch.inf, torch.nan, 3.0]], device=device)
        up = torch.tensor([[2.0, -1.0, 5.0, torch.inf, 2.0, 1.0, 1.0, torch.inf]], device=device)
        expected = torch.nn.functional.silu(gate) * up
        actual = ops.silu_mul(torch.cat((gate, up), dim=1))
        # silu(-3e38) is -0 or the smallest there is: torch does not say.
        torch.testing.assert_close(actual, expected, equal_nan=True, rtol=1e-6, atol=1e-30)

    everywhere(check, device)


# --- add_rms_norm ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [FP16, BF16, FP32])
def test_add_rms_norm(dtype, device):
    def check(device):
        for shape in ((1,), (7, 1), (1, 96), (3, 5, 640), (130, 33), (2, 5120), (0, 16)):
            x, residual = random(shape, dtype, device, 1), random(shape, dtype, device, 2)
            weight = 1 + random(shape[-1:], dtype, device, 3) / 8
            hidden = x.double() + residual.double()
            for turned in (False, True):
                if turned:
                    x, residual = (y.transpose(0, -1).contiguous().transpose(0, -1) for y in (x, residual))
                normed, actual = ops.add_rms_norm(x, residual, weight, EPS)
                assert normed.is_contiguous() and actual.is_contiguous()
                assert_identical(actual, hidden.float().to(dtype), what=f"hidden {shape}")
                expected = rms_norm(actual.double(), weight.double())
                assert_close(normed, expected, shape[-1], what=f"normed {shape}")

    everywhere(check, device)


# --- qk_norm_rope ----------------------------------------------------------------------------------------------------


def rotate(x, cos, sin):
    """x [T, heads, D]; cos, sin [T, D/2]"""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos[:, None] - b * sin[:, None], b * cos[:, None] + a * sin[:, None]), dim=-1)


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
        source, factor = undivided(source, squares)
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
    assert_identical(keys[elsewhere], old_keys[elsewhere], what="keys that nobody writes")
    assert_identical(values[elsewhere], old_values[elsewhere], what="values that nobody writes")
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
def test_qk_norm_rope_of_parts(heads, device):
    def check(device):
        for tokens, parts in ((1, 1), (5, 2), (33, 7)):
            check_qk_norm_rope(device, heads, tokens, padded=(0,), parts=parts)

    everywhere(check, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_qk_norm_rope_divides_a_product_of_a_factored_norm(heads, device):
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


# --- what all have in common -----------------------------------------------------------------------------------------


def arguments(heads=SMALL, tokens=3):
    """Of qk_norm_rope, and of a paged_attention that is split."""
    D, dtype = heads.D, heads.dtype
    keys, values = heads.cache(40, "cpu")
    qkv = random((tokens, (heads.q_heads + 2 * heads.kv_heads) * D), dtype, "cpu")
    weight, angles = torch.ones(D, dtype=dtype), random((9, D), FP32, "cpu")
    positions, slots = torch.arange(tokens), torch.arange(tokens) * 17
    pages, lengths = torch.arange(20, dtype=torch.int32)[None], torch.full((1,), 300, dtype=torch.int32)
    tickets = torch.zeros(heads.kv_heads, dtype=torch.int32)
    return (
        [qkv, weight, weight, EPS, angles, positions, slots, keys, values],
        [qkv.view(tokens, -1, D)[:1, : heads.q_heads].contiguous(), keys, values, pages, lengths, 0.125, tickets],
    )


def test_no_races():
    def layer(team):
        new, attended = arguments()
        for _ in range(2):
            q = ops.qk_norm_rope(*new)
            x, keys, values, pages, lengths, scale, tickets = attended
            config = attention.AttentionConfig(block_n=16, least=16, num_warps=1)
            out = attention.run(x, PagedCache(keys, values), Sequences(pages, lengths), scale, tickets, config)
            normed, hidden = ops.add_rms_norm(out.view(1, -1), out.view(1, -1), torch.ones(out.numel()), EPS)
            ops.silu_mul(normed)
        return q, hidden

    report = weft.check.check(layer, 1, schedules=20)
    assert report.ok, str(report)


class Launch:
    """Stands for a kernel, and keeps the grids that it was asked for."""

    def __init__(self):
        self.grids = []

    def __getitem__(self, grid):
        self.grids.append(grid)
        return lambda *_, **__: None


def many_rows(rows):
    ints, logits = torch.zeros(rows, dtype=torch.int32), torch.ones(rows, 2)
    cache, pages = torch.empty(1, 1, 64, 16), torch.zeros(1, cdiv(rows, 64), dtype=torch.int32)
    return {
        "silu_mul": lambda: ops.silu_mul(torch.empty(4 * rows, 2)),
        "sample_argmax": lambda: ops.sample_argmax(logits, 0),
        "top_p_mass": lambda: ops.top_p_mass(logits, ints.float(), ints.float(), ints, 28),
        "paged_prefill_attention": lambda: ops.paged_prefill_attention(
            torch.empty(rows, 16, 16), cache, cache, pages, [(0, rows)]
        ),
    }


@pytest.mark.parametrize("op", many_rows(1))
def test_more_rows_than_a_grid_has_along_any_axis_but_the_first(op, monkeypatch):
    """65,535 programs are CUDA's limit along the others."""
    kernel = Launch()
    monkeypatch.setattr(importlib.import_module(getattr(weft.ops, op).__module__), f"{op}_kernel", kernel)
    weft.simulate(lambda team: many_rows(70_000)[op](), 1)
    [(first, *others)] = kernel.grids
    assert first >= 70_000 and all(count < 100 for count in others)


def test_schemas_and_fakes_tell_the_truth():
    def main(team):
        new, attended = arguments()
        x = random((3, 40), FP32, "cpu")
        calls = {
            torch.ops.weft.silu_mul.default: (x, torch.ones(3, 2), EPS),
            torch.ops.weft.add_rms_norm.default: (x.t(), x.t(), torch.ones(3), EPS),
            torch.ops.weft.qk_norm_rope.default: (new[0], torch.ones(3, 2), EPS, *new[1:], True),
            torch.ops.weft.paged_attention.default: tuple(attended),
        }
        for op, args in calls.items():
            torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))
        torch.library.opcheck(
            torch.ops.weft.paged_attention.default,
            (*attended[:-1], None),
            test_utils=("test_schema", "test_faketensor"),
        )

    weft.simulate(main, 1)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_without_a_graph_break(backend):
    def layer(qkv, q_weight, k_weight, eps, angles, positions, slots, keys, values, pages, lengths, tickets):
        q = ops.qk_norm_rope(qkv, q_weight, k_weight, eps, angles, positions, slots, keys, values)
        out = ops.paged_attention(q[:1], keys, values, pages, lengths, tickets=tickets).flatten(1)
        normed, hidden = ops.add_rms_norm(out, out, torch.ones(out.shape[1]), eps)
        return ops.silu_mul(normed) + hidden[:, :1]

    def main(team):
        results = []
        for function in (layer, torch.compile(layer, fullgraph=True, backend=backend)):
            new, (_, _, _, pages, lengths, _, tickets) = arguments()
            results.append((function(*new, pages, lengths, tickets), new[-2], new[-1]))
        for a, b in zip(*results, strict=True):
            assert_identical(a, b)

    weft.simulate(main, 1)
    torch._dynamo.reset()


def wrong_arguments():
    x = torch.ones
    yield "gate_up has shape (3, 5); it must be [M, 2 N]", ops.silu_mul, (x(3, 5),)
    yield "gate_up.dtype=torch.float64 is not one of float16, bfloat16, float32", ops.silu_mul, (x(3, 4).double(),)
    yield "x has no dimension 0", ops.add_rms_norm, (x(()), x(()), x(1), EPS)
    yield "residual has shape (2, 3); it must be (2, 4)", ops.add_rms_norm, (x(2, 4), x(2, 3), x(4), EPS)
    yield "weight has shape (3,); it must be (4,)", ops.add_rms_norm, (x(2, 4), x(2, 4), x(3), EPS)
    yield "weight.dtype=torch.float16 is not one of float32", ops.add_rms_norm, (x(2, 4), x(2, 4), x(4).half(), EPS)
    yield "residual is on meta, not on cpu", ops.add_rms_norm, (x(2, 4), x(2, 4, device="meta"), x(4), EPS)
    yield "rows of 20000 elements have 80000 bytes", ops.add_rms_norm, (x(1, 20000), x(1, 20000), x(20000), EPS)

    def changed(position, value, of):
        return tuple(value if at == position else argument for at, argument in enumerate(of))

    new, attended = arguments()
    for message, position, value in (
        ("qkv has shape (3, 300); with keys of (40, 1, 16, 64) it must be [T, (Hq + 2) * 64]", 0, x(3, 300)),
        ("qkv has shape (3, 128)", 0, x(3, 128)),
        ("qkv has shape (0, 3, 384)", 0, x(0, 3, 384)),
        ("qkv.dtype=torch.bfloat16 is not one of float32", 0, x(2, 3, 384).bfloat16()),
        ("keys.dtype=torch.float32 is not one of float16", 0, x(3, 384).half()),
        ("q_weight has shape (32,); it must be (64,)", 1, x(32)),
        ("angles has shape (9, 32); it must be (max_positions, 64)", 4, x(9, 32)),
        ("angles.dtype=torch.float16 is not one of float32", 4, x(9, 64).half()),
        ("positions has shape (4,); it must be (3,)", 5, torch.zeros(4, dtype=torch.int64)),
        ("positions.dtype=torch.float32 is not one of int32, int64", 5, x(3)),
        ("slots.dtype=torch.int32 is not one of int64", 6, torch.zeros(3, dtype=torch.int32)),
        ("keys has shape (40, 16, 64); it must be (pages, kv_heads, page_size, head_dim)", 7, x(40, 16, 64)),
        ("a head_dim of 16, 32, 64, 128, 256", 7, x(40, 1, 16, 48)),
        ("values has shape (41, 1, 16, 64); it must be (40, 1, 16, 64)", 8, x(41, 1, 16, 64)),
        ("values has strides", 8, x(40, 1, 64, 16).transpose(2, 3)),
    ):
        yield message, ops.qk_norm_rope, changed(position, value, new)
    for message, position, value in (
        ("q has shape (4, 64); it must be (B, Hq, 64)", 0, x(4, 64)),
        ("q has 0 heads and keys 1", 0, x(1, 0, 64)),
        ("page_size=8 is not one of 16, 32, 64, 128, 256", 1, x(40, 1, 8, 64)),
        ("pages has shape (2, 20); it must be (1, max_pages)", 3, torch.zeros((2, 20), dtype=torch.int32)),
        ("pages.dtype=torch.int64 is not one of int32", 3, torch.zeros((1, 20), dtype=torch.int64)),
        ("lengths has shape (); it must be (1,)", 4, torch.zeros((), dtype=torch.int32)),
        ("contiguous row of B * Hkv=1 or more", 6, torch.zeros(0, dtype=torch.int32)),
    ):
        args = changed(position, value, attended)
        # keys and values change together: else their shapes differ, and that is what is said.
        yield message, ops.paged_attention, changed(2, value, args) if position == 1 else args
    yield "q has 3 heads and keys 2", ops.paged_attention, (
        x(1, 3, 64), x(9, 2, 16, 64), x(9, 2, 16, 64), *attended[3:5],
    )  # fmt: skip
    config = attention.AttentionConfig
    yield "block_n=48 is not a power of two", lambda: config(block_n=48), ()
    yield "least=100 is not a multiple of block_n=64", lambda: config(least=100), ()
    yield "per_sm=0 is not positive", lambda: config(per_sm=0), ()


WRONG = list(wrong_arguments())


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong[0][:40])
def test_wrong_arguments_are_refused(wrong):
    message, op, args = wrong
    with pytest.raises(ValueError) as refused:
        op(*args)
    assert message in str(refused.value) and "\n" not in str(refused.value)
