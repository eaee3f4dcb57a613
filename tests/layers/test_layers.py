"""TPMLP, TPAttention and the split vocabulary against the whole modules, rank by rank."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import weft
from weft.layers import TPMLP, PagedCache, Step, TPAttention, plan_layer, plan_step, rotary_angles
from weft.parallel.replicated import FusedNorm
from weft.parallel.vocabulary import VocabParallelEmbedding, VocabParallelHead
from weft.runtime.capabilities import Capabilities

transformers = pytest.importorskip("transformers")
from transformers.models.qwen3 import modeling_qwen3 as hf  # noqa: E402

MODES = ["reference", "sequence_parallel", "replicated"]
HEAD_DIM, THETA = 16, 50.0
ANGLES = rotary_angles(64, HEAD_DIM, THETA, torch.device("cpu"))


@pytest.fixture(scope="module")
def config():
    return transformers.Qwen3Config(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        attn_implementation="eager",
    )


def randomised(module, seed=0):
    torch.manual_seed(seed)
    for weight in module.parameters():
        nn.init.normal_(weight, std=0.3)
    return module.eval().requires_grad_(False)


def share(x, team, mode):
    """Rows of x[M, hidden] that this rank is given in this mode."""
    if mode != "sequence_parallel":
        return x
    padded = nn.functional.pad(x, (0, 0, 0, -len(x) % team.size))
    return padded.chunk(team.size)[team.rank]


def joined(results, mode, tokens):
    """Whole [M, hidden] from every rank's result, which in the replicated modes must be the same."""
    if mode == "sequence_parallel":
        return torch.cat(results)[:tokens]
    for result in results:
        assert torch.equal(result, results[0])
    return results[0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_an_mlp_over_ranks_is_the_whole_mlp(config, mode, world_size):
    whole = randomised(hf.Qwen3MLP(config))
    x = torch.randn(8, 32)
    results = weft.simulate(lambda team: TPMLP.from_module(whole, team, mode)(share(x, team, mode)), world_size)
    torch.testing.assert_close(joined(results, mode, 8), whole(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("world_size", [2, 4])
def test_an_mlp_of_many_tokens_takes_them_as_they_arrive(config, fused, world_size, monkeypatch):
    monkeypatch.setattr("weft.parallel.step_plan.LIBRARY_ROWS", 0)
    whole, mode = randomised(hf.Qwen3MLP(config)), "sequence_parallel"
    x = torch.randn(24, 32)

    def main(team):
        plan = plan_layer(24, mode=mode, team=team, fused=fused)
        return TPMLP.from_module(whole, team, mode)(share(x, team, mode), plan)

    torch.testing.assert_close(joined(weft.simulate(main, world_size), mode, 24), whole(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_attention_over_ranks_is_the_whole_attention(config, mode, world_size):
    whole = randomised(hf.Qwen3Attention(config, layer_idx=0))
    batch, length = 3, 5  # 15 tokens: padded for 2 and 4 ranks
    x = torch.randn(batch, length, 32)
    causal = torch.full((length, length), float("-inf")).triu(1)[None, None]
    rotary = hf.Qwen3RotaryEmbedding(config)(x, torch.arange(length)[None])
    expected, _ = whole(x, position_embeddings=rotary, attention_mask=causal)

    def main(team):
        attention = TPAttention.from_module(whole, config, team, mode)
        step = prefill(attention, [(0, length)] * batch, table(batch, 1), mode)
        return attention(share(x.flatten(0, 1), team, mode), step, new_cache(attention, batch))

    found = joined(weft.simulate(main, world_size), mode, batch * length)
    torch.testing.assert_close(found, expected.flatten(0, 1), rtol=1e-4, atol=1e-5)


def prefill(attention, spans, pages, mode, fused=False):
    group = attention.num_heads // attention.num_kv_heads
    plan = plan_layer(sum(length for _, length in spans), mode=mode, team=attention.team, fused=fused)
    return Step.prefill(spans, pages, 16, ANGLES, plan, group, torch.float32)


def table(batch, pages):
    """Each sequence's pages, in no order; page 0 is padding's."""
    order = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(1))
    return (1 + order).to(torch.int32).view(batch, pages)


def new_cache(attention, pages, fill=0.0):
    cache = PagedCache(1, 1 + pages, attention.num_kv_heads, 16, HEAD_DIM, dtype=torch.float32, device="cpu")
    cache.data.fill_(fill)
    return cache.layer(0)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_from_the_cache_is_the_last_row_of_the_prompt(config, world_size, fused):
    whole = randomised(hf.Qwen3Attention(config, layer_idx=0))
    x, lengths = torch.randn(2, 20, 32), torch.tensor([19, 3])

    def main(team):
        mode = "replicated" if fused else "reference"
        attention = TPAttention.from_module(whole, config, team, mode)
        cache = new_cache(attention, 4, fill=100.0)  # what others left there must not be seen
        step = prefill(attention, [(0, 20)] * 2, table(2, 2), mode, fused)
        rows = attention(x.flatten(0, 1), step, cache).view(2, 20, 32)
        new = torch.cat((x[torch.arange(2), lengths], torch.zeros(1, 32)))
        padded_table = torch.cat((table(2, 2), torch.zeros(1, 2, dtype=torch.int32)))
        plan = plan_layer(3, mode=mode, team=team, fused=fused)
        decode = Step.decode(
            torch.cat((lengths, torch.tensor([-1]))), padded_table, 16, ANGLES, plan, attention.num_kv_heads
        )
        return attention(new, decode, cache)[:2], rows[torch.arange(2), lengths]

    for found, expected in weft.simulate(main, world_size):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fused", [False, True])
def test_a_prompt_in_chunks_is_the_prompt_at_once(config, fused):
    whole = randomised(hf.Qwen3Attention(config, layer_idx=0))
    x = torch.randn(2, 40, 32)

    def read(attention, parts):
        cache = new_cache(attention, 6)
        found = []
        for before, length in parts:
            step = prefill(attention, [(before, length)] * 2, table(2, 3), "replicated", fused)
            found.append(attention(x[:, before : before + length].flatten(0, 1), step, cache).unflatten(0, (2, length)))
        return torch.cat(found, dim=1)

    def main(team):
        attention = TPAttention.from_module(whole, config, team, "replicated")
        whole_prompt = read(attention, [(0, 40)])
        return whole_prompt, [read(attention, parts) for parts in ([(0, 16), (16, 24)], [(0, 7), (7, 1), (8, 32)])]

    [(expected, in_chunks)] = weft.simulate(main, 1)
    for found in in_chunks:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spans", [[(0, 20)] * 2, [(0, 3), (0, 37)], [(0, 5), (10, 5)]], ids=str)
def test_prompts_for_cudnn_are_what_ours_are(config, spans, monkeypatch):
    whole = randomised(hf.Qwen3Attention(config, layer_idx=0))
    x = torch.randn(sum(length for _, length in spans), 32)

    def main(team):
        attention = TPAttention.from_module(whole, config, team, "replicated")
        cache = new_cache(attention, 6)
        step = prefill(attention, spans, table(2, 3), "replicated", fused=True)
        return attention(x, step, cache), *cache

    found = weft.simulate(main, 1)[0]
    monkeypatch.setattr("weft.parallel.step_plan.CUDNN_ROWS", 1)
    for by_cudnn, ours in zip(weft.simulate(main, 1)[0], found, strict=True):
        torch.testing.assert_close(by_cudnn, ours, rtol=1e-4, atol=1e-5)


def test_sequences_of_unequal_length_do_not_see_each_other(config):
    whole = randomised(hf.Qwen3Attention(config, layer_idx=0))
    lengths = [5, 5, 17, 1]
    x = [torch.randn(length, 32) for length in lengths]

    def main(team):
        attention = TPAttention.from_module(whole, config, team, "reference")

        def read(parts, cache):
            step = prefill(attention, [(0, len(part)) for part in parts], table(len(parts), 2), "reference")
            return attention(torch.cat(parts), step, cache)

        return read(x, new_cache(attention, 8)), [read([part], new_cache(attention, 2)) for part in x]

    [(together, alone)] = weft.simulate(main, 1)
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-5)


def test_the_plan_of_a_pass_follows_its_tokens_and_says_why():
    def main(team):
        sizes = {"hidden_size": 64, "dtype": torch.float32, "team": team}
        return [str(plan_step(tokens, mode="auto", **sizes, fused=True)) for tokens in (1, 1025, 4096)]

    decode, medium, prefill = weft.simulate(main, 2)[0]
    assert decode == (
        "replicated, fused, all-reduce with the next norm: 1 tokens < 2048: too few to split over 2 ranks; 1 tokens <= 1024: "
        "a GEMM is too short to hide an all-reduce, so the norm takes it along"
    )
    assert medium == "replicated, fused: 1025 tokens < 2048: too few to split over 2 ranks"
    assert prefill == "sequence_parallel, fused: 4096 tokens >= 2048: the GEMMs hide gathering and scattering"
    assert weft.simulate(main, 1)[0][2] == "replicated, fused: one rank: nothing to send"


@pytest.mark.parametrize("names", [("reference", "sequence_parallel", "replicated"), ("torch", "ag_rs", "gemm_ar")])
def test_a_plan_that_was_asked_for_is_followed(names):
    def main(team):
        sizes = {"hidden_size": 64, "dtype": torch.float32, "team": team}
        plans = [plan_step(8, mode=mode, **sizes, fused=True) for mode in names]
        narrow = plan_step(8, mode=names[-1], hidden_size=6, dtype=torch.bfloat16, team=team, fused=True)
        return [(plan.mode, plan.fused, isinstance(plan.recipe, FusedNorm)) for plan in [*plans, narrow]]

    reference, sequence_parallel, replicated, narrow = weft.simulate(main, 2)[0]
    assert reference == ("reference", False, False)
    assert sequence_parallel == ("sequence_parallel", True, False)
    assert replicated == ("replicated", True, True)
    assert narrow == ("replicated", True, False)  # rows of 12 bytes: not what all_reduce_rms_norm takes


def test_rms_scales_are_deferred_for_few_tokens_in_bf16_on_sm_90(monkeypatch):
    def plan(tokens=64, dtype=torch.bfloat16, mode="replicated", arch="sm_90", world_size=4):
        caps = Capabilities(device_name=arch, arch=arch, sms=132, memory_bytes=0, peer_access=(True,))
        team = SimpleNamespace(size=world_size, is_simulated=False, caps=caps)
        return plan_step(tokens, mode=mode, hidden_size=5120, dtype=dtype, team=team)

    def defers(plan):
        assert isinstance(plan.recipe, FusedNorm) or "deferred" not in str(plan)
        return isinstance(plan.recipe, FusedNorm) and plan.recipe.deferred_scale

    assert defers(plan()) and ", deferred RMS scale" in str(plan())
    others = [
        {"tokens": 513},
        {"dtype": torch.float32},
        {"dtype": torch.float16},
        {"mode": "sequence_parallel"},
        {"arch": "sm_100"},
    ]
    for asked in others:
        assert not defers(plan(**asked)) and "deferred" not in str(plan(**asked)), asked
    assert defers(plan(512)) and defers(plan(1024, world_size=2))
    assert not isinstance(plan(1025, world_size=2).recipe, FusedNorm) and not isinstance(plan(1024).recipe, FusedNorm)
    monkeypatch.setattr("weft.parallel.step_plan.defers_scale", lambda dtype, team: True)
    assert defers(plan(arch="sm_100")) and not defers(plan(513))
    monkeypatch.setattr("weft.parallel.step_plan.defers_scale", lambda dtype, team: False)
    assert not defers(plan())


def test_a_head_of_many_rows_is_given_normed_rows():
    """cuBLAS's GEMM leaves a deferred scale to the kernel behind it, and the logits have none."""

    def main(team):
        plan = plan_step(64, mode="replicated", hidden_size=64, dtype=torch.bfloat16, team=team, fused=True)
        return [plan.of_head(rows).recipe.deferred_scale for rows in (1, 10_000)]

    assert weft.simulate(main, 2)[0] == [True, False]


def test_modules_that_are_not_what_the_layer_computes_are_refused(config):
    gelu = hf.Qwen3MLP(config)
    gelu.act_fn = nn.GELU()
    biased = hf.Qwen3Attention(config, layer_idx=0)
    biased.q_proj = nn.Linear(32, 64, bias=True)
    narrow = hf.Qwen3Attention(config, layer_idx=0)
    narrow.o_proj = nn.Linear(64, 24, bias=False)
    windowed = hf.Qwen3Attention(config, layer_idx=0)
    windowed.sliding_window = 4
    with pytest.raises(ValueError, match="sliding_window=4; TPAttention computes causal attention over all tokens"):
        weft.simulate(lambda team: TPAttention.from_module(windowed, config, team, "reference"), 1)
    with pytest.raises(ValueError, match="act_fn=GELU; TPMLP computes silu"):
        weft.simulate(lambda team: TPMLP.from_module(gelu, team, "reference"), 1)
    with pytest.raises(ValueError, match=r"lacks nothing and has \['q_proj.bias'\]"):
        weft.simulate(lambda team: TPAttention.from_module(biased, config, team, "reference"), 1)
    with pytest.raises(ValueError, match=r"o_proj.weight of the module has shape \(24, 64\).*needs \(32, 64\)"):
        weft.simulate(lambda team: TPAttention.from_module(narrow, config, team, "reference"), 1)


def test_sizes_that_the_ranks_do_not_divide_are_refused_with_those_that_do(config):
    with pytest.raises(ValueError, match="intermediate_size=64 is not .* world_size=3; use a world size of 1, 2, 4"):
        weft.simulate(lambda team: TPMLP.from_module(hf.Qwen3MLP(config), team, "reference"), 3)
    with pytest.raises(ValueError, match=r"num_attention_heads=4 .* world_size=3; use a world size of 1, 2, 4"):
        weft.simulate(
            lambda team: TPAttention.from_module(hf.Qwen3Attention(config, layer_idx=0), config, team, "reference"), 3
        )


def fill(layer, weight):
    layer.shards()["weight"].copy_from(weight)
    return layer


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("vocab_size", "world_size"), [(10, 1), (11, 2), (9, 4), (5, 4)])
def test_a_split_embedding_looks_up_every_token_id(mode, vocab_size, world_size):
    weight, tokens = torch.randn(vocab_size, 8), torch.arange(vocab_size)

    def main(team):
        return fill(VocabParallelEmbedding(vocab_size, 8, team=team, mode=mode, dtype=torch.float32), weight)(tokens)

    assert torch.equal(joined(weft.simulate(main, world_size), mode, vocab_size), weight)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("vocab_size", "world_size"), [(10, 1), (11, 2), (9, 4), (5, 4)])
def test_a_split_head_finds_the_largest_logit_and_of_equals_the_first(mode, vocab_size, world_size):
    weight = torch.eye(vocab_size, 16)
    x = torch.zeros(4, 16)
    x[0, vocab_size - 1] = 1.0
    x[1, 0] = 1.0
    x[2, 2] = x[2, vocab_size - 1] = 1.0
    x[3] = -1.0  # all real ids below the zero that unmasked padding would get

    def main(team):
        head = fill(VocabParallelHead(vocab_size, 16, team=team, mode=mode, dtype=torch.float32), weight)
        logits = head(x)
        return head.argmax(logits), head.gather(logits)

    for best, logits in weft.simulate(main, world_size):
        assert best.tolist() == [vocab_size - 1, 0, 2, 0]
        assert torch.equal(logits, x @ weight.T)
