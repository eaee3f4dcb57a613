"""Keys and values of config.json as published, by the model's name, as quoted in public repositories."""

QWEN = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
    "hidden_act": "silu", "initializer_range": 0.02, "model_type": "qwen2", "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN_05 = QWEN | {
    "hidden_size": 896, "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 24,
    "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "tie_word_embeddings": True,
    "use_mrope": False,
}  # fmt: skip
QWEN_15 = QWEN | {
    "hidden_size": 1536, "intermediate_size": 8960, "max_position_embeddings": 131072, "max_window_layers": 28,
    "num_attention_heads": 12, "num_hidden_layers": 28, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
QWEN_7 = QWEN | {
    "hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 131072, "max_window_layers": 28,
    "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "tie_word_embeddings": False,
    "vocab_size": 152064,
}  # fmt: skip
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "initializer_range": 0.02, "max_position_embeddings": 40960,
    "model_type": "qwen3", "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
    "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
    "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN3_06 = QWEN3 | {
    "hidden_size": 1024, "intermediate_size": 3072, "max_window_layers": 28, "num_attention_heads": 16, "num_hidden_layers": 28,
    "tie_word_embeddings": True,
}  # fmt: skip
QWEN3_32 = QWEN3 | {
    "hidden_size": 5120, "intermediate_size": 25600, "max_window_layers": 64, "num_attention_heads": 64,
    "num_hidden_layers": 64,
}  # fmt: skip
QWEN3_MOE = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 1, "mlp_only_layers": [], "model_type": "qwen3_moe",
    "norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8, "num_key_value_heads": 4,
    "output_router_logits": False, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
}  # fmt: skip
QWEN3_30_A3 = QWEN3_MOE | {
    "hidden_size": 2048, "intermediate_size": 6144, "max_window_layers": 48, "moe_intermediate_size": 768,
    "num_attention_heads": 32, "num_hidden_layers": 48,
}  # fmt: skip
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu",
    "initializer_range": 0.02, "model_type": "llama", "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
}  # fmt: skip
LLAMA_3 = LLAMA | {
    "bos_token_id": 128000, "eos_token_id": 128001, "mlp_bias": False, "num_key_value_heads": 8, "rope_theta": 500000.0,
    "vocab_size": 128256, "max_position_embeddings": 131072,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}  # fmt: skip
LLAMA_8 = LLAMA_3 | {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32,
    "transformers_version": "4.43.0.dev0",
}  # fmt: skip
LLAMA_70 = LLAMA_3 | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80,
    "transformers_version": "4.43.0.dev0",
}  # fmt: skip
INSTRUCT = {"eos_token_id": [128001, 128008, 128009], "transformers_version": "4.42.3"}
SMOL = LLAMA | {
    "initializer_range": 0.041666666666666664, "is_llama_config": True, "mlp_bias": False, "rope_interleaved": False,
    "tie_word_embeddings": True, "vocab_size": 49152,
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
}  # fmt: skip
SMOL_135 = SMOL | {
    "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
    "rope_theta": 100000,
}  # fmt: skip
SMOL_360 = SMOL | {
    "bos_token_id": 0, "eos_token_id": 0, "hidden_size": 960, "intermediate_size": 2560, "max_position_embeddings": 8192,
    "num_attention_heads": 15, "num_hidden_layers": 32, "num_key_value_heads": 5, "rope_theta": 100000,
}  # fmt: skip
TINY = LLAMA | {
    "bos_token_id": 1, "eos_token_id": 2, "head_dim": 64, "hidden_size": 2048, "intermediate_size": 5632,
    "max_position_embeddings": 2048, "mlp_bias": False, "num_attention_heads": 32, "num_hidden_layers": 22,
    "num_key_value_heads": 4, "rope_theta": 10000.0, "vocab_size": 32000,
}  # fmt: skip
MISTRAL = {
    "architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "initializer_range": 0.02, "model_type": "mistral", "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
}  # fmt: skip
MIXTRAL = MISTRAL | {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_experts_per_tok": 2, "num_local_experts": 8,
    "output_router_logits": False, "rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 32000,
}  # fmt: skip
# As transformers before 4.40 wrote all keys of a configuration that nobody had set.
ALL_KEYS = {
    "return_dict": True, "output_hidden_states": False, "output_attentions": False, "torchscript": False, "use_bfloat16": False,
    "tf_legacy_loss": False, "pruned_heads": {}, "chunk_size_feed_forward": 0, "is_encoder_decoder": False, "is_decoder": False,
    "cross_attention_hidden_size": None, "add_cross_attention": False, "tie_encoder_decoder": False, "max_length": 20,
    "min_length": 0, "do_sample": False, "early_stopping": False, "num_beams": 1, "num_beam_groups": 1, "top_k": 50,
    "diversity_penalty": 0.0, "temperature": 1.0, "top_p": 1.0, "typical_p": 1.0, "repetition_penalty": 1.0,
    "length_penalty": 1.0, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "bad_words_ids": None,
    "num_return_sequences": 1, "output_scores": False, "return_dict_in_generate": False, "forced_bos_token_id": None,
    "forced_eos_token_id": None, "remove_invalid_values": False, "exponential_decay_length_penalty": None,
    "suppress_tokens": None, "begin_suppress_tokens": None, "finetuning_task": None,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "label2id": {"LABEL_0": 0, "LABEL_1": 1}, "tokenizer_class": None,
    "prefix": None, "pad_token_id": None, "sep_token_id": None, "decoder_start_token_id": None, "task_specific_params": None,
    "problem_type": None,
}  # fmt: skip
PHI = {
    "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "embd_pdrop": 0.0,
    "hidden_act": "silu", "initializer_range": 0.02, "model_type": "phi3", "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
    "rope_scaling": None, "tie_word_embeddings": False, "use_cache": True,
}  # fmt: skip
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "initializer_range": 0.02, "intermediate_size": 2880, "max_position_embeddings": 131072, "model_type": "gpt_oss",
    "num_attention_heads": 64, "num_experts_per_tok": 4, "num_key_value_heads": 8, "output_router_logits": False,
    "pad_token_id": 199999, "rms_norm_eps": 1e-05, "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128,
    "swiglu_limit": 7.0, "tie_word_embeddings": False, "transformers_version": "4.55.0.dev0", "use_cache": True,
    "vocab_size": 201088,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096, "rope_type": "yarn",
        "truncate": False,
    },
}  # fmt: skip
COMMON = {
    "attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02, "torch_dtype": "bfloat16", "use_cache": True,
}  # fmt: skip
GLM_45_AIR = COMMON | {
    "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "pad_token_id": 151329,
    "eos_token_id": [151329, 151336, 151338], "head_dim": 128, "hidden_size": 4096, "partial_rotary_factor": 0.5,
    "intermediate_size": 10944, "max_position_embeddings": 131072, "model_type": "glm4_moe", "moe_intermediate_size": 1408,
    "norm_topk_prob": True, "num_attention_heads": 96, "n_group": 1, "topk_group": 1, "n_routed_experts": 128,
    "n_shared_experts": 1, "routed_scaling_factor": 1.0, "num_experts_per_tok": 8, "first_k_dense_replace": 1,
    "num_hidden_layers": 46, "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": None, "rope_theta": 1000000, "tie_word_embeddings": False, "transformers_version": "4.54.0",
    "use_qk_norm": False, "vocab_size": 151552,
}  # fmt: skip
DEEPSEEK_V3 = COMMON | {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1,
    "first_k_dense_replace": 3, "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512,
    "max_position_embeddings": 163840, "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1,
    "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000,
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 4,
    "topk_method": "noaux_tc", "transformers_version": "4.33.1", "v_head_dim": 128, "vocab_size": 129280,
    "aux_loss_alpha": 0.001, "pretraining_tp": 1, "seq_aux": True,
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config", "AutoModel": "modeling_deepseek.DeepseekV3Model",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    },
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
    },
}  # fmt: skip
KIMI_K2 = DEEPSEEK_V3 | {
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "bos_token_id": 163584, "eos_token_id": 163585,
    "first_k_dense_replace": 1, "max_position_embeddings": 131072, "model_type": "kimi_k2", "n_group": 1,
    "n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64, "num_nextn_predict_layers": 0,
    "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "topk_group": 1, "transformers_version": "4.48.3",
    "vocab_size": 163840, "unk_token_id": 163838,
    "rope_scaling": {
        "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
}  # fmt: skip
MISTRAL_SMALL = COMMON | {
    "head_dim": 128, "hidden_size": 5120, "intermediate_size": 32768, "max_position_embeddings": 32768,
    "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_theta": 100000000.0, "sliding_window": None, "vocab_size": 131072,
    "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
    "transformers_version": "4.49.0.dev0",
}  # fmt: skip
MINISTRAL_3 = {
    "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 262144, "model_type": "ministral3", "num_attention_heads": 32,
    "num_hidden_layers": 34, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "sliding_window": None, "use_cache": True,
    "vocab_size": 131072,
    "rope_parameters": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
        "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384, "rope_theta": 1000000.0, "rope_type": "yarn",
        "type": "yarn",
    },
}  # fmt: skip
QWEN3_VL_TEXT = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643, "dtype": "bfloat16", "eos_token_id": 151645,
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 12288,
    "max_position_embeddings": 262144, "model_type": "qwen3_vl_text", "num_attention_heads": 32, "num_hidden_layers": 36,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
    "rope_theta": 5000000, "use_cache": True, "vocab_size": 151936,
}  # fmt: skip

CONFIGS = {
    "Qwen2.5-0.5B": QWEN_05 | {"sliding_window": 32768, "transformers_version": "4.40.1"},
    "Qwen2.5-1.5B": QWEN_15 | {"sliding_window": 131072, "transformers_version": "4.40.1", "use_mrope": False},
    "Qwen2.5-7B": QWEN_7 | {
        "pad_token_id": 151643, "rope_scaling": None, "sliding_window": None, "transformers_version": "4.48.3",
        "use_mrope": False,
    },
    "Qwen2-7B-Instruct": QWEN_7 | {
        "eos_token_id": 151645, "max_position_embeddings": 32768, "sliding_window": 131072, "transformers_version": "4.41.2",
    },
    "Qwen2.5-32B-Instruct": QWEN | {
        "eos_token_id": 151645, "hidden_size": 5120, "intermediate_size": 27648, "max_position_embeddings": 131072,
        "max_window_layers": 70, "num_attention_heads": 40, "num_hidden_layers": 64, "num_key_value_heads": 8,
        "sliding_window": 131072, "tie_word_embeddings": False, "transformers_version": "4.43.1", "vocab_size": 152064,
    },
    "Qwen2.5-7B-Instruct, saved by transformers 4.56": QWEN_7 | {
        "dtype": "bfloat16", "eos_token_id": 151645, "layer_types": ["full_attention"] * 28, "max_position_embeddings": 32768,
        "pad_token_id": 151643, "rope_scaling": None, "sliding_window": None, "transformers_version": "4.56.1",
    },
    "Qwen2.5-1.5B-Instruct, saved by transformers 5.1": {
        key: value for key, value in QWEN_15.items() if key != "rope_theta"
    } | {
        "dtype": "float16", "torch_dtype": None, "eos_token_id": 151645, "layer_types": ["full_attention"] * 28,
        "max_position_embeddings": 32768, "max_window_layers": 21, "pad_token_id": None, "sliding_window": None,
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"}, "transformers_version": "5.1.0",
    },
    "Qwen2.5-0.5B, merged by transformers 5.13": {key: value for key, value in QWEN_05.items() if key != "rope_theta"} | {
        "dtype": "float32", "torch_dtype": None, "layer_types": ["full_attention"] * 24, "pad_token_id": None,
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"}, "sliding_window": None,
        "transformers_version": "5.13.1",
    },
    "DeepSeek-R1-Distill-Qwen-1.5B": QWEN_15 | {
        "bos_token_id": 151646, "max_window_layers": 21, "rope_theta": 10000, "sliding_window": 4096,
        "tie_word_embeddings": False, "transformers_version": "4.44.0", "use_mrope": False,
    },
    "Qwen1.5-MoE-A2.7B-Chat": QWEN | {
        "architectures": ["Qwen2MoeForCausalLM"], "decoder_sparse_step": 1, "eos_token_id": 151645, "hidden_size": 2048,
        "intermediate_size": 5632, "max_position_embeddings": 32768, "max_window_layers": 21, "model_type": "qwen2_moe",
        "moe_intermediate_size": 1408, "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 60,
        "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 16, "output_router_logits": False,
        "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 5632, "sliding_window": 32768,
        "tie_word_embeddings": False,
    },
    "Qwen3-0.6B": QWEN3_06,
    "Qwen3-Embedding-0.6B": QWEN3_06 | {
        "eos_token_id": 151643, "max_position_embeddings": 32768, "transformers_version": "4.51.3", "vocab_size": 151669,
    },
    "Qwen3-0.6B, trained on by transformers 4.54": QWEN3_06 | {
        "layer_types": ["full_attention"] * 28, "torch_dtype": "float32", "transformers_version": "4.54.0", "use_cache": False,
    },
    "Qwen3-1.7B": QWEN3_06 | {"hidden_size": 2048, "intermediate_size": 6144},
    "Qwen3-4B, merged by transformers 5.2": {key: value for key, value in QWEN3.items() if key != "rope_theta"} | {
        "dtype": "float16", "torch_dtype": None, "hidden_size": 2560, "intermediate_size": 9728,
        "layer_types": ["full_attention"] * 36, "max_window_layers": 36, "num_attention_heads": 32, "num_hidden_layers": 36,
        "pad_token_id": None, "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, "tie_word_embeddings": True,
        "transformers_version": "5.2.0",
    },
    "Qwen3-8B": QWEN3 | {
        "hidden_size": 4096, "intermediate_size": 12288, "max_window_layers": 36, "num_attention_heads": 32,
        "num_hidden_layers": 36,
    },
    "Qwen3-32B": QWEN3_32,
    "Qwen3-32B-FP8": QWEN3_32 | {"quantization_config": BLOCKS},
    "Qwen3-32B-FP8-Static-PerTensor": QWEN3_32 | {
        "quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}, "transformers_version": "4.51.3",
    },
    "Qwen3-30B-A3B": QWEN3_30_A3,
    "Qwen3-30B-A3B-FP8": QWEN3_30_A3 | {"quantization_config": BLOCKS},
    "Qwen3-30B-A3B-Instruct-2507": QWEN3_30_A3 | {"max_position_embeddings": 262144, "rope_theta": 10000000},
    "Qwen3-235B-A22B": QWEN3_MOE | {
        "hidden_size": 4096, "intermediate_size": 12288, "max_window_layers": 94, "moe_intermediate_size": 1536,
        "num_attention_heads": 64, "num_hidden_layers": 94,
    },
    "Qwen3-Coder-480B-A35B-Instruct": {
        key: value for key, value in QWEN3_MOE.items() if key not in ("attention_bias", "bos_token_id")
    } | {
        "hidden_size": 6144, "intermediate_size": 8192, "max_position_embeddings": 262144, "max_window_layers": 62,
        "moe_intermediate_size": 2560, "num_attention_heads": 96, "num_experts": 160, "num_hidden_layers": 62,
        "num_key_value_heads": 8, "qkv_bias": False, "rope_theta": 10000000, "router_aux_loss_coef": 0.0,
        "shared_expert_intermediate_size": 0, "use_qk_norm": True,
    },
    "Llama-3.1-8B": LLAMA_8,
    "Llama-3.1-8B-Instruct": LLAMA_8 | INSTRUCT,
    "Llama-3.1-70B": LLAMA_70,
    "Llama-3.1-70B-Instruct": LLAMA_70 | INSTRUCT,
    "nvidia/Llama-3.1-70B-Instruct-FP8": LLAMA_70 | INSTRUCT | {
        "_name_or_path": "Llama-3.1-70B-Instruct", "transformers_version": "4.44.0",
    },
    "Llama-3.1-405B": LLAMA_3 | {
        "hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128, "num_hidden_layers": 126,
        "transformers_version": "4.42.3",
    },
    "Llama-3.2-1B-Instruct": LLAMA_3 | {
        "_commit_hash": "4e20de36", "_name_or_path": "meta-llama/Llama-3.2-1B-Instruct", "head_dim": 64, "hidden_size": 2048,
        "intermediate_size": 8192, "num_attention_heads": 32, "num_hidden_layers": 16,
        "rope_scaling": LLAMA_3["rope_scaling"] | {"factor": 32.0}, "tie_word_embeddings": True,
    },
    "Llama-3.2-3B-Instruct": LLAMA_3 | INSTRUCT | {
        "head_dim": 128, "hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 24, "num_hidden_layers": 28,
        "rope_scaling": LLAMA_3["rope_scaling"] | {"factor": 32.0}, "tie_word_embeddings": True,
    },
    "Meta-Llama-3-8B-Instruct": LLAMA | {
        "_name_or_path": "meta-llama/Meta-Llama-3-8B-Instruct", "bos_token_id": 128000, "eos_token_id": 128009,
        "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 8192, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "rope_theta": 500000.0, "transformers_version": "4.40.0.dev0",
        "vocab_size": 128256,
    },
    "TinyLlama-1.1B-Chat-v1.0": TINY | {"dtype": "float32", "torch_dtype": None, "transformers_version": "4.56.0"},
    "vicuna-7b-v1.3, trained on by transformers 4.30": {
        "_name_or_path": "lmsys/vicuna-7b-v1.3", "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008,
        "max_position_embeddings": 2048, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
        "pad_token_id": 0, "rms_norm_eps": 1e-06, "tie_word_embeddings": False, "torch_dtype": "float16",
        "transformers_version": "4.30.2", "use_cache": True, "vocab_size": 32000,
    },
    "ALLaM-7B-Instruct-preview": LLAMA | {
        "bos_token_id": 1, "eos_token_id": 2, "head_dim": 128, "hidden_size": 4096, "initializer_range": 0.006,
        "intermediate_size": 11008, "internal_version": "7b-alpha-v2.33.0.30", "max_position_embeddings": 4096,
        "mlp_bias": False, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
        "rope_theta": 1000000.0, "transformers_version": "4.53.0", "vocab_size": 64000,
    },
    "SmolLM2-135M": SMOL_135 | {
        "_name_or_path": "HuggingFaceTB/SmolLM2-135M", "bos_token_id": 0, "eos_token_id": 0, "head_dim": 64,
        "max_position_embeddings": 2048, "transformers_version": "4.48.0",
    },
    "SmolLM2-135M-Instruct": SMOL_135 | {
        "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 8192, "pad_token_id": 2,
        "transformers_version": "4.42.3",
    },
    "SmolLM2-360M": SMOL_360,
    "SmolLM2-360M, trained on by transformers 4.53": SMOL_360 | {
        "head_dim": 64, "initializer_range": 0.02, "torch_dtype": "float32", "transformers_version": "4.53.3",
        "vocab_size": 49153,
    },
    "SmolLM2-1.7B-Instruct": LLAMA | {
        "bos_token_id": 1, "eos_token_id": 2, "hidden_size": 2048, "intermediate_size": 8192, "max_position_embeddings": 8192,
        "mlp_bias": False, "num_attention_heads": 32, "num_hidden_layers": 24, "num_key_value_heads": 32, "pad_token_id": 2,
        "rope_theta": 130000, "tie_word_embeddings": True, "transformers_version": "4.42.3", "vocab_size": 49152,
    },
    "Falcon3-1B-Base": LLAMA | {
        "activation": "swiglu", "eos_token_id": 11, "head_dim": 256, "hidden_size": 2048, "intermediate_size": 8192,
        "max_position_embeddings": 8192, "mlp_bias": False, "num_attention_heads": 8, "num_hidden_layers": 18,
        "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000042, "transformers_version": "4.46.1",
        "vocab_size": 131072,
    },
    "Mistral-7B-Instruct-v0.3": MISTRAL | ALL_KEYS | {
        "_name_or_path": "mistralai/Mistral-7B-Instruct-v0.3", "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 32, "rope_theta": 1000000.0,
        "sliding_window": None, "transformers_version": "4.38.0", "vocab_size": 32768,
    },
    "Mistral-Nemo-Base-2407": MISTRAL | {
        "_name_or_path": "mistralai/Mistral-Nemo-Base-2407", "head_dim": 128, "hidden_size": 5120, "intermediate_size": 14336,
        "max_position_embeddings": 128000, "num_attention_heads": 32, "num_hidden_layers": 40, "rope_theta": 1000000.0,
        "sliding_window": None, "transformers_version": "4.43.3", "vocab_size": 131072,
    },
    "Mixtral-8x7B-v0.1": MIXTRAL | {
        "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32,
        "num_hidden_layers": 32, "router_aux_loss_coef": 0.02, "transformers_version": "4.36.0.dev0",
    },
    "Mixtral-8x22B-v0.1": MIXTRAL | {
        "hidden_size": 6144, "intermediate_size": 16384, "max_position_embeddings": 65536, "num_attention_heads": 48,
        "num_hidden_layers": 56, "rope_theta": 1000000, "router_aux_loss_coef": 0.001, "transformers_version": "4.38.0",
    },
    "phi-4": PHI | {
        "bos_token_id": 100257, "eos_token_id": 100265, "hidden_size": 5120, "intermediate_size": 17920,
        "max_position_embeddings": 16384, "num_attention_heads": 40, "num_hidden_layers": 40, "num_key_value_heads": 10,
        "original_max_position_embeddings": 16384, "pad_token_id": 100349, "rope_theta": 250000.0, "sliding_window": None,
        "torch_dtype": "bfloat16", "transformers_version": "4.47.0", "vocab_size": 100352,
    },
    "Phi-3-mini-4k-instruct, merged by transformers 4.57": PHI | {
        "auto_map": {
            "AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
        },
        "bos_token_id": 1, "dtype": "float16", "eos_token_id": 32000, "hidden_size": 3072, "intermediate_size": 8192,
        "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
        "original_max_position_embeddings": 4096, "pad_token_id": 32000, "rope_theta": 10000.0, "sliding_window": 2047,
        "transformers_version": "4.57.2", "vocab_size": 32064,
    },
    "Olmo-3.1-32B-Instruct": {
        "architectures": ["Olmo3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "dtype": "bfloat16",
        "eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02,
        "intermediate_size": 27648, "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 16,
        "max_position_embeddings": 65536,
        "model_type": "olmo3", "num_attention_heads": 40, "num_hidden_layers": 64, "num_key_value_heads": 8,
        "pad_token_id": 100277, "rms_norm_eps": 1e-06, "rope_theta": 500000, "sliding_window": 4096,
        "tie_word_embeddings": False, "transformers_version": "4.57.1", "use_cache": False, "vocab_size": 100278,
        "rope_scaling": {
            "attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1, "factor": 8.0,
            "original_max_position_embeddings": 8192, "rope_type": "yarn",
        },
    },
    "gemma-2-9b-it": {
        "_name_or_path": "google/gemma-2-9b-it", "architectures": ["Gemma2ForCausalLM"], "attention_bias": False,
        "attention_dropout": 0.0, "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid",
        "eos_token_id": 1, "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 3584, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 16, "num_hidden_layers": 42,
        "num_key_value_heads": 8, "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0, "sliding_window": 4096, "sliding_window_size": 4096, "torch_dtype": "bfloat16",
        "transformers_version": "4.42.0.dev0", "use_cache": True, "vocab_size": 256000,
    },
    "gpt-oss-20b": GPT_OSS | {
        "layer_types": ["sliding_attention", "full_attention"] * 12, "num_hidden_layers": 24, "num_local_experts": 32,
    },
    "gpt-oss-120b": GPT_OSS | {
        "layer_types": ["sliding_attention", "full_attention"] * 18, "num_hidden_layers": 36, "num_local_experts": 128,
    },
    "GLM-4.5-Air": GLM_45_AIR,
    "GLM-4.6": GLM_45_AIR | {
        "hidden_size": 5120, "intermediate_size": 12288, "max_position_embeddings": 202752, "moe_intermediate_size": 1536,
        "n_routed_experts": 160, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3, "num_hidden_layers": 92,
        "use_qk_norm": True, "dtype": "bfloat16",
    },
    "GLM-4.7-Flash": COMMON | {
        "architectures": ["Glm4MoeLiteForCausalLM"], "attention_bias": False, "pad_token_id": 154820,
        "eos_token_id": [154820, 154827, 154829], "hidden_size": 2048, "intermediate_size": 10240,
        "max_position_embeddings": 202752, "model_type": "glm4_moe_lite", "moe_intermediate_size": 1536,
        "topk_method": "noaux_tc", "norm_topk_prob": True, "num_attention_heads": 20, "n_group": 1, "topk_group": 1,
        "n_routed_experts": 64, "n_shared_experts": 1, "routed_scaling_factor": 1.8, "num_experts_per_tok": 4,
        "first_k_dense_replace": 1, "num_hidden_layers": 47, "num_key_value_heads": 20, "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000,
        "tie_word_embeddings": False, "dtype": "bfloat16", "transformers_version": "5.0.0rc0", "q_lora_rank": 768,
        "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "vocab_size": 154880,
    },
    "DeepSeek-V3-0324": DEEPSEEK_V3,
    "Kimi-K2-Instruct": KIMI_K2,
    "Kimi-K2-Thinking": KIMI_K2 | {
        "max_position_embeddings": 262144,
        "quantization_config": {
            "format": "pack-quantized", "global_compression_ratio": None,
            "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*", "lm_head"],
            "kv_cache_scheme": None, "quant_method": "compressed-tensors", "quantization_status": "compressed",
            "config_groups": {
                "group_0": {
                    "input_activations": None, "output_activations": None, "targets": ["Linear"],
                    "weights": {
                        "actorder": None, "block_structure": None, "dynamic": False, "group_size": 32, "num_bits": 4,
                        "observer": "minmax", "observer_kwargs": {}, "strategy": "group", "symmetric": True, "type": "int",
                    },
                },
            },
        },
        "rope_scaling": {
            "beta_fast": 1.0, "beta_slow": 1.0, "factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
    },
    "gemma-3-1b-it": {
        "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "attn_logit_softcapping": None, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": [1, 106],
        "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152,
        "initializer_range": 0.02, "intermediate_size": 6912, "max_position_embeddings": 32768, "model_type": "gemma3_text",
        "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1, "pad_token_id": 0,
        "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": None,
        "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6, "torch_dtype": "bfloat16",
        "transformers_version": "4.50.0.dev0", "use_cache": True, "vocab_size": 262144,
    },
    "gemma-3-270m": {
        "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "attn_logit_softcapping": None, "bos_token_id": 2, "eos_token_id": [1, 106], "final_logit_softcapping": None,
        "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 640, "initializer_range": 0.02,
        "intermediate_size": 2048, "max_position_embeddings": 32768, "model_type": "gemma3_text", "num_attention_heads": 4,
        "num_hidden_layers": 18, "num_key_value_heads": 1, "pad_token_id": 0, "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000.0,
        "sliding_window": 512, "torch_dtype": "bfloat16", "transformers_version": "4.55.0.dev0", "use_cache": True,
        "vocab_size": 262144, "_sliding_window_pattern": 6, "use_bidirectional_attention": False,
        "layer_types": [
            "sliding_attention", "sliding_attention", "sliding_attention", "sliding_attention", "sliding_attention",
            "full_attention", "sliding_attention", "sliding_attention", "sliding_attention", "sliding_attention",
            "sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "sliding_attention",
            "sliding_attention", "sliding_attention", "full_attention",
        ],
    },
    "Olmo-3-7B-Instruct": COMMON | {
        "architectures": ["Olmo3ForCausalLM"], "attention_bias": False, "dtype": "bfloat16", "eos_token_id": 100257,
        "hidden_size": 4096, "intermediate_size": 11008,
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 8,
        "max_position_embeddings": 65536, "model_type": "olmo3", "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 32, "pad_token_id": 100277, "rms_norm_eps": 1e-06, "rope_theta": 500000,
        "sliding_window": 4096, "tie_word_embeddings": False, "transformers_version": "4.57.0", "vocab_size": 100278,
        "rope_scaling": {
            "attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1, "factor": 8.0,
            "original_max_position_embeddings": 8192, "rope_type": "yarn",
        },
    },
    "OLMo-2-1124-7B-Instruct": COMMON | {
        "architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "eos_token_id": 100257, "hidden_size": 4096,
        "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "olmo2", "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 32, "pad_token_id": 100277, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 500000, "tie_word_embeddings": False, "transformers_version": "4.47.0.dev0",
        "use_cache": False, "vocab_size": 100352,
    },
    "OLMoE-1B-7B-0924": COMMON | {
        "architectures": ["OlmoeForCausalLM"], "attention_bias": False, "clip_qkv": None, "eos_token_id": 50279,
        "hidden_size": 2048, "intermediate_size": 1024, "max_position_embeddings": 4096, "model_type": "olmoe",
        "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8,
        "num_hidden_layers": 16, "num_key_value_heads": 16, "output_router_logits": False, "pad_token_id": 1,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0, "router_aux_loss_coef": 0.01,
        "tie_word_embeddings": False, "transformers_version": "4.43.0.dev0", "vocab_size": 50304,
    },
    "Phi-4-mini-instruct": COMMON | {
        "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "bos_token_id": 199999, "embd_pdrop": 0.0,
        "eos_token_id": 199999, "full_attn_mod": 1, "hidden_size": 3072, "intermediate_size": 8192, "interpolate_factor": 1,
        "lm_head_bias": False, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "phi3",
        "num_attention_heads": 24, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "original_max_position_embeddings": 4096, "pad_token_id": 199999, "partial_rotary_factor": 0.75, "resid_pdrop": 0.0,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {"long_factor": [1.0 + i / 10 for i in range(48)], "short_factor": [1.0] * 48, "type": "longrope"},
        "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": True, "transformers_version": "4.45.0",
        "vocab_size": 200064,
        "auto_map": {
            "AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
            "AutoTokenizer": "Xenova/gpt-4o",
        },
    },
    "granite-3.3-8b-instruct": COMMON | {
        "architectures": ["GraniteForCausalLM"], "attention_bias": False, "attention_multiplier": 0.0078125,
        "bos_token_id": 0, "embedding_multiplier": 12.0, "eos_token_id": 0, "hidden_size": 4096, "intermediate_size": 12800,
        "logits_scaling": 16.0, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "granite",
        "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "pad_token_id": 0,
        "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000000.0,
        "tie_word_embeddings": True, "transformers_version": "4.49.0", "vocab_size": 49159,
    },
    "SmolLM3-3B": COMMON | {
        "architectures": ["SmolLM3ForCausalLM"], "attention_bias": False, "eos_token_id": 128012, "hidden_size": 2048,
        "intermediate_size": 11008, "layer_types": ["full_attention"] * 36, "max_position_embeddings": 65536,
        "max_window_layers": 28, "mlp_bias": False, "model_type": "smollm3", "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0] * 9, "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 4,
        "pad_token_id": 128004, "pretraining_tp": 2, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 5000000.0,
        "sliding_window": None, "transformers_version": "4.54.0.dev0", "use_cache": False, "use_sliding_window": False,
        "vocab_size": 128256,
    },
    "Mistral-Small-24B-Instruct-2501": MISTRAL_SMALL,
    "Ministral-8B-Instruct-2410": MISTRAL_SMALL | {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "sliding_window": 32768,
        "transformers_version": "4.46.0.dev0",
    },
    "Devstral-2-123B": COMMON | {
        "head_dim": 128, "hidden_size": 12288, "intermediate_size": 28672, "max_position_embeddings": 262144,
        "model_type": "ministral3", "num_attention_heads": 96, "num_hidden_layers": 88, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "sliding_window": None, "vocab_size": 131072, "architectures": ["Ministral3ForCausalLM"],
        "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False, "dtype": "bfloat16",
        "rope_parameters": {
            "beta_fast": 4.0, "beta_slow": 1.0, "factor": 64.0, "llama_4_scaling_beta": 0.0, "mscale": 1.0,
            "mscale_all_dim": 0.0, "original_max_position_embeddings": 4096, "rope_theta": 1000000.0, "rope_type": "yarn",
            "type": "yarn",
        },
        "quantization_config": {
            "activation_scheme": "static", "dequantize": False, "modules_to_not_convert": ["lm_head"], "quant_method": "fp8",
            "weight_block_size": None,
        },
    },
    "Seed-OSS-36B-Instruct": COMMON | {
        "architectures": ["SeedOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.1,
        "attention_out_bias": False, "bos_token_id": 0, "eos_token_id": 2, "head_dim": 128, "hidden_size": 5120,
        "intermediate_size": 27648, "max_position_embeddings": 524288, "mlp_bias": False, "model_type": "seed_oss",
        "num_attention_heads": 80, "num_hidden_layers": 64, "num_key_value_heads": 8, "pad_token_id": 1,
        "residual_dropout": 0.1, "rms_norm_eps": 1e-06, "rope_scaling": {"rope_type": "default"}, "rope_theta": 10000000.0,
        "tie_word_embeddings": False, "transformers_version": "4.55.0", "vocab_size": 155136,
    },
    "Llama-3.1-Nemotron-Nano-8B-v1": COMMON | {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009], "head_dim": 128, "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0, "tie_word_embeddings": False, "transformers_version": "4.47.1", "vocab_size": 128256,
        "rope_scaling": {
            "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    },
    "Qwen3-Next-80B-A3B-Instruct": COMMON | {
        "architectures": ["Qwen3NextForCausalLM"], "attention_bias": False, "bos_token_id": 151643, "decoder_sparse_step": 1,
        "eos_token_id": 151645, "full_attention_interval": 4, "head_dim": 256, "hidden_size": 2048,
        "intermediate_size": 5120, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_value_head_dim": 128, "max_position_embeddings": 262144, "mlp_only_layers": [],
        "model_type": "qwen3_next", "moe_intermediate_size": 512, "norm_topk_prob": True, "num_attention_heads": 16,
        "num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2,
        "output_router_logits": False, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 10000000, "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False, "transformers_version": "4.57.0.dev0", "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "QwQ-32B": COMMON | {
        "architectures": ["Qwen2ForCausalLM"], "bos_token_id": 151643, "eos_token_id": 151645, "hidden_size": 5120,
        "intermediate_size": 27648, "max_position_embeddings": 40960, "max_window_layers": 64, "model_type": "qwen2",
        "num_attention_heads": 40, "num_hidden_layers": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": False, "transformers_version": "4.43.1",
        "use_sliding_window": False, "vocab_size": 152064,
    },
    "DeepSeek-V2-Lite-Chat": COMMON | {
        "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": False,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"}, "aux_loss_alpha": 0.001,
        "bos_token_id": 100000, "eos_token_id": 100001, "first_k_dense_replace": 1, "hidden_size": 2048,
        "intermediate_size": 10944, "kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v2",
        "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2,
        "norm_topk_prob": False, "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27,
        "num_key_value_heads": 16, "pretraining_tp": 1, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06, "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": True,
        "tie_word_embeddings": False, "topk_group": 1, "topk_method": "greedy", "transformers_version": "4.33.1",
        "v_head_dim": 128, "vocab_size": 102400,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
    },
    "Moonlight-16B-A3B": {key: value for key, value in DEEPSEEK_V3.items() if key != "quantization_config"} | {
        "first_k_dense_replace": 1, "hidden_size": 2048, "intermediate_size": 11264, "max_position_embeddings": 8192,
        "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2,
        "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16,
        "q_lora_rank": None, "rope_scaling": None, "rope_theta": 50000.0, "topk_group": 1, "transformers_version": "4.44.2",
        "vocab_size": 163840,
    },
    "GLM-4-9B-0414": COMMON | {
        "architectures": ["Glm4ForCausalLM"], "attention_bias": False, "eos_token_id": [151329, 151336, 151338],
        "head_dim": 128, "hidden_size": 4096, "intermediate_size": 13696, "max_position_embeddings": 32768,
        "model_type": "glm4", "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 2,
        "pad_token_id": 151329, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
        "tie_word_embeddings": False, "transformers_version": "4.52.0.dev0", "vocab_size": 151552,
    },
    "EXAONE-4.0-32B": COMMON | {
        "architectures": ["Exaone4ForCausalLM"], "attn_implementation": "flash_attention_2", "bos_token_id": 1,
        "eos_token_id": 361, "head_dim": 128, "hidden_size": 5120, "intermediate_size": 27392, "model_type": "exaone4",
        "max_position_embeddings": 131072, "num_attention_heads": 40, "num_hidden_layers": 64, "num_key_value_heads": 8,
        "pad_token_id": 0, "rms_norm_eps": 1e-05, "rope_theta": 1000000, "sliding_window": 4096, "sliding_window_pattern": 4,
        "tie_word_embeddings": False, "transformers_version": "4.54.0.dev0", "vocab_size": 102400,
        "rope_scaling": {
            "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    },
    "MiniMax-M2.5": {
        "architectures": ["MiniMaxM2ForCausalLM"], "attn_type_list": [1] * 62, "head_dim": 128, "hidden_act": "silu",
        "auto_map": {"AutoConfig": "configuration_minimax_m2.MiniMaxM2Config"}, "hidden_size": 3072, "intermediate_size": 1536,
        "max_position_embeddings": 196608, "model_type": "minimax_m2", "mtp_transformer_layers": 1, "num_attention_heads": 48,
        "num_experts_per_tok": 8, "num_hidden_layers": 62, "num_key_value_heads": 8, "num_local_experts": 256,
        "num_mtp_modules": 3, "qk_norm_type": "per_layer", "rms_norm_eps": 1e-06, "rope_theta": 5000000, "rotary_dim": 64,
        "scoring_func": "sigmoid", "shared_intermediate_size": 0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.46.1", "use_cache": True, "use_mtp": True, "use_qk_norm": True, "use_routing_bias": True,
        "vocab_size": 200064,
        "quantization_config": {
            "activation_scheme": "dynamic", "fmt": "float8_e4m3fn", "quant_method": "fp8", "weight_block_size": [128, 128],
            "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
        },
    },
    "Apertus-8B-Instruct-2509": COMMON | {
        "architectures": ["ApertusForCausalLM"], "bos_token_id": 1, "eos_token_id": 68, "hidden_act": "xielu",
        "hidden_dropout": 0.0, "hidden_size": 4096, "intermediate_size": 21504, "max_position_embeddings": 65536,
        "mlp_bias": False, "model_type": "apertus", "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "pad_token_id": 3, "post_norm": False, "qk_norm": True, "rms_norm_eps": 1e-05,
        "rope_theta": 12000000, "tie_word_embeddings": False, "vocab_size": 131072,
        "rope_scaling": {
            "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3", "type": "llama3",
        },
    },
    # Of the prompts' model of HunyuanImage 2.1, with the sizes of Hunyuan-7B-Instruct.
    "HunyuanImage-2.1-reprompt": {
        "add_classification_head": False, "architectures": ["HunYuanDenseV1ForCausalLM"], "attention_bias": False,
        "attention_dropout": 0.1, "attention_head_dim": 128, "bos_token_id": 1, "cla_share_factor": 2, "class_num": 0,
        "dense_list": [4096, 0], "eos_token_id": 127960, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
        "im_end_id": 5, "im_newline_id": 11, "im_start_id": 4, "initializer_range": 0.02, "intermediate_size": 14336,
        "mask_init_id": 12, "max_position_embeddings": 32768, "mlp_bias": False, "model_type": "hunyuan_v1_dense",
        "norm_type": "rms", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "org_vocab_size": 128167, "pad_id": 127961, "pad_token_id": 127961, "pool_type": "last", "pretraining_tp": 1,
        "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sep_token_id": 127962, "text_end_id": 7, "text_start_id": 6,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.55.0.dev0", "use_cache": False,
        "use_cla": False, "use_qk_norm": True, "use_rotary_pos_emb": True, "vocab_size": 128167,
        "rope_scaling": {
            "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "type": "dynamic",
        },
    },
    "dots.llm1.inst": COMMON | {
        "attention_bias": False, "eos_token_id": 151649, "first_k_dense_replace": 1, "hidden_size": 4096,
        "intermediate_size": 10944, "max_position_embeddings": 32768, "model_type": "dots1", "moe_intermediate_size": 1408,
        "n_routed_experts": 128, "n_shared_experts": 2, "norm_topk_prob": True, "num_attention_heads": 32,
        "num_experts_per_tok": 6, "num_hidden_layers": 62, "num_key_value_heads": 32, "rms_norm_eps": 1e-05,
        "rope_theta": 10000000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False,
        "vocab_size": 152064,
    },
    "K-EXAONE-236B-A23B": COMMON | {
        "architectures": ["ExaoneMoEForCausalLM"], "bos_token_id": 1, "eos_token_id": 53, "first_last_k_dense_replace": 1,
        "head_dim": 128, "hidden_size": 6144, "intermediate_size": 18432, "is_moe_layer": [False, *[True] * 47],
        "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 12, "max_position_embeddings": 262144,
        "model_type": "exaone_moe", "moe_intermediate_size": 2048, "n_group": 1, "norm_topk_prob": True,
        "num_attention_heads": 64, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
        "num_key_value_heads": 8, "num_shared_experts": 1, "pad_token_id": 0, "rms_norm_eps": 1e-05, "rope_scaling": None,
        "rope_theta": 1000000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "sliding_window": 128,
        "sliding_window_pattern": "LLLG", "tie_word_embeddings": False, "tokenizer_class": "GPT2Tokenizer", "topk_group": 1,
        "topk_method": "noaux_tc", "transformers_version": "5.0.0.dev0", "vocab_size": 153600,
    },
    "ERNIE-4.5-21B-A3B-PT": COMMON | {
        "architectures": ["Ernie4_5_MoeForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_size": 2560,
        "intermediate_size": 12288, "max_position_embeddings": 131072, "model_type": "ernie4_5_moe",
        "moe_intermediate_size": 1536,
        "moe_k": 6, "moe_layer_end_index": 27, "moe_layer_interval": 1, "moe_layer_start_index": 1, "moe_num_experts": 64,
        "moe_num_shared_experts": 2, "num_attention_heads": 20, "num_hidden_layers": 28, "num_key_value_heads": 4,
        "num_nextn_predict_layers": 1, "pad_token_id": 0, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
        "tie_word_embeddings": True, "use_bias": False, "vocab_size": 103424,
    },
    "ERNIE-4.5-300B-A47B-PT": COMMON | {
        "architectures": ["Ernie4_5_MoeForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_size": 8192,
        "intermediate_size": 28672, "max_position_embeddings": 131072, "model_type": "ernie4_5_moe",
        "moe_intermediate_size": 3584,
        "moe_gate": "topk_fused", "moe_k": 8, "moe_layer_end_index": 53, "moe_layer_interval": 1, "moe_layer_start_index": 3,
        "moe_num_experts": 64, "moe_num_shared_experts": 0, "num_attention_heads": 64, "num_hidden_layers": 54,
        "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "pad_token_id": 0, "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0, "tie_word_embeddings": False, "use_bias": False, "vocab_size": 103424,
    },
    "ERNIE-4.5-0.3B-PT": COMMON | {
        "architectures": ["Ernie4_5ForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "head_dim": 128, "hidden_size": 1024,
        "intermediate_size": 3072, "max_position_embeddings": 131072, "model_type": "ernie4_5", "num_attention_heads": 16,
        "num_hidden_layers": 18, "num_key_value_heads": 2, "pad_token_id": 0, "rms_norm_eps": 1e-05, "rope_scaling": None,
        "rope_theta": 500000.0, "transformers_version": "4.54.0.dev0", "use_bias": False, "vocab_size": 103424,
    },
    "Yi-1.5-9B": COMMON | {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2,
        "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "llama",
        "num_attention_heads": 32, "num_hidden_layers": 48, "num_key_value_heads": 4, "pad_token_id": 0, "pretraining_tp": 1,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 5000000.0, "tie_word_embeddings": False,
        "transformers_version": "4.40.0", "use_cache": False, "vocab_size": 64000,
    },
}  # fmt: skip
"""Name of a model, with who saved it again, → keys and values of its config.json."""

QWEN3_5 = {
    "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "dtype": "bfloat16", "eos_token_id": 248044,
    "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02,
    "intermediate_size": 17408, "layer_types": [*["linear_attention"] * 3, "full_attention"] * 16, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144, "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False, "num_attention_heads": 24, "num_hidden_layers": 64, "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06, "use_cache": True, "vocab_size": 248320,
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default", "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
    },
}  # fmt: skip
QWEN3_5_TOKENS = {
    "image_token_id": 248056, "video_token_id": 248057, "vision_end_token_id": 248054, "vision_start_token_id": 248053,
}  # fmt: skip
MULTIMODAL = {
    "Qwen3.5-27B": QWEN3_5_TOKENS | {
        "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "tie_word_embeddings": False,
        "text_config": QWEN3_5 | {"mlp_only_layers": []}, "transformers_version": "4.57.0.dev0",
    },
    "nvidia/Qwen3.6-27B-NVFP4, without its quantization": QWEN3_5_TOKENS | {
        "architectures": ["Qwen3_5ForConditionalGeneration"], "dtype": "bfloat16", "language_model_only": False,
        "model_type": "qwen3_5", "tie_word_embeddings": False, "transformers_version": "5.7.0",
        "text_config": QWEN3_5 | {
            "bos_token_id": 248044, "output_gate_type": "swish", "pad_token_id": None, "partial_rotary_factor": 0.25,
            "tie_word_embeddings": False,
        },
    },
    "SmolVLM2-500M-Video-Instruct": {
        "architectures": ["SmolVLMForConditionalGeneration"], "image_token_id": 49190, "model_type": "smolvlm",
        "pad_token_id": 128002, "scale_factor": 4, "tie_word_embeddings": False, "torch_dtype": "float32",
        "transformers_version": "4.47.1", "use_cache": False, "use_reentrant_checkpointing": False, "vocab_size": 49280,
        "text_config": {
            "architectures": ["VLlama3ForCausalLM"], "head_dim": 64, "hidden_size": 960, "intermediate_size": 2560,
            "is_llama_config": True, "max_position_embeddings": 8192, "model_type": "llama", "neftune_noise_alpha": 0.0,
            "num_attention_heads": 15, "num_hidden_layers": 32, "num_key_value_heads": 5, "pad_token_id": 2,
            "pixel_shuffle_factor": 4, "qk_layer_norms": False, "rms_norm_eps": 1e-05, "rope_interleaved": False,
            "rope_theta": 100000, "torch_dtype": "bfloat16", "use_resampler": False, "vocab_size": 49280,
        },
    },
    "Voxtral-Mini-3B-2507": {
        "architectures": ["VoxtralForConditionalGeneration"], "audio_token_id": 24, "hidden_size": 3072,
        "model_type": "voxtral", "projector_hidden_act": "gelu", "torch_dtype": "bfloat16",
        "transformers_version": "4.54.0.dev0", "vocab_size": 131072,
        "text_config": {
            "attention_bias": False, "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 3072,
            "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False,
            "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 30, "num_key_value_heads": 8,
            "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 100000000.0, "sliding_window": None,
            "use_cache": True, "vocab_size": 131072,
        },
    },
    "pixtral-12b": {
        "architectures": ["LlavaForConditionalGeneration"], "image_token_index": 10, "model_type": "llava",
        "text_config": {
            "head_dim": 128, "hidden_size": 5120, "intermediate_size": 14336, "is_composition": True,
            "max_position_embeddings": 1024000, "model_type": "mistral", "num_hidden_layers": 40, "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05, "rope_theta": 1000000000.0, "sliding_window": None, "vocab_size": 131072,
        },
    },
    "gemma-3-27b-it": {
        "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
        "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
        "model_type": "gemma3", "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
        "text_config": {
            "head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504, "model_type": "gemma3_text",
            "num_attention_heads": 32, "num_hidden_layers": 62, "num_key_value_heads": 16, "query_pre_attn_scalar": 168,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
        },
    },
    "gemma-3-4b-it": {
        "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
        "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
        "model_type": "gemma3", "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
        },
    },
    "Mistral-Small-3.2-24B": {
        "architectures": ["Mistral3ForConditionalGeneration"], "image_token_index": 10, "model_type": "mistral3",
        "multimodal_projector_bias": False, "projector_hidden_act": "gelu", "spatial_merge_size": 2,
        "torch_dtype": "bfloat16", "transformers_version": "4.52.4", "vision_feature_layer": -1,
        "text_config": {
            "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02,
            "intermediate_size": 32768, "max_position_embeddings": 131072, "model_type": "mistral",
            "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
            "rope_theta": 1000000000.0, "sliding_window": None, "torch_dtype": "bfloat16", "use_cache": True,
            "vocab_size": 131072,
        },
    },
    "Ministral-3-8B-Instruct-2512": {
        "architectures": ["Mistral3ForConditionalGeneration"], "dtype": "bfloat16", "image_token_index": 10,
        "model_type": "mistral3", "multimodal_projector_bias": False, "projector_hidden_act": "gelu",
        "spatial_merge_size": 2, "transformers_version": "5.0.0.dev0", "vision_feature_layer": -1,
        "quantization_config": {
            "activation_scheme": "static", "dequantize": False, "quant_method": "fp8", "weight_block_size": None,
            "modules_to_not_convert": [
                "model.vision_tower", "model.multi_modal_projector", "lm_head", "model.vision_tower",
                "model.multi_modal_projector",
            ],
        },
        "text_config": MINISTRAL_3,
    },
    "Qwen3-VL-8B-Instruct": {
        "architectures": ["Qwen3VLForConditionalGeneration"], "image_token_id": 151655, "model_type": "qwen3_vl",
        "tie_word_embeddings": False, "transformers_version": "4.57.0.dev0", "video_token_id": 151656,
        "vision_end_token_id": 151653, "vision_start_token_id": 151652,
        "text_config": QWEN3_VL_TEXT,
    },
    "Qwen3-VL-30B-A3B": {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"], "image_token_id": 151655, "model_type": "qwen3_vl_moe",
        "tie_word_embeddings": False,
        "text_config": QWEN3_VL_TEXT | {
            "hidden_size": 2048, "intermediate_size": 6144, "model_type": "qwen3_vl_moe_text", "num_hidden_layers": 48,
            "num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
            "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        },
    },
    "Qwen3.5-35B-A3B": {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"], "image_token_id": 248056, "model_type": "qwen3_5_moe",
        "tie_word_embeddings": False, "transformers_version": "4.57.0.dev0", "video_token_id": 248057,
        "vision_end_token_id": 248054, "vision_start_token_id": 248053,
        "text_config": {
            "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "dtype": "bfloat16",
            "eos_token_id": 248044, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048,
            "initializer_range": 0.02,
            "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 10,
            "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
            "linear_num_value_heads": 32, "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32",
            "max_position_embeddings": 262144, "mlp_only_layers": [], "model_type": "qwen3_5_moe_text",
            "moe_intermediate_size": 512, "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
            "num_attention_heads": 16, "num_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 40,
            "num_key_value_heads": 2, "output_router_logits": False, "rms_norm_eps": 1e-06, "router_aux_loss_coef": 0.001,
            "shared_expert_intermediate_size": 512, "use_cache": True, "vocab_size": 248320,
            "rope_parameters": {
                "mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default", "rope_theta": 10000000,
                "partial_rotary_factor": 0.25,
            },
        },
    },
    "Qwen3.5-0.8B": {
        "architectures": ["Qwen3_5ForConditionalGeneration"], "image_token_id": 248056, "model_type": "qwen3_5",
        "tie_word_embeddings": True,
        "text_config": {
            "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "dtype": "bfloat16",
            "eos_token_id": 248044, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 1024,
            "initializer_range": 0.02,
            "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 6,
            "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
            "linear_num_value_heads": 16, "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32",
            "max_position_embeddings": 262144, "mlp_only_layers": [], "model_type": "qwen3_5_text",
            "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "num_attention_heads": 8,
            "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "use_cache": True,
            "vocab_size": 248320, "intermediate_size": 3584, "tie_word_embeddings": True,
            "rope_parameters": {
                "mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default", "rope_theta": 10000000,
                "partial_rotary_factor": 0.25,
            },
        },
    },
    "Kimi-K2.5": {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"}, "bos_token_id": 163584, "eos_token_id": 163585,
        "ignore_index": -100, "media_placeholder_token_id": 163605, "model_type": "kimi_k25", "pad_token_id": 163839,
        "text_config": KIMI_K2 | {
            "max_position_embeddings": 262144,
            "quantization_config": {
                "format": "pack-quantized", "global_compression_ratio": None, "kv_cache_scheme": None,
                "quant_method": "compressed-tensors", "quantization_status": "compressed",
                "config_groups": {
                    "group_0": {
                        "input_activations": None, "output_activations": None, "targets": ["Linear"],
                        "weights": {
                            "actorder": None, "block_structure": None, "dynamic": False, "group_size": 32, "num_bits": 4,
                            "observer": "minmax", "observer_kwargs": {}, "strategy": "group", "symmetric": True,
                            "type": "int",
                        },
                    },
                },
                "ignore": [
                    "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*", "lm_head",
                ],
            },
            "rope_scaling": {
                "beta_fast": 1.0, "beta_slow": 1.0, "factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096, "type": "yarn",
            },
        },
    },
}  # fmt: skip
"""The same of multimodal models, without the keys of their towers."""
