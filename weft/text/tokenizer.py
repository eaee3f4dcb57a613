"""Tokenizer of a checkpoint, the bytes of its tokens, and the longest text that it reads."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from weft.arguments import quoted, shortened
from weft.errors import CheckpointError
from weft.models.files import check_regular, read_object

# Token of sentencepiece for a byte that no other token holds.
FALLBACK = re.compile("<0x([0-9A-Fa-f]{2})>")
# A token before the one in question: decoders treat the first token of a text differently.
BEFORE = "a"


class TokenBytes(dict[int, bytes | None]):
    """Bytes that a token adds to a text after other tokens, worked out when first asked for.

    They include a blank that the decoder writes before a word, so the bytes of an answer's tokens, joined, are its text but for
    a blank at its begin. Special tokens have the bytes of their names. None for an id without a token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer, self._decoder = tokenizer, tokenizer.decoder
        steps = {} if self._decoder is None else json.loads(self._decoder.__getstate__())
        self._kinds = {step.get("type") for step in steps.get("decoders", [steps])}

    def __missing__(self, token_id: int) -> bytes | None:
        token = self._tokenizer.id_to_token(token_id)
        self[token_id] = None if token is None else self._bytes_of(token)
        return self[token_id]

    def _bytes_of(self, token: str) -> bytes:
        if "ByteFallback" in self._kinds and (byte := FALLBACK.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        if "ByteLevel" in self._kinds:
            known = all(letter in BYTE_OF for letter in token)  # added tokens have further letters, as they are
            return bytes(BYTE_OF[letter] for letter in token) if known else token.encode()
        if self._decoder is None:  # tokens are joined by blanks
            return f" {token}".encode()
        return self._decoder.decode([BEFORE, token]).removeprefix(BEFORE).encode()


def _letters() -> dict[str, int]:
    """Byte of each letter of byte-level tokens: GPT-2 has a printable letter for every byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(rest)}


BYTE_OF = _letters()


_LLAMA = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
DEFAULTS: dict[str, Mapping[str, str]] = {
    "LlamaTokenizer": _LLAMA,
    "CodeLlamaTokenizer": _LLAMA,
    "Qwen2Tokenizer": dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>"),
    "GPT2Tokenizer": dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>"),
}
"""Class that builds its tokenizer itself -> special tokens whose names tokenizer_config.json may leave out."""
AS_IT_IS = (
    *("mistral", "ministral3", "mixtral", "mistral3", "voxtral", "olmo2", "olmo3", "granite", "granitemoe", "phi3"),
    *("glm4", "glm4_moe", "glm4_moe_lite", "kimi_k25", "llava", "llava_next", "smolvlm", "ernie4_5", "ernie4_5_moe"),
    *("minimax_m2", "glm", "ministral", "hyperclovax", "flex_olmo"),
)
"""Types of models whose tokenizer.json transformers 5 takes as it is, whatever class is named."""


def class_of(directory: Path, config: Mapping[str, Any]) -> str:
    """Name of the class that transformers 5 takes, if it is one of DEFAULTS; else "".

    config  content of tokenizer_config.json
    """
    sizes = read_object(directory / "config.json") if (directory / "config.json").exists() else {}
    model_type = str(sizes.get("model_type"))
    named = str(config.get("tokenizer_class") or sizes.get("tokenizer_class") or "").removesuffix("Fast")
    if model_type in AS_IT_IS:
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
        always = named == "LlamaTokenizer" and config.get("legacy")  # after special tokens too
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


# Words of a vocabulary that a message lists.
MOST_LISTED = 40
# transformers' named special tokens, in the order in which it adds them.
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def has_tokenizer(directory: Path) -> bool:
    """True if a checkpoint can read and write text."""
    return (directory / "tokenizer.json").exists()


def load_tokenizer(directory: Path) -> Tokenizer:
    """Tokenizer of tokenizer.json, as tokenizer_config.json extends and changes it in transformers.

    Without transformers: importing it would take longer than loading a small model.
    """
    if not has_tokenizer(directory):
        raise CheckpointError(f"{directory}: no tokenizer.json in it; save the model's fast tokenizer there")
    path = directory / "tokenizer.json"
    check_regular(path)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exceptions
        raise CheckpointError(f"{path}: not a readable tokenizer ({error}); download it again") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = _tokenizer_config(directory)
    follow_class(tokenizer, class_of(directory, config), config)
    _add_tokens(tokenizer, config, directory / "tokenizer_config.json")
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, config: Mapping[str, Any], at: Path) -> None:
    if config.get("split_special_tokens"):
        tokenizer.encode_special_tokens = True
    listed: dict[int, AddedToken] = {}
    try:
        for token_id, value in (config.get("added_tokens_decoder") or {}).items():
            listed[int(token_id)] = AddedToken(value["content"], **{k: v for k, v in value.items() if k != "content"})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{at}: added_tokens_decoder is not one of token ids to tokens ({error!r})") from None
    special = _special_tokens(config)
    have = tokenizer.get_added_tokens_decoder()
    new = [token for token_id, token in sorted(listed.items()) if repr(have.get(token_id)) != repr(token)]
    for token in new:
        token.special = token.special or token.content in special
    names = {token.content for token in (*have.values(), *new)}
    new += [AddedToken(name, special=True) for name in dict.fromkeys(special) if name not in names]
    if new:
        tokenizer.add_tokens(new)
    for token_id, token in listed.items():
        if (actual := tokenizer.token_to_id(token.content)) != token_id:
            raise CheckpointError(
                f"{at}: added_tokens_decoder has {token.content!r} as token {token_id}, and after the tokens of tokenizer.json "
                f"it is {actual}; add it to tokenizer.json"
            )


def _tokenizer_config(directory: Path) -> dict[str, Any]:
    """Content of tokenizer_config.json, and of older checkpoints' special_tokens_map and added_tokens."""

    def read(name: str) -> dict[str, Any]:
        return read_object(directory / name) if (directory / name).exists() else {}

    config = read("tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config = {**config, **read("special_tokens_map.json")}
        special = set(_special_tokens(config))
        config["added_tokens_decoder"] = {
            token_id: {"content": name, "special": name in special, "normalized": name not in special}
            for name, token_id in read("added_tokens.json").items()
        }
    return config


def named_tokens(directory: Path) -> dict[str, str]:
    """Special tokens by the names that a chat template has for them, such as bos_token."""
    config = _tokenizer_config(directory)
    return _named({**DEFAULTS.get(class_of(directory, config), {}), **config})


def _named(config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name: first the names that all tokenizers may have, then the model's."""
    further = [name for name in config if name.endswith("_token") and name not in SPECIAL]
    values = {name: config.get(name) for name in (*SPECIAL, *further)}
    if isinstance(extra := _extra(config), Mapping):
        values |= extra
    return {name: text for name, value in values.items() if (text := _content(value)) is not None}


def _special_tokens(config: Mapping[str, Any]) -> list[str]:
    """All special tokens: named ones, then ones that are only listed."""
    extra = _extra(config)
    listed = [text for one in extra if (text := _content(one)) is not None] if isinstance(extra, list) else []
    return [*_named(config).values(), *listed]


def _extra(config: Mapping[str, Any]) -> Any:
    """Special tokens of this model alone: a list, or an object with their names."""
    return config.get("extra_special_tokens") or config.get("additional_special_tokens")


def _content(token: object) -> str | None:
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else None


def token_ids_of(tokenizer: Tokenizer, name: str, text: str, *, special: bool = True) -> list[int]:
    """Token ids of a text. ValueError for one that the tokenizer has no tokens for.

    name     of the text, in messages
    special  with the tokens that the tokenizer puts around a text
    """
    try:
        return tokenizer.encode(text, add_special_tokens=special).ids
    except Exception as error:  # tokenizers raises bare Exceptions
        raise ValueError(f"{name}={quoted(text)} {_unreadable(tokenizer, text) or error}") from None


def _unreadable(tokenizer: Tokenizer, text: str) -> str:
    """Rule broken by a text with words that a vocabulary of whole words lacks; "" for another model."""
    if not isinstance(tokenizer.model, models.WordLevel):
        return ""
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for token in added:
        text = text.replace(token, "")
    if tokenizer.normalizer is not None:
        text = tokenizer.normalizer.normalize_str(text)
    words = [text]
    if tokenizer.pre_tokenizer is not None:
        words = [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    known = [word for word in tokenizer.get_vocab(with_added_tokens=False) if word not in added]
    lacking = ", ".join(map(repr, dict.fromkeys(word for word in words if word not in {*known})))
    reads = f"{len(known):,} words" if len(known) > MOST_LISTED else " ".join(sorted(known))
    return f"has {shortened(lacking)}, which this model does not read; it reads {reads}"


def spellings(tokenizer: Tokenizer | None, words: Sequence[str]) -> list[list[int]]:
    """Token ids of each word, and of a blank and the word if only the first token differs, as in vLLM."""
    spelled = []
    for word in words:
        alone = token_ids_of(tokenizer, "bad_words", word.lstrip(), special=False)
        try:
            blank_first = token_ids_of(tokenizer, "bad_words", " " + word.lstrip(), special=False)
        except ValueError:  # the tokenizer has no blank
            blank_first = []
        if not alone:
            raise ValueError(f"bad_words: {quoted(word)} has no tokens")
        spelled.append(alone)
        if blank_first and blank_first[0] != alone[0] and len(blank_first) == len(alone):
            spelled.append(blank_first)
    return spelled


# A character, or a byte with a tokenizer of bytes; None: a letter that stands for no byte.
Letter = str | int | None
# A text up to this length is tokenized, which takes a millisecond.
SHORT = 4096
# Characters that are counted together, and the most tokens that a cut between two pieces can add.
_PIECE, _SLACK = 1 << 16, 8
# Pre-tokenizers that keep all characters; "Split" and "Punctuation" may remove matches.
_KEEPING = {"ByteLevel", "Metaspace", "Digits", "Split", "Punctuation", "UnicodeScripts"}
_DROPPING_BLANKS = {"Whitespace", "WhitespaceSplit", "BertPreTokenizer"}
_EACH_ALONE = {"Regex": r"[\s\S]"}


class TokenBound:
    """Lower bound of the number of tokens of a text; 0 with a tokenizer for which no bound is known."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._normalizer = tokenizer.normalizer
        steps = _steps(tokenizer.pre_tokenizer)
        kinds = {step["type"] for step in steps}
        added = list(tokenizer.get_added_tokens_decoder().values())
        model, vocabulary = tokenizer.model, tokenizer.get_vocab(with_added_tokens=False)
        self._bytes = "ByteLevel" in kinds
        self._blank = next((step.get("replacement") for step in steps if step["type"] == "Metaspace"), None)
        blanks_go = [token.lstrip or token.rstrip for token in added]
        self._drops_blanks = any((*blanks_go, kinds & _DROPPING_BLANKS))
        alone = any(step["type"] == "Split" and step.get("pattern") == _EACH_ALONE for step in steps)
        self._known = _keeps_letters(steps) and (alone or isinstance(model, (models.BPE, models.Unigram)))
        longest, singles = self._longest_tokens([] if alone else vocabulary, added)
        # A character without a token becomes an unknown token, perhaps together with its neighbours, or is left out, unless:
        counted = alone or ("<0x00>" in vocabulary and getattr(model, "byte_fallback", False))
        self._weights = {letter: 1 / length for letter, length in longest.items() if counted or letter in singles}
        self._rest = 1.0 if counted else 0.0

    def _longest_tokens(
        self, vocabulary: Iterable[str], added: Iterable[AddedToken]
    ) -> tuple[dict[Letter, int], set[Letter]]:
        """(length of the longest token with each letter, letters that are tokens)"""
        longest: dict[Letter, int] = {}
        singles: set[Letter] = set()
        for token in sorted(vocabulary, key=len):
            letters = [BYTE_OF.get(letter) for letter in token] if self._bytes else token
            longest.update(dict.fromkeys(letters, len(token)))
            if len(token) == 1:
                singles.add(letters[0])
        for token in added:
            forms = [self._letters(text) for text in self._forms(token)]
            for letter in {letter for form in forms for letter in form}:
                longest[letter] = max(longest.get(letter, 1), *map(len, forms))
        return longest, singles

    def least(self, text: str, enough: int) -> int:
        """Lower bound of the text's number of tokens; `enough` ends the count."""
        least = 0.0
        for start in range(0, len(text) if self._known else 0, _PIECE):
            piece = text[start : start + _PIECE]
            if self._drops_blanks:
                piece = "".join(piece.split())
            if self._normalizer is not None:
                piece = self._normalizer.normalize_str(piece)
            counts = Counter(self._letters(piece))
            weight = sum(count * self._weights.get(letter, self._rest) for letter, count in counts.items())
            least += max(0.0, weight - _SLACK)
            if least >= enough:
                break
        return int(least)

    def _forms(self, token: AddedToken) -> list[str]:
        """Text of an added token, as it is and normalized."""
        text = token.content
        return [text] if self._normalizer is None else [text, self._normalizer.normalize_str(text)]

    def _letters(self, text: str) -> str | bytes:
        if self._bytes:
            return text.encode()
        return text if self._blank is None else text.replace(" ", self._blank)


class PromptReader:
    """Token ids of texts, for sequences of up to `max_seq_len` tokens; from any thread."""

    def __init__(self, tokenizer: Tokenizer, max_seq_len: int) -> None:
        self._tokenizer, self._max_seq_len = tokenizer, max_seq_len
        self._bound: TokenBound | None = None

    def read(self, name: str, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. ValueError for one that leaves no room for an answer.

        A long text is refused before it is tokenized, where the bound says so.
        """
        if len(text) > max(SHORT, self._max_seq_len):
            if self._bound is None:
                self._bound = TokenBound(self._tokenizer)
            check_room(name, self._bound.least(text, self._max_seq_len), self._max_seq_len, least=True)
        ids = token_ids_of(self._tokenizer, name, text, special=add_special_tokens)
        check_room(name, len(ids), self._max_seq_len)
        return ids


def check_room(name: str, tokens: int, max_seq_len: int, *, least: bool = False) -> None:
    """ValueError for a prompt that leaves no room for an answer. `least`: it may have more tokens."""
    most = max_seq_len - 1
    if tokens > most:
        count = f"more than {most}" if least else tokens
        raise ValueError(
            f"{name} has {count} tokens and leaves no room for an answer in max_seq_len={max_seq_len}; shorten it to {most} "
            f"tokens"
        )


def _keeps_letters(steps: list[dict[str, Any]]) -> bool:
    """True if these pre-tokenizers drop blanks at most."""
    known = {step["type"] for step in steps} <= _KEEPING | _DROPPING_BLANKS
    return known and all(step.get("behavior") != "Removed" for step in steps)


def _steps(pre_tokenizer: pre_tokenizers.PreTokenizer | None) -> list[dict[str, Any]]:
    """Pre-tokenizers that follow each other, as JSON."""
    if pre_tokenizer is None:
        return []
    state = json.loads(pre_tokenizer.__getstate__())
    return state.get("pretokenizers", [state])
