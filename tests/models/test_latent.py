"""Latent attention (MLA): what is published, a cache spread over ranks, engines, fp8, memory. Logits: test_families.py."""

import pytest
import torch

import weft
from tests.against_transformers import FAMILIES, TOLERANCE, prompt, reference_logits, relative_rms
from tests.teacher_forced import in_three_ways
from weft.bench.models.roofline import Limits, roofline, weights
from weft.engine import Engine
from weft.errors import CheckpointError
from weft.layers.latent_attention import LatentAttention
from weft.models import Decoder, DecoderConfig
from weft.models.memory import check_cache
from weft.parallel.latent_sizes import LatentSizes
from weft.parallel.quantized import Fp8Format

# config.json of the published checkpoints, as far as transformers reads it.
V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "aux_loss_alpha": 0.001,
    "bos_token_id": 100000, "eos_token_id": 100001, "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 10944, "kv_lora_rank": 512, "max_position_embeddings": 163840,
    "model_type": "deepseek_v2", "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64,
    "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16, "num_experts_per_tok": 6,
    "num_hidden_layers": 27, "num_key_value_heads": 16, "pretraining_tp": 1, "q_lora_rank": None, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000, "routed_scaling_factor": 1.0,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "scoring_func": "softmax", "seq_aux": True, "tie_word_embeddings": False, "topk_group": 1, "topk_method": "greedy",
    "torch_dtype": "bfloat16", "use_cache": True, "v_head_dim": 128, "vocab_size": 102400,
}  # fmt: skip
V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0,
    "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
    "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
    "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 4,
    "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "use_cache": True, "v_head_dim": 128, "vocab_size": 129280,
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
    },
}  # fmt: skip


@pytest.mark.parametrize(("content", "name"), [(V2_LITE, "deepseek-v2-lite"), (V3, "deepseek-v3")])
def test_published_configs_mean_what_they_mean_to_transformers(content, name):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoConfig.for_model(**content)
    with torch.device("meta"):
        theirs.num_hidden_layers = 4
        attention = transformers.AutoModelForCausalLM.from_config(theirs).model.layers[3].self_attn
    made = DecoderConfig.from_dict(content)
    latent = made.attention.latent
    assert latent.scale == pytest.approx(attention.scaling)
    assert (latent.q_lora_rank, latent.qk_nope_head_dim, made.head_dim) == (attention.q_lora_rank, 128, 64)
    assert latent.parameters(made.hidden_size, made.num_attention_heads) == sum(
        weight.numel() for weight in attention.parameters() if weight.dim() == 2
    )
    named = DecoderConfig.named(name)
    assert (named.attention, named.experts, named.rotary) == (made.attention, made.experts, made.rotary)
    assert made.cached_elements(8) == 576 and made.max_position_embeddings == 163840


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 8}, "num_key_value_heads=8 is not supported"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim=63 is odd"),
        ({"kv_lora_rank": None}, "kv_lora_rank=None is not a positive integer"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace=-1 is not an integer of at least 0"),
        ({"topk_method": "noaux_tc"}, "topk_method='noaux_tc' is not supported; weft runs 'greedy'"),
        ({"topk_method": "group_limited_greedy", "n_group": 7}, "n_group=7, topk_group=1: num_experts_per_tok=6 of 64"),
        ({"norm_topk_prob": True}, "norm_topk_prob=True is not supported"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
    ],
)
def test_what_weft_does_not_run_is_refused(changes, message):
    with pytest.raises(CheckpointError, match=message.replace("(", r"\(")):
        DecoderConfig.from_dict(V2_LITE | changes)


# 16 tokens a page: rank 0 holds all of the first 16, and chunks begin and end within pages of several ranks.
LENGTH, CUTS = 53, (15, 34)
ONE_LAYER = {"num_hidden_layers": 1, "first_k_dense_replace": 1}
FP8 = Fp8Format(scheme="block", scale="weight_scale_inv")


def logits(team, directory, mode, tokens, cuts=CUTS, fused=False):
    model = Decoder.from_pretrained(directory, team, mode=mode, fused=fused, context_parallel=True)
    assert model.new_cache(4, 16).data.shape[1:] == (1, 4, 1, 16, 48)
    return in_three_ways(model, tokens, cuts)


@pytest.mark.parametrize(
    ("name", "world_size", "mode"),
    [
        ("deepseek-v2-lite", 2, "replicated"),
        *(
            pytest.param(name, w, mode, marks=pytest.mark.sweep)
            for name in ("deepseek-v2-lite", "deepseek-v3")
            for w in (2, 4, 8)
            for mode in ("replicated", "sequence_parallel")
        ),
    ],
)
def test_latents_spread_over_ranks_give_the_logits_of_transformers(make_checkpoint, plain_ops, name, world_size, mode):
    directory, reference = make_checkpoint(**FAMILIES[name])
    tokens = prompt(2, LENGTH)
    expected = reference_logits(reference, tokens)
    for result in weft.simulate(logits, world_size, args=(directory, mode, tokens)):
        for way, one in zip(("at once", "in chunks", "by decoding"), result, strict=True):
            assert relative_rms(one, expected) <= TOLERANCE, way


@pytest.mark.parametrize(
    ("name", "world_size"), [("deepseek-v2-lite", 2), pytest.param("deepseek-v3", 4, marks=pytest.mark.sweep)]
)
def test_kernels_attend_to_latents_of_all_ranks(make_checkpoint, name, world_size):
    """Results and their log-sums go to the owners of the heads, which merge them."""
    directory, reference = make_checkpoint(**FAMILIES[name] | ONE_LAYER)
    tokens = prompt(1, 20)
    expected = reference_logits(reference, tokens)
    for result in weft.simulate(logits, world_size, args=(directory, "replicated", tokens, (5, 18), True)):
        for way, one in zip(("at once", "in chunks", "by decoding"), result, strict=True):
            assert relative_rms(one, expected) <= TOLERANCE, way


def answers(team, directory, prompts, options):
    engine = Engine(directory, team, page_size=16, warn=False, **options)
    completions = engine.generate(prompts, max_tokens=12, ignore_eos=True)
    return engine.model.context_parallel, [completion.token_ids for completion in completions]


@pytest.mark.parametrize(
    ("world_size", "options", "spread"),
    [
        (2, {"pages": 6, "chunk_tokens": 24}, True),
        (2, {"context_parallel": False, "mode": "sequence_parallel"}, False),
        (1, {"speculative": {"method": "ngram", "num_speculative_tokens": 3}}, False),
    ],
)
def test_engines_answer_as_transformers_does(make_checkpoint, plain_ops, world_size, options, spread):
    """Prompts that share pages and wait for each other; latents spread over the ranks by itself; with speculation."""
    directory, reference = make_checkpoint(**FAMILIES["deepseek-v2-lite"])
    prompts = [prompt(1, length)[0].tolist() for length in (3, 37, 40)]
    with torch.no_grad():
        expected = [
            reference.generate(torch.tensor([one]), do_sample=False, max_new_tokens=12)[0, len(one) :].tolist()
            for one in prompts
        ]
    for result in weft.simulate(answers, world_size, args=(directory, prompts, options)):
        assert result == (spread, expected)


@pytest.mark.parametrize("speculative", [None, {"method": "ngram", "num_speculative_tokens": 3}])
def test_engines_answer_the_same_by_kernels(make_checkpoint, speculative):
    """Prompts of several lengths in one pass; with speculation several new tokens of a sequence in one step."""
    directory, _ = make_checkpoint(**FAMILIES["deepseek-v2-lite"] | ONE_LAYER)
    prompts = [prompt(1, length)[0].tolist() for length in (3, 20)]
    options = {"fused": True, "max_batch": 2, "max_seq_len": 64, "speculative": speculative}
    [(_, result)] = weft.simulate(answers, 1, args=(directory, prompts, options))
    [(_, expected)] = weft.simulate(answers, 1, args=(directory, prompts, {"mode": "torch"}))
    assert result == expected


def test_an_fp8_cache_is_refused(make_checkpoint):
    directory, _ = make_checkpoint(**FAMILIES["deepseek-v2-lite"])

    def main(team):
        with pytest.raises(ValueError, match="a cache of latents has the dtype of the weights"):
            Decoder.from_pretrained(directory, team, mode="torch", kv_cache_dtype="fp8")

    weft.simulate(main, 1)


def test_pages_of_latents_count_as_what_they_are(monkeypatch):
    config = DecoderConfig.named("deepseek-v2-lite")
    monkeypatch.setattr("weft.models.memory.memory_of_this_machine", lambda: 27 * 64 * 576 * 2 * 2 * 100)

    def main(team):
        check = {"layers": range(27), "context_parallel": True}
        check_cache(config, team, torch.bfloat16, 100, 64, **check)
        with pytest.raises(ValueError, match="pages=101 are more than the 100"):
            check_cache(config, team, torch.bfloat16, 101, 64, **check)

    weft.simulate(main, 2)


def test_kv_b_in_blocks_of_fp8_is_dequantized_once():
    def main(team):
        sizes = LatentSizes(kv_lora_rank=256, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64, scale=0.1)
        layer = LatentAttention(
            hidden_size=128, num_attention_heads=4, sizes=sizes, team=team, mode="replicated", dtype=torch.float32,
            formats=lambda names: FP8 if names == ("kv_b_proj",) else None,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(512, 256, generator=generator).to(torch.float8_e4m3fn)
        scales = torch.rand(4, 2, generator=generator)
        tensors = {"kv_b_proj.weight": weight, "kv_b_proj.weight_scale_inv": scales}
        for name, shard in layer.shards().items():
            if name in tensors:
                shard.copy_from(tensors[name])
        wide = weight.float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        assert torch.equal(layer.kv_b, wide.view(4, 128, 256)[team.rank * 4 // team.size :][: 4 // team.size])
        assert layer.kv_b is layer.kv_b

    weft.simulate(main, 1)
    weft.simulate(main, 2)


def test_the_roofline_counts_latents():
    """One H200: DeepSeek-V2-Lite reads 576 elements a token; in a step all heads multiply them, in prompts expanded ones."""
    limits, config = (
        Limits(memory=4.8e12, flops=989e12, link=450e9, latency=1e-6),
        DecoderConfig.named("deepseek-v2-lite"),
    )
    latent = config.attention.latent
    sizes = weights(config, 1)
    assert sizes["qkv"] + sizes["o"] == latent.parameters(config.hidden_size, config.num_attention_heads)
    step = roofline("attn", config, 1, (8, 4096, 1), "bf16", limits).attention
    assert step == pytest.approx(8 * 4096 * 576 * 2 / 4.8e12 * 1e6)
    read = roofline("attn", config, 1, (1, 8192, 8192), "bf16", limits).attention
    assert read == pytest.approx(2 * 16 * (192 + 128) * 8192 * 8193 / 2 / 989e12 * 1e6)
