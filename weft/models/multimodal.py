"""Text models inside multimodal checkpoints: their config.json, and the names of their tensors.

Without torch: the command line reads a config.json before it loads torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.arguments import quoted
from weft.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapper:
    """Model of a text model, and of towers for images or sound, which weft leaves out.

    architecture  the member of `architectures` that generates text
    text          model_type of a text_config that names none
    assumed       keys of a text_config with the values that the wrapper assumes where the file has none
    tied          tie_word_embeddings of a file that has none; that of text_config does not count
    text_may_tie  but here it does, where it is true
    """

    architecture: str
    text: str
    assumed: Mapping[str, Any] = field(default_factory=dict)
    tied: bool = False
    text_may_tie: bool = False


VOXTRAL_TEXT = {
    "vocab_size": 131072,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 30,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e8,
    "head_dim": 128,
}
WRAPPERS = {
    "gemma3": Wrapper(architecture="Gemma3ForConditionalGeneration", text="gemma3_text", tied=True),
    "idefics3": Wrapper(architecture="Idefics3ForConditionalGeneration", text="llama"),
    "internvl": Wrapper(architecture="InternVLForConditionalGeneration", text="qwen2", tied=True),
    "kimi_k25": Wrapper(architecture="KimiK25ForConditionalGeneration", text="deepseek_v3", tied=True),
    "llava": Wrapper(architecture="LlavaForConditionalGeneration", text="llama", text_may_tie=True),
    "llava_next": Wrapper(architecture="LlavaNextForConditionalGeneration", text="llama"),
    "mistral3": Wrapper(architecture="Mistral3ForConditionalGeneration", text="mistral", tied=True),
    "qwen3_5": Wrapper(architecture="Qwen3_5ForConditionalGeneration", text="qwen3_5_text"),
    "qwen3_5_moe": Wrapper(architecture="Qwen3_5MoeForConditionalGeneration", text="qwen3_5_moe_text"),
    "qwen3_vl": Wrapper(architecture="Qwen3VLForConditionalGeneration", text="qwen3_vl_text"),
    "qwen3_vl_moe": Wrapper(architecture="Qwen3VLMoeForConditionalGeneration", text="qwen3_vl_moe_text"),
    "smolvlm": Wrapper(architecture="SmolVLMForConditionalGeneration", text="llama"),
    "voxtral": Wrapper(architecture="VoxtralForConditionalGeneration", text="llama", assumed=VOXTRAL_TEXT),
}
"""model_type → the multimodal model. Its text model runs where its model_type is that of a family."""

# Sizes that transformers assumes: a text_config has keys that differ from its class's, the config.json of a text model has all.
SIZES = {
    "deepseek_v3": (129280, 7168, 18432, 61, 128),
    "gemma3_text": (262208, 2304, 9216, 26, 8),
    "llama": (32000, 4096, 11008, 32, 32),
    "mistral": (32000, 4096, 14336, 32, 32),
    "qwen2": (151936, 4096, 22016, 32, 32),
    "ministral3": (131072, 4096, 14336, 34, 32),
    "qwen3": (151936, 4096, 22016, 32, 32),
    "qwen3_vl_moe_text": (151936, 2048, 5632, 24, 16),
    "qwen3_vl_text": (151936, 4096, 22016, 32, 32),
}
SIZE_NAMES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")

# Keys of the whole model that count where text_config lacks them. Its dtype counts before that of text_config.
OF_WHOLE = ("quantization_config", "eos_token_id")
DTYPE_NAMES = ("dtype", "torch_dtype")

# Beginnings of names of a text model's tensors in a multimodal checkpoint, and what they are in one of its family.
PREFIXES = (
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
TEXT_PARTS = ("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.", "mtp.")


def check_architecture(content: Mapping[str, Any], architecture: str, runs: str, other: str | None = None) -> None:
    """CheckpointError where config.json names model classes, and ``architecture`` by neither name."""
    classes = content.get("architectures")
    names = (architecture,) if other is None else (architecture, other)
    if classes and not (isinstance(classes, list) and any(name in classes for name in names)):
        raise CheckpointError(f"config.json: architectures={quoted(classes)} is not supported; weft runs {runs}")


def is_multimodal(content: Mapping[str, Any]) -> bool:
    """True for the config.json of one of WRAPPERS."""
    model_type = content.get("model_type")
    return isinstance(model_type, str) and model_type in WRAPPERS and isinstance(content.get("text_config"), Mapping)


def text_config(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """config.json of the text model alone; the same content where there is no multimodal model around it.

    CheckpointError for a wrapper's class that does not generate text.
    """
    if not is_multimodal(content):
        return content
    wrapper = WRAPPERS[content["model_type"]]
    check_architecture(content, wrapper.architecture, f"the text model of {wrapper.architecture!r}")
    given = {name: value for name, value in content["text_config"].items() if name != "architectures"}
    model_type = given.get("model_type") or wrapper.text
    sizes = SIZES.get(model_type, ()) if isinstance(model_type, str) else ()
    text = {
        **dict(zip(SIZE_NAMES, sizes, strict=False)),
        "model_type": model_type,
        **wrapper.assumed,
        **{name: value for name, value in given.items() if name != "model_type"},
    }
    for name in OF_WHOLE:
        if text.get(name) is None and content.get(name) is not None:
            text[name] = content[name]
    dtype = next((content[name] for name in DTYPE_NAMES if content.get(name) is not None), None)
    if dtype is not None:
        text |= {"dtype": dtype, "torch_dtype": None}
    tied = content.get("tie_word_embeddings", wrapper.tied)
    if wrapper.text_may_tie and not tied:
        tied = given.get("tie_word_embeddings", tied)
    return text | {"tie_word_embeddings": tied}


def text_name(name: str) -> str:
    """Name that a tensor or module of a multimodal checkpoint's text model has in one of its family."""
    for prefix, plain in PREFIXES:
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name


def is_of_text(name: str) -> bool:
    """True for a tensor of the text model, by its ``text_name``."""
    return name.startswith(TEXT_PARTS)
