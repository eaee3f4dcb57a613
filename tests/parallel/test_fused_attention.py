"""Attention of the fused recipes against that in torch's operations, for what families of models differ in."""

import pytest
import torch

import weft
from weft.layers import PagedCache, Step, plan_layer, rotary_angles
from weft.parallel import fused, plain
from weft.parallel.tensors import AttentionWeights

HIDDEN, HEADS, KV_HEADS, D, PAGE = 32, 4, 2, 16, 16
ANGLES = rotary_angles(64, D, 50.0, torch.device("cpu"))
NORMS = {"q_norm": torch.linspace(0.5, 2, D), "k_norm": torch.linspace(2, 1, D)}
NO_NORMS = {"q_norm": None, "k_norm": None}
BIAS = {"bias": torch.linspace(-1, 1, (HEADS + 2 * KV_HEADS) * D)}
# Weights of a family, by what makes it differ.
OPTIONS = {
    "norms": NORMS,
    "no norms": NO_NORMS,
    "bias": NO_NORMS | BIAS,
    "window": NO_NORMS | {"window": 11},
    "wide window": NORMS | {"window": 40},
    "all": NORMS | BIAS | {"window": 11},
}
# Prompts of two sequences: their (before, length), call by call.
PROMPTS = {
    "at once": ([(0, 33), (0, 20)],),
    "in chunks": ([(0, 16), (0, 7)], [(16, 17), (7, 13)]),
}


def attended(local, options, calls, positions=(33, 20)):
    """(attention of every token of prompts, then of a token more of each, keys and values) by ``local`` functions."""
    generator = torch.Generator().manual_seed(3)
    qkv, *x = (
        torch.randn(shape, generator=generator) / 4
        for shape in (((HEADS + 2 * KV_HEADS) * D, HIDDEN), (33, HIDDEN), (20, HIDDEN), (3, HIDDEN))
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


def check(options, calls):
    found, expected = (attended(local, options, calls) for local in (fused, plain))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("prompts", PROMPTS)
@pytest.mark.parametrize("options", OPTIONS)
def test_fused_attention_is_that_of_torch(options, prompts):
    check(OPTIONS[options], PROMPTS[prompts])


@pytest.mark.parametrize("options", ["bias", "window", "wide window", "all"])
def test_prompts_for_cudnn_are_those_that_it_can_compute(options, monkeypatch):
    monkeypatch.setattr("weft.parallel.thresholds.CUDNN_ROWS", 1)
    calls = []
    monkeypatch.setattr(fused, "attend_to_prompts", lambda *given: calls.append(1) or plain.attend_to_prompts(*given))
    check(OPTIONS[options], PROMPTS["at once"])
    assert len(calls) == (0 if OPTIONS[options].get("window") == 11 else 1)
