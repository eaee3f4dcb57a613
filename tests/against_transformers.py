"""Logits and greedy tokens of weft's models beside those of transformers."""

import copy
import importlib.metadata

import pytest
import torch

import weft
from tests.teacher_forced import all_logits
from weft.engine import Engine, Runner, SamplingParams
from weft.engine.config import EngineConfig
from weft.engine.prefill import PrefillChunk
from weft.engine.slots import SlotState
from weft.models import Decoder

TOLERANCE = 1e-5  # relative RMS of fp32 logits on a CPU

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 50.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 50.0, "factor": 4.0, "original_max_position_embeddings": 64}
# Before the positions whose queries are scaled.
YARN_OF_MISTRAL = {
    **YARN, "original_max_position_embeddings": 128, "mscale": 1.0, "mscale_all_dim": 0.0, "llama_4_scaling_beta": 0.5,
}  # fmt: skip
# Windows shorter than the prompts below, and for some layers only.
WINDOW_FROM_1 = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
WINDOW_OF_TYPES = {
    "use_sliding_window": True, "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
# Weights large enough that a model with a shared expert does not repeat itself, and no two experts are as good as equal.
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 48, "kv_heads": 4, "initializer_range": 0.2}
SHARED_SPARSE = {
    "shared_expert_intermediate_size": 24, "norm_topk_prob": True, "decoder_sparse_step": 2, "qkv_bias": False,
    "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2,
}  # fmt: skip
# Two rotary embeddings, by type of layer.
ROPE_OF_TYPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 50.0, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
}
YARN_OF_TYPES = {**ROPE_OF_TYPES, "full_attention": YARN}
ALTERNATING = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
GRANITE = {
    "embedding_multiplier": 3.0, "residual_multiplier": 0.22, "attention_multiplier": 0.5, "logits_scaling": 4.0,
}  # fmt: skip
# Six of the eight angles of a head, each with its factors.
PHI = {
    "hidden_size": 128, "tied": True,
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 50.0, "partial_rotary_factor": 0.75,
        "short_factor": [1.0, 1.2, 1.5, 2.0, 2.0, 3.0], "long_factor": [1.0, 2.0, 4.0, 6.0, 9.0, 9.0],
    },
}  # fmt: skip
# Value heads share key heads; states go over a chunk's end, and attention has a layer of its own kind between them.
DELTA_NETS = {
    "linear_key_head_dim": 16, "linear_value_head_dim": 32, "linear_num_key_heads": 8, "linear_num_value_heads": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.25},
}  # fmt: skip
SHARED_SPARSE_NEXT = {
    **EXPERTS, **DELTA_NETS, "shared_expert_intermediate_size": 24, "norm_topk_prob": False, "mlp_only_layers": [1],
    "linear_num_value_heads": 8,
}  # fmt: skip
FEW_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3}
SOME_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 3}
# Weights large enough that the bias of the choice does not decide it alone.
HALF_ROTATED = {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5}
ROUTED = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 0,
    "rope_parameters": HALF_ROTATED,
}  # fmt: skip
ERNIE = {
    "initializer_range": 0.2, "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 48, "moe_num_shared_experts": 2,
}  # fmt: skip
CLAMPED = SOME_EXPERTS | {"intermediate_size": 48, "swiglu_alpha": 1.3, "swiglu_limit": 0.5}
# Heads whose values have another size than their keys, and norms whose eps is not rms_norm_eps.
LATENT = {
    "kv_heads": 8, "head_dim": 16, "kv_lora_rank": 32, "qk_nope_head_dim": 12, "qk_rope_head_dim": 16, "v_head_dim": 20,
    "rms_norm_eps": 1e-3, "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 48,
    "first_k_dense_replace": 1, "initializer_range": 0.2,
}  # fmt: skip
NTK_ALPHA = {"rope_type": "dynamic", "rope_theta": 20.0, "alpha": 4.0, "factor": 1.0}
YARN_MSCALE = {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9}
FAMILIES = {
    "llama-3": {"family": "Llama", "rope_parameters": LLAMA3},
    "llama-3-tied": {"family": "Llama", "rope_parameters": LLAMA3, "tied": True},
    "llama-2": {"family": "Llama", "kv_heads": 8, "head_dim": None},
    "llama-linear": {"family": "Llama", "rope_parameters": {"rope_type": "linear", "rope_theta": 50.0, "factor": 4.0}},
    "qwen2.5": {"family": "Qwen2"},
    "qwen2.5-window": {"family": "Qwen2", **WINDOW_FROM_1},
    "mistral": {"family": "Mistral", "sliding_window": 5},
    "mistral-no-window": {"family": "Mistral", "sliding_window": None, "tied": True},
    "ministral3": {"family": "Ministral3", "sliding_window": 5, "rope_parameters": YARN_OF_MISTRAL},
    "qwen3-yarn": {"family": "Qwen3", "rope_parameters": YARN},
    "qwen3-window": {"family": "Qwen3", **WINDOW_OF_TYPES},
    "seed-oss": {"family": "SeedOss"},
    "qwen3-moe": {"family": "Qwen3Moe", **EXPERTS, "norm_topk_prob": True},
    "qwen3-moe-mixed": {"family": "Qwen3Moe", **EXPERTS, "norm_topk_prob": False, "mlp_only_layers": [1]},
    "qwen2-moe": {"family": "Qwen2Moe", **SHARED},
    "qwen2-moe-mixed": {"family": "Qwen2Moe", **EXPERTS, **SHARED_SPARSE},
    "mixtral": {"family": "Mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
    "seed-oss-no-bias": {"family": "SeedOss", "attention_bias": False},
    "olmo2": {"family": "Olmo2", "kv_heads": 4},
    "olmo3": {"family": "Olmo3", **ALTERNATING, "rope_parameters": YARN_OF_TYPES},
    "exaone4": {"family": "Exaone4", **ALTERNATING},
    "exaone4-pattern": {"family": "Exaone4", "sliding_window": 5, "sliding_window_pattern": 2, "tied": True},
    "exaone4-no-window": {"family": "Exaone4", "sliding_window": None, "layer_types": ["full_attention"] * 3},
    "granite": {"family": "Granite", "initializer_range": 0.2, **GRANITE, "tied": True},
    "gemma2": {
        "family": "Gemma2",
        **ALTERNATING,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 2.0,
        "tied": True,
    },
    "smollm3": {"family": "SmolLM3", "initializer_range": 0.2, "no_rope_layers": [1, 0, 1], "tied": True},
    "smollm3-window": {
        "family": "SmolLM3",
        "no_rope_layer_interval": 2,
        "kv_heads": 4,
        "initializer_range": 0.2,
        "use_sliding_window": True,
        "sliding_window": 5,
        "attention_bias": True,
    },
    "phi3": {"family": "Phi3", "hidden_size": 128, "sliding_window": 5},
    "phi3-short": {"family": "Phi3", **PHI, "original_max_position_embeddings": 256},
    "phi3-long": {"family": "Phi3", **PHI, "original_max_position_embeddings": 8},
    "glm4": {"family": "Glm4", "rope_parameters": HALF_ROTATED},
    "ernie4.5": {"family": "Ernie4_5", "tied": True},
    "gemma3-plain-scale": {
        "family": "Gemma3Text",
        "sliding_window": 5,
        "query_pre_attn_scalar": 16,
        "rope_parameters": ROPE_OF_TYPES,
        "tied": True,
    },
    "olmoe": {
        "family": "Olmoe",
        "hidden_size": 128,
        "kv_heads": 4,
        "intermediate_size": 48,
        **FEW_EXPERTS,
    },
    "granitemoe": {
        "family": "GraniteMoe",
        "initializer_range": 0.2,
        **GRANITE,
        "intermediate_size": 48,
        **SOME_EXPERTS,
        "tied": True,
    },
    "glm4-moe": {"family": "Glm4Moe", **ROUTED, "attention_bias": True, "use_qk_norm": True},
    "glm4-moe-plain": {"family": "Glm4Moe", **ROUTED, "norm_topk_prob": False, "n_group": 1, "topk_group": 1},
    "dots1": {
        "family": "Dots1",
        **ROUTED,
        "norm_topk_prob": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
        "sliding_window": 5,
        "max_window_layers": 2,
        "attention_bias": True,
        "initializer_range": 0.2,
    },
    "exaone-moe": {
        "family": "ExaoneMoe",
        **ALTERNATING,
        **EXPERTS,
        "num_shared_experts": 2,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "initializer_range": 0.2,
    },
    "ernie4.5-moe": {"family": "Ernie4_5_Moe", **ERNIE},
    "ernie4.5-moe-mixed": {
        "family": "Ernie4_5_Moe",
        **ERNIE,
        "num_hidden_layers": 4,
        "moe_num_shared_experts": 0,
        "moe_layer_start_index": 0,
        "moe_layer_end_index": 2,
        "moe_layer_interval": 2,
        "tied": True,
    },
    "minimax-m2": {
        "family": "MiniMaxM2",
        "kv_heads": 4,
        "intermediate_size": 48,
        **SOME_EXPERTS,
        "rope_parameters": HALF_ROTATED,
    },
    "gpt-oss": {"family": "GptOss", "initializer_range": 0.2, **CLAMPED, **ALTERNATING, "rope_parameters": YARN},
    "deepseek-v2-lite": {"family": "DeepseekV2", **LATENT, "q_lora_rank": None, "rope_parameters": YARN_MSCALE},
    "deepseek-v2": {
        "family": "DeepseekV2",
        **LATENT,
        "q_lora_rank": 24,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 3.0,
    },
    "deepseek-v3": {
        "family": "DeepseekV3",
        **LATENT,
        "q_lora_rank": 24,
        "n_group": 4,
        "topk_group": 2,
        "rope_parameters": YARN_MSCALE,
    },
    "vaultgemma": {
        "family": "VaultGemma",
        **ALTERNATING,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 2.0,
        "tied": True,
    },
    "youtu": {
        "family": "Youtu",
        **{key: value for key, value in LATENT.items() if not key.startswith(("n_", "num_", "moe_", "first_"))},
        "q_lora_rank": 24,
        "rope_parameters": YARN_MSCALE,
        "tied": True,
    },
    "glm4-moe-lite": {
        "family": "Glm4MoeLite",
        **{key: value for key, value in LATENT.items() if key != "first_k_dense_replace"},
        "q_lora_rank": 24,
        "routed_scaling_factor": 2.5,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
    },
    "gemma": {"family": "Gemma", "tied": True},
    "glm": {"family": "Glm", "rope_parameters": HALF_ROTATED, "initializer_range": 0.2},
    "helium": {"family": "Helium", "hidden_size": 128, "attention_bias": True, "kv_heads": 4},
    "cwm": {"family": "Cwm", "bos_token_id": 1, "sliding_window": 5, "rope_parameters": LLAMA3},
    "ministral": {"family": "Ministral", **ALTERNATING},
    "hyperclovax": {
        "family": "HyperCLOVAX",
        "initializer_range": 0.2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.22,
        "logits_scaling": 4.0,
    },
    "flex-olmo": {"family": "FlexOlmo", "hidden_size": 128, "kv_heads": 4, "intermediate_size": 48, **FEW_EXPERTS},
    "solar-open": {
        "family": "SolarOpen",
        **{key: value for key, value in ROUTED.items() if key not in ("first_k_dense_replace", "rope_parameters")},
        "attention_bias": True,
        "initializer_range": 0.2,
    },
    "arcee": {"family": "Arcee", "rope_parameters": YARN},
    "apertus": {"family": "Apertus", "initializer_range": 0.2, "rope_parameters": LLAMA3},
    "hunyuan": {
        "family": "HunYuanDenseV1",
        "attention_bias": True,
        "initializer_range": 0.2,
        "rope_parameters": NTK_ALPHA,
    },
    "hunyuan-plain": {"family": "HunYuanDenseV1", "kv_heads": 4, "tied": True},
    "hunyuan-moe": {
        "family": "HunYuanMoEV1",
        "initializer_range": 0.2,
        "intermediate_size": 48,
        "num_experts": 8,
        "moe_topk": [3] * 3,
        "rope_parameters": NTK_ALPHA,
    },
    "gemma3": {"family": "Gemma3Text", **ALTERNATING, "query_pre_attn_scalar": 24, "rope_parameters": ROPE_OF_TYPES},
    "qwen3-next": {"family": "Qwen3Next", **SHARED, **DELTA_NETS, "kv_heads": 2},
    "qwen3.5": {"family": "Qwen3_5Text", **DELTA_NETS, "initializer_range": 0.2},
    "qwen3.5-moe": {"family": "Qwen3_5MoeText", **SHARED, **DELTA_NETS, "kv_heads": 2, "initializer_range": 0.15},
    "qwen3-next-mixed": {"family": "Qwen3Next", **SHARED_SPARSE_NEXT, "layer_types": None, "num_hidden_layers": 4},
}
"""Name -> arguments of make_checkpoint: what differs between families, once each."""


def prompt(batch, length, seed=0):
    return torch.randint(257, (batch, length), generator=torch.Generator().manual_seed(seed))


# Differences between a router's logits of two experts.
GAPS = torch.arange(0, 3, 0.005)


def router_gaps(model, tokens, last=False):
    """[batch, length]: the greatest of GAPS that changes no choice of experts in any layer; ``last``: of last tokens alone.

    The logits of a token's chosen experts are lowered by half of a gap, those of the rest raised by it.
    """
    (batch, length), routed = tokens.shape, []

    def keep(router, given, output):
        logits, _, ids = (part.unflatten(0, (batch, length))[:, -1 if last else 0 :].flatten(0, 1) for part in output)
        routed.append((router, given[1:], logits.float(), ids))

    recorded = model.model._can_record_outputs
    if "router_logits" not in recorded:
        pytest.skip(
            f"transformers {importlib.metadata.version('transformers')} does not name this family's router; 5.24 does"
        )
    kind = recorded["router_logits"].target_class
    hooks = [part.register_forward_hook(keep) for part in model.modules() if isinstance(part, kind)]
    with torch.no_grad():
        model(tokens)
    for hook in hooks:
        hook.remove()
    return torch.stack([least_gaps(*one) for one in routed]).amin(0).view(batch, -1)


def least_gaps(router, given, logits, ids):
    """`router_gaps` [tokens] of one router, by its logits [tokens, experts] and chosen ids. given: its further arguments."""
    by_logits = copy.deepcopy(router)
    by_logits.hidden_dim = logits.shape[1]
    for part in by_logits.parameters():
        part.data = torch.eye(logits.shape[1]) if part.dim() == 2 else torch.zeros_like(part)
    chosen = torch.zeros(logits.shape, dtype=torch.bool).scatter(1, ids, True)
    moved = logits + GAPS[:, None, None] * torch.where(chosen, -0.5, 0.5)
    again = by_logits(moved.flatten(0, 1), *given)[2].view(-1, *ids.shape)
    stays = (again.sort(-1).values == ids.sort(-1).values).all(-1).int().cumprod(0).sum(0)
    return GAPS[stays.clamp(min=1) - 1]


def prompt_without_ties(model, batch, length, candidates=64):
    """Tokens [batch, length] for which no router is near a tie: each the candidate with the greatest gap, given those before.

    Routing is a step function: where two experts are nearly equal, rounding in another order chooses another one, and the
    logits differ by more than rounding. Scaled router weights would not help, since the noise grows with them.
    """
    tokens = prompt(batch, length)
    for at in range(length):
        tried = tokens[:, None, : at + 1].repeat(1, candidates, 1)
        tried[:, :, at] = prompt(1, candidates, seed=at)[0]
        gaps = router_gaps(model, tried.flatten(0, 1), last=True).view(batch, candidates)
        tokens[:, at] = tried[torch.arange(batch), gaps.argmax(1), at]
    return tokens


def relative_rms(found, expected):
    return ((found.float() - expected).square().mean() / expected.square().mean()).sqrt().item()


def reference_logits(model, tokens):
    with torch.no_grad():
        return model(tokens).logits


def reference_greedy(model, tokens, steps):
    with torch.no_grad():
        return model.generate(tokens, do_sample=False, max_new_tokens=steps, use_cache=True)[:, tokens.shape[1] :]


def greedy(model, prompts, steps):
    """[steps, batch] greedy tokens of our model, by prefill and then decode."""
    runner = Runner(model, EngineConfig(max_batch=len(prompts), page_size=16, max_seq_len=128))
    params = SamplingParams()
    pages = [list(range(1 + 8 * slot, 9 + 8 * slot)) for slot in range(len(prompts))]
    runner.prefill(
        [
            PrefillChunk(slot=slot, tokens=prompt, before=0, pages=pages[slot], params=params, choose=True)
            for slot, prompt in enumerate(prompts)
        ]
    )
    tokens = [runner.decoding.tokens.clone()]
    for step in range(steps - 1):
        runner.slots.send(
            {
                slot: SlotState(position=len(prompt) + step, pages=pages[slot], params=params)
                for slot, prompt in enumerate(prompts)
            }
        )
        runner.decode(len(prompts))
        tokens.append(runner.decoding.tokens.clone())
    return torch.stack(tokens)


def check_logits_and_tokens(team, directory, mode, tokens, steps, fused=False):
    model = Decoder.from_pretrained(directory, team, mode=mode, fused=fused)
    return all_logits(model, tokens), greedy(model, tokens.tolist(), steps) if steps else None


def check_engine(made, world_size, options):
    """Greedy answers of an engine with fewer slots than prompts, which it reads in chunks."""
    directory, reference = made
    tokens = prompt(3, 9)

    def answers(team):
        engine = Engine(directory, team, max_batch=2, page_size=16, chunk_tokens=5, max_seq_len=64, **options)
        return [one.token_ids for one in engine.generate(tokens.tolist(), max_tokens=12, ignore_eos=True)]

    expected = reference_greedy(reference, tokens, 12).tolist()
    assert weft.simulate(answers, world_size) == [expected] * world_size
