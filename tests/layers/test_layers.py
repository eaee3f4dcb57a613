"""TPMLP, TPAttention and the split vocabulary against the whole modules, rank by rank."""

import pytest
import torch
from torch import nn

import weft
from weft.layers import TPMLP, Step, TPAttention, VocabParallelEmbedding, VocabParallelHead

transformers = pytest.importorskip("transformers")
from transformers.models.qwen3 import modeling_qwen3 as hf  # noqa: E402

MODES = ["torch", "ag_rs", "gemm_ar"]
MODEL = {"head_dim": 16, "theta": 50.0}


@pytest.fixture(scope="module")
def config():
    return transformers.Qwen3Config(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rope_parameters={"rope_type": "default", "rope_theta": MODEL["theta"]},
        attn_implementation="eager",
    )


def randomised(module, seed=0):
    torch.manual_seed(seed)
    for weight in module.parameters():
        nn.init.normal_(weight, std=0.3)
    return module.eval().requires_grad_(False)


def share(x, team, mode):
    """What rank `team.rank` is given of tokens x[M, hidden] in this mode."""
    if mode != "ag_rs":
        return x
    padded = nn.functional.pad(x, (0, 0, 0, -len(x) % team.size))
    return padded.chunk(team.size)[team.rank]


def joined(results, mode, tokens):
    """The whole [M, hidden] from every rank's result; in the replicated modes all ranks must have the same."""
    if mode == "ag_rs":
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
        step = Step.prefill(batch, length, **MODEL, device=team.device, dtype=torch.float32)
        return attention(share(x.flatten(0, 1), team, mode), step)

    found = joined(weft.simulate(main, world_size), mode, batch * length)
    torch.testing.assert_close(found, expected.flatten(0, 1), rtol=1e-4, atol=1e-5)


def test_a_step_from_the_cache_is_the_last_row_of_the_prompt(config):
    whole = randomised(hf.Qwen3Attention(config, layer_idx=0))
    x, lengths = torch.randn(2, 6, 32), torch.tensor([5, 3])

    def main(team):
        attention = TPAttention.from_module(whole, config, team, "torch")
        step = Step.prefill(2, 6, **MODEL, device=team.device, dtype=torch.float32)
        cache = tuple(torch.zeros(2, attention.num_kv_heads, 8, 16) for _ in range(2))
        rows = attention(x.flatten(0, 1), step, cache).view(2, 6, 32)
        for one in cache:  # what a prompt's padding left there must not be seen
            for index, length in enumerate(lengths):
                one[index, :, length:] = 100.0
        new = x[torch.arange(2), lengths]
        decode = Step.decode(lengths, 8, **MODEL, dtype=torch.float32)
        return attention(new, decode, cache), rows[torch.arange(2), lengths]

    for found, expected in weft.simulate(main, 2):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_modules_that_are_not_what_the_layer_computes_are_refused(config):
    gelu = hf.Qwen3MLP(config)
    gelu.act_fn = nn.GELU()
    biased = hf.Qwen3Attention(config, layer_idx=0)
    biased.q_proj = nn.Linear(32, 64, bias=True)
    narrow = hf.Qwen3Attention(config, layer_idx=0)
    narrow.o_proj = nn.Linear(64, 24, bias=False)
    windowed = hf.Qwen3Attention(config, layer_idx=0)
    windowed.sliding_window = 4
    with pytest.raises(ValueError, match="sliding_window=4; TPAttention sees all tokens"):
        weft.simulate(lambda team: TPAttention.from_module(windowed, config, team, "torch"), 1)
    with pytest.raises(ValueError, match="act_fn=GELU; TPMLP computes silu"):
        weft.simulate(lambda team: TPMLP.from_module(gelu, team, "torch"), 1)
    with pytest.raises(ValueError, match=r"lacks nothing and has \['q_proj.bias'\]"):
        weft.simulate(lambda team: TPAttention.from_module(biased, config, team, "torch"), 1)
    with pytest.raises(ValueError, match=r"o_proj.weight of the module has shape \(24, 64\).*needs \(32, 64\)"):
        weft.simulate(lambda team: TPAttention.from_module(narrow, config, team, "torch"), 1)


def test_sizes_that_the_ranks_do_not_divide_are_refused_with_those_that_do(config):
    with pytest.raises(ValueError, match="intermediate_size=64 is not .* world_size=3; use a world size of 1, 2, 4"):
        weft.simulate(lambda team: TPMLP.from_module(hf.Qwen3MLP(config), team, "torch"), 3)
    with pytest.raises(ValueError, match=r"num_attention_heads=4 .* world_size=3; use a world size of 1, 2, 4"):
        weft.simulate(
            lambda team: TPAttention.from_module(hf.Qwen3Attention(config, layer_idx=0), config, team, "torch"), 3
        )


def fill(layer, weight):
    layer.shards()["weight"].copy_from(weight)
    return layer


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("vocab_size", "world_size"), [(10, 1), (11, 2), (9, 4), (5, 4)])
def test_a_split_embedding_looks_up_every_word(mode, vocab_size, world_size):
    weight, tokens = torch.randn(vocab_size, 8), torch.arange(vocab_size)

    def main(team):
        return fill(VocabParallelEmbedding(vocab_size, 8, team=team, mode=mode, dtype=torch.float32), weight)(tokens)

    assert torch.equal(joined(weft.simulate(main, world_size), mode, vocab_size), weight)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("vocab_size", "world_size"), [(10, 1), (11, 2), (9, 4), (5, 4)])
def test_a_split_head_finds_the_best_word_and_of_equals_the_first(mode, vocab_size, world_size):
    weight = torch.eye(vocab_size, 16)
    x = torch.zeros(4, 16)
    x[0, vocab_size - 1] = 1.0
    x[1, 0] = 1.0
    x[2, 2] = x[2, vocab_size - 1] = 1.0
    x[3] = -1.0  # all real words below the zero that an unmasked padded word would get

    def main(team):
        head = fill(VocabParallelHead(vocab_size, 16, team=team, mode=mode, dtype=torch.float32), weight)
        logits = head(x)
        return head.argmax(logits), head.gather(logits)

    for best, logits in weft.simulate(main, world_size):
        assert best.tolist() == [vocab_size - 1, 0, 2, 0]
        assert torch.equal(logits, x @ weight.T)
