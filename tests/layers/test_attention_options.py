"""Options of TPAttention against their equations in fp64: prompts whole and in chunks, decoding, sequences, over ranks."""

import pytest
import torch
from torch.nn import functional as F

import weft
from weft.layers import PagedCache, Sequences, Step, TPAttention, plan_layer, rotary_angles
from weft.parallel.rotary import Rotary

HIDDEN, HEADS, KV_HEADS, D, PAGE, BATCH, LENGTH = 32, 4, 2, 16, 16, 2, 37
SIZES = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": D}
CPU = torch.device("cpu")
EPS = 1e-6
# Tables of a step, by number; the last one is of the first 12 elements of a head.
THETAS = (50.0, 7.0, None, 50.0)
TABLES = tuple(rotary_angles(64, D, rope, CPU) for rope in (*THETAS[:3], Rotary(theta=50.0, partial=0.75)))
OPTIONS = {
    "scale": {"scale": 0.7},
    "softcap": {"softcap": 0.9, "scale": 0.5},
    "softcap in a window": {"softcap": 0.9, "window": 5},
    "output bias": {"output_bias": True},
    "second table": {"rotary": 1},
    "no rotary embedding": {"rotary": 2},
    "partial": {"rotary": 3, "rotated": 12},
    "interleaved": {"rotary": 0, "interleaved": True},
    "partial, interleaved": {"rotary": 3, "rotated": 12, "interleaved": True, "bias": True},
    "partial, with norms": {"rotary": 3, "rotated": 12, "qk_norm": True},
    "norms after": {"qk_norm": True, "unrotated": 2, "bias": True},
    "norms after, partial": {"rotary": 3, "rotated": 12, "interleaved": True, "qk_norm": True, "unrotated": 2},
    "sinks": {"sinks": True},
    "sinks in a window": {"sinks": True, "window": 5, "bias": True},
    "all": {
        "softcap": 2.0, "scale": 0.5, "window": 20, "output_bias": True, "bias": True, "rotary": 3, "rotated": 12,
        "interleaved": True, "sinks": True,
    },
}  # fmt: skip
MODES = ("reference", "replicated", "sequence_parallel")


def turned(x, theta, count, interleaved):
    """x [batch, length, heads, D]: pairs of the first ``count`` elements turned by their positions."""
    if theta is None:
        return x
    angles = torch.arange(x.shape[1])[:, None] * theta ** (-torch.arange(0, count, 2).double() / count)
    cos, sin = (part[:, None] for part in (angles.cos(), angles.sin()))
    pairs, rest = x[..., :count].unflatten(-1, (-1, 2) if interleaved else (2, -1)), x[..., count:]
    first, second = pairs.unbind(-1 if interleaved else -2)
    pairs = torch.stack((first * cos - second * sin, second * cos + first * sin), -1 if interleaved else -2)
    return torch.cat((pairs.flatten(-2), rest), dim=-1)


def by_definition(
    weights, x, *, window=None, scale=None, softcap=None, rotary=0, rotated=D, interleaved=False, **options
):
    """[batch, length, hidden] in fp64 of x [batch, length, hidden]."""
    w, unrotated = {name: weight.double() for name, weight in weights.items()}, options.get("unrotated")
    q, k, v = (
        F.linear(x.double(), w[f"{name}.weight"], w.get(f"{name}.bias")).unflatten(-1, (-1, D))
        for name in ("q_proj", "k_proj", "v_proj")
    )
    steps = [lambda part, name: turned(part, THETAS[rotary], rotated, interleaved)]
    if "q_norm.weight" in w:
        steps.insert(0 if unrotated is None else 1, lambda part, name: F.rms_norm(part, (D,), w[f"{name}.weight"], EPS))
    for step in steps:
        q, k = step(q, "q_norm"), step(k, "k_norm")
    k, v = (part.repeat_interleave(HEADS // KV_HEADS, dim=2) for part in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (D**-0.5 if scale is None else scale)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    distance = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
    seen = (distance >= 0) & (distance < (window or x.shape[1]))
    scores = scores.masked_fill(~seen, -torch.inf)
    if "sinks" in w:
        scores = torch.cat((scores, w["sinks"][:, None, None].expand(*scores.shape[:3], 1)), dim=-1)
    shares = scores.softmax(-1)[..., : x.shape[1]]
    attended = torch.einsum("bhqk,bkhd->bqhd", shares, v).flatten(2)
    return F.linear(attended, w["o_proj.weight"], w.get("o_proj.bias"))


def weights_of(options):
    """Whole weights under their names."""
    rows = {"q_proj": HEADS * D, "k_proj": KV_HEADS * D, "v_proj": KV_HEADS * D}
    generator = torch.Generator().manual_seed(1)
    weights = {f"{name}.weight": torch.randn(N, HIDDEN, generator=generator) / 4 for name, N in rows.items()}
    weights |= {f"{name}.bias": torch.randn(N, generator=generator) for name, N in rows.items() if options.get("bias")}
    weights["o_proj.weight"] = torch.randn(HIDDEN, HEADS * D, generator=generator) / 4
    if options.get("output_bias"):
        weights["o_proj.bias"] = torch.randn(HIDDEN, generator=generator)
    if options.get("qk_norm"):
        weights |= {f"{name}.weight": 0.5 + torch.rand(D, generator=generator) for name in ("q_norm", "k_norm")}
    if options.get("sinks"):
        weights["sinks"] = torch.randn(HEADS, generator=generator)
    return weights


def layer_of(weights, options, team, mode, spread=False):
    further = {"qk_norm": False, "rms_norm_eps": EPS, "dtype": torch.float32, "context_parallel": spread}
    layer = TPAttention(**SIZES, **further | options, team=team, mode=mode)
    for name, shard in layer.shards().items():
        shard.copy_from(weights[name])
    return layer


def attended(team, options, mode, x, cuts, spread=False, fused=False):
    """Attention of x [batch, length, hidden] in chunks cut at ``cuts``, then of two tokens at once, then token by token."""
    attention = layer_of(weights_of(options), options, team, mode, spread)
    pages = torch.tensor([[4, 2, 6], [1, 5, 3]], dtype=torch.int32)
    cache = PagedCache(1, 7, attention.num_kv_heads, PAGE, D, dtype=torch.float32, device="cpu").layer(0)
    over, parts, before = team if spread else None, [], 0

    def call(rows, step):
        shape, rows = rows.shape, rows.flatten(0, 1)
        if mode == "sequence_parallel":
            padded = F.pad(rows, (0, 0, 0, -len(rows) % team.size))
            rows = padded.chunk(team.size)[team.rank]
        y = attention(rows, step, cache)
        y = team.library.all_gather(y) if mode == "sequence_parallel" else y
        return y[: step.tokens].view(shape)

    for end in cuts:
        spans = [(before, end - before)] * BATCH
        plan = plan_layer(BATCH * (end - before), mode=mode, team=team, fused=fused)
        spread_over = (team, options.get("window")) if spread else None
        step = Step.prefill(spans, pages, PAGE, TABLES, plan, attention.group, torch.float32, spread_over)
        parts.append(call(x[:, before:end], step))
        before = end
    for queries in (2, *(LENGTH - before - 2) * (1,)):
        positions = torch.arange(before, before + queries).repeat(BATCH)
        plan = plan_layer(len(positions), mode=mode, team=team, fused=fused)
        step = Step.decode(positions, pages, PAGE, TABLES, plan, attention.num_kv_heads, over, queries=queries)
        parts.append(call(x[:, before : before + queries], step))
        before += queries
    return torch.cat(parts, dim=1)


def check(options, mode, world_size, cuts, spread=False, fused=False):
    x = torch.randn(BATCH, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(2))
    expected = by_definition(weights_of(options), x, **options)
    for y in weft.simulate(attended, world_size, args=(options, mode, x, cuts, spread, fused)):
        torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cuts", [(33,), (7, 20, 30)], ids=("at once", "in chunks"))
@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_is_its_equation(name, cuts):
    check(OPTIONS[name], "reference", 1, cuts)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.sweep)])
def test_all_options_over_ranks(mode, world_size):
    check(OPTIONS["all"], mode, world_size, (7, 33))


@pytest.mark.parametrize(
    "name", ["all", *(pytest.param(name, marks=pytest.mark.sweep) for name in OPTIONS if name != "all")]
)
def test_an_option_over_a_spread_cache(name):
    check(OPTIONS[name], "replicated", 2, (7, 33), spread=True)


@pytest.mark.parametrize(
    ("world_size", "spread"), [(2, False), (2, True), pytest.param(4, True, marks=pytest.mark.sweep)]
)
def test_all_options_in_kernels(world_size, spread):
    check(OPTIONS["all"], "replicated", world_size, (7, 34), spread, fused=True)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("mode", "world_size"), [("replicated", 1), ("sequence_parallel", 2)])
def test_an_option_in_sequences(name, mode, world_size):
    options, x = OPTIONS[name], torch.randn(BATCH, 8, HIDDEN, generator=torch.Generator().manual_seed(2))

    def main(team):
        attention = layer_of(weights_of(options), options, team, mode)
        plan = plan_layer(BATCH * 8, mode=mode, team=team, fused=False)
        step = Sequences(plan=plan, batch=BATCH, length=8, angles=tuple(table[None, :8] for table in TABLES))
        rows = x.chunk(team.size, dim=1)[team.rank] if mode == "sequence_parallel" else x
        return attention(rows, step)

    results = weft.simulate(main, world_size)
    y = torch.cat(results, dim=1) if mode == "sequence_parallel" else results[0]
    torch.testing.assert_close(y.double(), by_definition(weights_of(options), x, **options), rtol=1e-4, atol=1e-5)
