"""Attention of the fused recipes against that in torch's operations, for what families of models differ in."""

from dataclasses import replace

import pytest
import torch

import weft
from weft import ops
from weft.costs.gpu import named
from weft.kernels.fp8 import quantized_weight
from weft.layers import PagedCache, Step, plan_layer, rotary_angles
from weft.ops.attention import parts
from weft.parallel import fused, plain
from weft.parallel.step import Chunk
from weft.parallel.tensors import AttentionWeights

H200 = named("h200").limits

HIDDEN, HEADS, KV_HEADS, D, PAGE = 32, 4, 2, 16, 16
# The second table turns nothing.
ANGLES = tuple(rotary_angles(64, D, theta, torch.device("cpu")) for theta in (50.0, None))
NORMS = {"q_norm": torch.linspace(0.5, 2, D), "k_norm": torch.linspace(2, 1, D)}
NO_NORMS = {"q_norm": None, "k_norm": None}
BIAS = {"bias": torch.linspace(-1, 1, (HEADS + 2 * KV_HEADS) * D)}
SIZES = {"kv_heads": 4, "head_dim": 128}
# Weights of a family, by what makes it differ.
OPTIONS = {
    "norms": NORMS,
    "no norms": NO_NORMS,
    "bias": NO_NORMS | BIAS,
    "window": NO_NORMS | {"window": 11},
    "wide window": NORMS | {"window": 40},
    "scale": NO_NORMS | {"scale": 0.7},
    "softcap": NO_NORMS | {"softcap": 0.8, "scale": 0.7},
    "sinks": NO_NORMS | {"sinks": torch.linspace(-2, 3, HEADS)},
    "sinks in a window": NORMS | {"window": 11, "sinks": torch.linspace(-2, 3, HEADS), "softcap": 1.5},
    "gates": NORMS | {"gated": True},
    "norms after": NORMS | {"unrotated": 1},
    "norms after, bias": NORMS | BIAS | {"unrotated": 1, "window": 11},
    "all": NORMS | BIAS | {"window": 11, "scale": 0.4},
}
# Prompts of two sequences: their (before, length), call by call.
PROMPTS = {
    "at once": ([(0, 33), (0, 20)],),
    "in chunks": ([(0, 16), (0, 7)], [(16, 17), (7, 13)]),
}


def attended(local, options, calls, positions=(33, 20)):
    """(attention of every token of prompts, then of a token more of each, keys and values) by ``local`` functions."""
    generator = torch.Generator().manual_seed(3)
    heads = HEADS * (1 + ("gated" in options)) + 2 * KV_HEADS
    qkv, *x = (
        torch.randn(shape, generator=generator) / 4
        for shape in ((heads * D, HIDDEN), (33, HIDDEN), (20, HIDDEN), (3, HIDDEN))
    )
    w = AttentionWeights(qkv=qkv, o=torch.empty(0), eps=1e-6, heads=HEADS, kv_heads=KV_HEADS, head_dim=D, **options)
    pages = torch.tensor([[4, 2, 6], [1, 5, 3]], dtype=torch.int32)

    def main(team):
        cache = PagedCache(1, 7, KV_HEADS, PAGE, D, dtype=torch.float32, device="cpu").layer(0)
        plan = plan_layer(1, mode="replicated", team=team, fused=local.FUSED)
        group = HEADS // KV_HEADS
        prompts = [Step.prefill(spans, pages, PAGE, ANGLES, plan, group, torch.float32) for spans in calls]
        tokens = [
            torch.cat([rows[before : before + length] for rows, (before, length) in zip(x[:2], spans, strict=True)])
            for spans in calls
        ]
        padded = torch.cat((pages, torch.zeros(1, 3, dtype=torch.int32)))
        decode = Step.decode(torch.tensor([*positions, -1]), padded, PAGE, ANGLES, plan, KV_HEADS)
        steps = [*zip(tokens, prompts, strict=True), (x[2], decode)]
        found = [local.attend(local.project(rows, w, step), w, step, cache) for rows, step in steps]
        return *found[:-1], found[-1][:2], *(part[1:] for part in cache)

    return weft.simulate(main, 1)[0]


def takes_kernels(name):
    """True for what cuDNN does not compute."""
    return OPTIONS[name].get("window") == 11 or not {"softcap", "sinks"}.isdisjoint(OPTIONS[name])


def check(options, calls):
    found, expected = (attended(local, options, calls) for local in (fused, plain))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("prompts", PROMPTS)
@pytest.mark.parametrize("options", OPTIONS)
def test_fused_attention_is_that_of_torch(options, prompts):
    check(OPTIONS[options], PROMPTS[prompts])


@pytest.mark.parametrize("mode", ["replicated", "invariant"])
def test_gated_rows_are_in_fp8_before_a_weight_in_fp8(mode):
    generator = torch.Generator().manual_seed(5)
    gated, o = (
        torch.randn(shape, generator=generator, dtype=torch.bfloat16)
        for shape in ((6, 2 * (HEADS + KV_HEADS) * D), (HIDDEN, HEADS * D))
    )
    w = AttentionWeights(torch.empty(0), quantized_weight(o, "block"), None, None, 1e-6, HEADS, KV_HEADS, D, gated=True)
    pages = torch.tensor([[1]], dtype=torch.int32)

    def main(team, fused):
        cache = PagedCache(1, 2, KV_HEADS, PAGE, D, dtype=torch.bfloat16, device="cpu").layer(0)
        plan = plan_layer(1, mode=mode if fused else "replicated", team=team, fused=fused)
        prompt = Step.prefill([(0, 5)], pages, PAGE, ANGLES, plan, HEADS // KV_HEADS, torch.bfloat16)
        decode = Step.decode(torch.tensor([5]), pages, PAGE, ANGLES, plan, KV_HEADS)
        attend = plan.recipe.local.attend
        return [attend(rows, w, step, cache) for rows, step in ((gated[:5], prompt), (gated[5:], decode))]

    found, expected = (weft.simulate(main, 1, args=(fused,))[0] for fused in (True, False))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.dequantized(torch.bfloat16), theirs, rtol=2**-4, atol=2e-2)


@pytest.mark.parametrize("options", ["bias", "window", "wide window", "all"])
def test_prompts_for_cudnn_are_those_that_it_can_compute(options, monkeypatch):
    limits = replace(H200, cudnn_rows=1)
    monkeypatch.setattr("weft.parallel.step.limits_of", lambda team: limits)
    calls = []
    monkeypatch.setattr(fused, "attend_to_prompts", lambda *given: calls.append(1) or plain.attend_to_prompts(*given))
    check(OPTIONS[options], PROMPTS["at once"])
    assert len(calls) == (0 if takes_kernels(options) else 1)


@pytest.mark.parametrize("options", OPTIONS)
def test_prompts_that_go_on_are_computed_in_parts(options, monkeypatch):
    """By cuDNN on GPUs, from many cached tokens on: cached pages some at a time, then the new tokens; a window refuses it."""
    calls = []
    limits = replace(H200, cudnn_rows=0, cudnn_cached=0)
    monkeypatch.setattr("weft.parallel.step.limits_of", lambda team: limits)
    monkeypatch.setattr("weft.parallel.step.takes_cached", lambda *given: True)
    monkeypatch.setattr(fused, "CACHED_AT_ONCE", PAGE)

    def counted(q, new, cached, scale):
        found = list(cached)
        calls.append([len(keys) for keys, _ in found])
        return parts.attention_after(q, new, found, scale)

    monkeypatch.setattr(fused, "attention_after", counted)
    check(OPTIONS[options], ([(0, 16), (0, 7)], [(16, 10), (7, 6)], [(26, 7), (13, 7)]))
    assert calls == ([] if takes_kernels(options) else [[16], [7], [16, 10], [13]])


def test_which_prompts_are_computed_in_parts():
    """Many rows after many cached tokens, in 16 bits, within the window if there is one."""

    def parted(length, before, dtype=torch.bfloat16, **fields):
        w = AttentionWeights(torch.empty(0, dtype=dtype), None, None, None, 1e-6, **{"heads": 16, **SIZES, **fields})
        return Chunk(1, length, before, 0, 0).by_cudnn(w, H200)

    assert parted(4096, 16384) and parted(2048, 131072, heads=32) and parted(4096, 16384, window=20480)
    assert parted(8192, 4096) and not parted(8192, 4095) and not parted(8191, 4096)
    assert not parted(4096, 16383) and not parted(4095, 16384) and not parted(4096, 16384, window=20479)
    assert not parted(4096, 16384, torch.float32) and not parted(4096, 16384, head_dim=256)


@pytest.mark.gpu
@pytest.mark.parametrize("before", [16384, 70001])
def test_cudnn_attends_in_parts_as_the_kernel_does(before):
    """More cached tokens than are copied at a time too; pages in a random order."""
    length, heads, kv_heads, d, page = 600, 16, 4, 128, 16
    generator = torch.Generator("cuda").manual_seed(before)
    pages = torch.randperm(-(-(before + length) // page), generator=torch.Generator().manual_seed(1)).to(torch.int32)[
        None
    ]

    def drawn(*shape):
        return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    cache, (q, keys, values) = (
        tuple(drawn(pages.shape[1], kv_heads, page, d) for _ in range(2)),
        (drawn(length, n, d) for n in (heads, kv_heads, kv_heads)),
    )
    at = torch.arange(before, before + length)
    for part, new in zip(cache, (keys, values), strict=True):
        part[pages[0][at // page].long().cuda(), :, (at % page).cuda()] = new
    spans = ops.SequenceRanges.make([(before, length)], heads // kv_heads, torch.bfloat16).to(q.device)
    expected = ops.paged_prefill_attention(q, *cache, pages.cuda(), spans)
    cached = fused.cached_parts(cache, pages[0].cuda(), before, q.dtype)
    found = parts.attention_after(q, (keys, values), cached, d**-0.5)
    error = (found.float() - expected.float()).square().mean().sqrt() / expected.float().square().mean().sqrt()
    assert error < 0.01
