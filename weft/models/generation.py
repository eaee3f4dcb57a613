"""Defaults for generation from a checkpoint: which ones weft follows, and which it does not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Values with which a key of generation_config.json has no effect; null never has one.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "max_length": (),
    "min_length": (0,),
    "max_time": (),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "encoder_repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "bad_words_ids": ([],),
    "force_words_ids": ([],),
    "constraints": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "remove_invalid_values": (False,),
    "exponential_decay_length_penalty": (),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "sequence_bias": ({}, []),
    "token_healing": (False,),
    "guidance_scale": (1.0,),
    "watermarking_config": ({},),
    "penalty_alpha": (0.0,),
    "dola_layers": (),
}
# The same for keys that count only where tokens are sampled (do_sample).
NEUTRAL_OF_SAMPLING: dict[str, tuple[Any, ...]] = {
    "top_h": (),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
}
READ = (
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "max_new_tokens",
    "min_new_tokens",
    "stop_strings",
    "eos_token_id",
)
# Keys without effect on any token, by the reason.
WITHOUT_EFFECT = {
    "naming": ("transformers_version",),
    "tokenizer": ("bos_token_id", "pad_token_id", "decoder_start_token_id"),
    "beams": ("early_stopping", "length_penalty", "num_beam_groups", "diversity_penalty", "low_memory"),
    "outputs": (
        "output_attentions",
        "output_hidden_states",
        "output_logits",
        "output_scores",
        "return_dict_in_generate",
        "renormalize_logits",
    ),
    "speed": (
        "assistant_confidence_threshold",
        "assistant_early_exit",
        "assistant_ensemble_weight",
        "assistant_lookbehind",
        "cache_config",
        "cache_implementation",
        "compile_config",
        "continuous_batching_config",
        "disable_compile",
        "is_assistant",
        "max_cache_len",
        "max_matching_ngram_size",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "prefill_chunk_size",
        "prompt_lookup_num_tokens",
        "speculation_type",
        "target_lookbehind",
        "use_cache",
        "use_mtp",
    ),
}
KNOWN = {name for names in WITHOUT_EFFECT.values() for name in names}
KEYS = {*READ, *NEUTRAL, *NEUTRAL_OF_SAMPLING, *KNOWN}
TRANSFORMERS_TOP_K = 50  # its default where tokens are sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Sampling parameters for requests that name none. `unused`: "key=value" that weft cannot follow."""

    temperature: Any = 0.0
    top_p: Any = 1.0
    top_k: Any = 0
    min_p: Any = 0.0
    repetition_penalty: Any = 1.0
    max_new_tokens: Any = None
    min_new_tokens: Any = 0
    stop: Any = ()
    unused: tuple[str, ...] = ()

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], *, legacy: bool = False) -> GenerationDefaults:
        """Read generation_config.json as transformers does: greedy unless do_sample is true.

        Values are not checked.

        legacy  `content` is a config.json, in which only the keys of generation count
        """
        given = {
            name: value
            for name, value in content.items()
            if value is not None and not name.startswith("_") and (name in KEYS or not legacy)
        }
        draws = bool(given.get("do_sample", False))
        neutral = NEUTRAL | NEUTRAL_OF_SAMPLING if draws else NEUTRAL
        without_effect = KNOWN if draws else KNOWN | NEUTRAL_OF_SAMPLING.keys()
        unused = [
            f"{name!r}"[1:-1][:100] + f"={value!r}"[:100]
            for name, value in given.items()
            if name not in READ and name not in without_effect and value not in neutral.get(name, ())
        ]
        return cls(
            temperature=given.get("temperature", 1.0) if draws else 0.0,
            top_p=given.get("top_p", 1.0) if draws else 1.0,
            top_k=given.get("top_k", TRANSFORMERS_TOP_K) if draws else 0,
            min_p=given.get("min_p", 0.0) if draws else 0.0,
            repetition_penalty=given.get("repetition_penalty", 1.0),
            max_new_tokens=given.get("max_new_tokens"),
            min_new_tokens=given.get("min_new_tokens", 0),
            stop=given.get("stop_strings", ()),
            unused=tuple(unused),
        )
