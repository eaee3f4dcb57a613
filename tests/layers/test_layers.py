"""TPMLP and TPAttention against the whole modules, rank by rank."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import weft
from weft.costs.gpu import named
from weft.costs.recipes import Changes
from weft.layers import TPMLP, PagedCache, Step, TPAttention, plan_layer, rotary_angles

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
    monkeypatch.setattr("weft.parallel.step_plan.changes", lambda *given: Changes(0, 0, 0))
    whole, mode = randomised(hf.Qwen3MLP(config)), "sequence_parallel"
    x = torch.randn(24, 32)

    def main(team):
        plan = plan_layer(24, mode=mode, team=team, fused=fused)
        return TPMLP.from_module(whole, team, mode)(share(x, team, mode), plan)

    torch.testing.assert_close(joined(weft.simulate(main, world_size), mode, 24), whole(x), rtol=1e-4, atol=1e-5)


def ungated(team, mode, activation, tensors):
    mlp = TPMLP(hidden_size=32, intermediate_size=64, team=team, mode=mode, dtype=torch.float32, activation=activation)
    for name, shard in mlp.shards().items():
        shard.copy_from(tensors[name])
    return mlp.requires_grad_()


def test_an_mlp_without_a_gate_and_its_gradients_are_the_whole_one():
    generator = torch.Generator().manual_seed(0)
    up, down, x = (
        torch.randn(shape, generator=generator, requires_grad=True) for shape in ((64, 32), (32, 64), (8, 32))
    )
    y = (x @ up.T).relu().square() @ down.T
    y.square().sum().backward()

    def main(team):
        mlp = ungated(team, "replicated", "relu2", {"up_proj.weight": up.detach(), "down_proj.weight": down.detach()})
        found = mlp(x.detach())
        (found.square().sum() / team.size).backward()
        return found.detach(), mlp.gate_up_proj.weight.grad, mlp.down_proj.weight.grad

    results = weft.simulate(main, 2)
    found, of_up, of_down = zip(*results, strict=True)
    for ours, theirs in ((found[0], y), (torch.cat(of_up), up.grad), (torch.cat(of_down, dim=1), down.grad)):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-4, atol=1e-3)


def test_xielu_has_no_gradients():
    tensors = {"up_proj.weight": torch.ones(64, 32), "down_proj.weight": torch.ones(32, 64)}
    tensors |= {f"act_fn.{name}": torch.tensor([0.5]) for name in ("alpha_p", "alpha_n", "beta", "eps")}
    with pytest.raises(RuntimeError, match="activation='xielu' has no gradients; use torch.no_grad"):
        weft.simulate(lambda team: ungated(team, "replicated", "xielu", tensors)(torch.ones(1, 32)), 1)


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
    limits = replace(named("h200").limits, cudnn_rows=1)
    monkeypatch.setattr("weft.parallel.step.limits_of", lambda team: limits)
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


def test_modules_that_are_not_what_the_layer_computes_are_refused(config):
    gelu = hf.Qwen3MLP(config)
    gelu.act_fn = nn.GELU()
    biased = hf.Qwen3Attention(config, layer_idx=0)
    biased.q_proj = nn.Linear(32, 64, bias=True)
    narrow = hf.Qwen3Attention(config, layer_idx=0)
    narrow.o_proj = nn.Linear(64, 24, bias=False)
    quantized = hf.Qwen3Attention(config, layer_idx=0)
    quantized.k_proj = nn.Linear(32, 32, bias=False).requires_grad_(False)
    quantized.k_proj.weight.data = torch.zeros(32, 32, dtype=torch.int8)
    windowed = hf.Qwen3Attention(config, layer_idx=0)
    windowed.sliding_window = 4.5
    with pytest.raises(
        ValueError, match="sliding_window=4.5; TPAttention computes causal attention, in a window or not"
    ):
        weft.simulate(lambda team: TPAttention.from_module(windowed, config, team, "reference"), 1)
    with pytest.raises(ValueError, match="has projections without weights of floating point; TPAttention computes"):
        weft.simulate(lambda team: TPAttention.from_module(quantized, config, team, "reference"), 1)
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
