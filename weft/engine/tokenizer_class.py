"""Class of transformers for a checkpoint's tokenizer, and its changes to tokenizer.json.

Most classes take tokenizer.json as it is. Some build a tokenizer of their own from its vocabulary and its merges; of those weft
follows the blank before the text, with which Llama's classes ignore the normalizer, pre-tokenizer and decoder of the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from weft.models.files import read_object

_LLAMA = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
DEFAULTS: dict[str, Mapping[str, str]] = {
    "LlamaTokenizer": _LLAMA,
    "CodeLlamaTokenizer": _LLAMA,
    "Qwen2Tokenizer": dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>"),
    "GPT2Tokenizer": dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>"),
}
"""Class that builds a tokenizer of its own -> special tokens whose names tokenizer_config.json may leave out."""


def class_of(directory: Path, config: Mapping[str, Any]) -> str:
    """Name of the class that transformers 5 takes, if it is one of DEFAULTS; else "".

    config  content of tokenizer_config.json
    """
    sizes = read_object(directory / "config.json") if (directory / "config.json").exists() else {}
    model_type = str(sizes.get("model_type"))
    named = str(config.get("tokenizer_class") or sizes.get("tokenizer_class") or "").removesuffix("Fast")
    if model_type in ("mistral", "mixtral"):
        return ""
    if model_type == "qwen2" or (not named and model_type.startswith("qwen")):
        return "Qwen2Tokenizer"
    if named == "LlamaTokenizer" and _is_byte_level(directory):
        return ""
    return named if named in DEFAULTS else ""


def _is_byte_level(directory: Path) -> bool:
    path = directory / "tokenizer.json"
    content = read_object(path) if path.exists() else {}
    return '"ByteLevel"' in json.dumps([content.get("pre_tokenizer"), content.get("decoder")])


def follow_class(tokenizer: Tokenizer, named: str, config: Mapping[str, Any]) -> None:
    """Put the blank before texts where the class `named` puts it.

    config  content of tokenizer_config.json, of which add_prefix_space and legacy count
    """
    asked = config.get("add_prefix_space")
    if named in ("GPT2Tokenizer", "Qwen2Tokenizer"):
        if tokenizer.pre_tokenizer is not None:
            tokenizer.pre_tokenizer = _with_prefix_space(tokenizer.pre_tokenizer, bool(asked))
    elif named and isinstance(tokenizer.model, models.BPE):
        prefixed = asked is None or bool(asked)
        always = named == "LlamaTokenizer" and config.get("legacy")  # behind special tokens too
        scheme = ("always" if always else "first") if prefixed else "never"
        tokenizer.model.fuse_unk = tokenizer.model.byte_fallback = True
        tokenizer.normalizer = normalizers.Sequence([])
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
        strip = [decoders.Strip(" ", 1, 0)] if prefixed or named == "CodeLlamaTokenizer" else []
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )


def _with_prefix_space(pre_tokenizer: pre_tokenizers.PreTokenizer, value: bool) -> pre_tokenizers.PreTokenizer:
    """Copy whose ByteLevel, alone or in a sequence, has this add_prefix_space."""
    state = json.loads(pre_tokenizer.__getstate__())
    for part in state.get("pretokenizers", [state]):
        if part["type"] == "ByteLevel":
            part["add_prefix_space"] = value
    made = pre_tokenizers.ByteLevel()
    made.__setstate__(json.dumps(state).encode())
    return made
