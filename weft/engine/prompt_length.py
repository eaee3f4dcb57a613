"""Prompts as token ids, and a lower bound of their number, by which long texts are refused at once.

A token of L characters is worth at most 1 if each of its characters counts 1 / (length of the longest token that has this
character). So the sum over a text is at most its number of tokens.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from tokenizers import AddedToken, Tokenizer, models

from weft.engine.token_bytes import BYTE_OF
from weft.engine.tokenizer import token_ids_of

# A text up to this length is tokenized, which takes a millisecond.
SHORT = 4096
# Characters that are counted together, and the most that a cut between two such pieces can add.
_PIECE, _SLACK = 1 << 16, 8
# Pre-tokenizers that keep all characters; "Split" and "Punctuation" may remove those that they find.
_KEEPING = {"ByteLevel", "Metaspace", "Digits", "Split", "Punctuation", "UnicodeScripts"}
_DROPPING_BLANKS = {"Whitespace", "WhitespaceSplit", "BertPreTokenizer"}
_EACH_ALONE = {"Regex": r"[\s\S]"}


class TokenBound:
    """Lower bound of the number of tokens of a text. 0 with a tokenizer of which none is known."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._normalizer = tokenizer.normalizer
        steps = _steps(tokenizer.pre_tokenizer)
        kinds = {step["type"] for step in steps}
        added = list(tokenizer.get_added_tokens_decoder().values())
        model, vocabulary = tokenizer.model, tokenizer.get_vocab(with_added_tokens=False)
        self._bytes = "ByteLevel" in kinds
        self._blank = next((step.get("replacement") for step in steps if step["type"] == "Metaspace"), None)
        self._drops_blanks = bool(kinds & _DROPPING_BLANKS) or any(token.lstrip or token.rstrip for token in added)
        alone = any(step["type"] == "Split" and step.get("pattern") == _EACH_ALONE for step in steps)
        keeps = kinds <= _KEEPING | _DROPPING_BLANKS and all(step.get("behavior") != "Removed" for step in steps)
        self._known = keeps and (alone or isinstance(model, (models.BPE, models.Unigram)))
        # By character, or by byte with a tokenizer of bytes.
        self._longest: dict[Any, int] = {}
        singles = set()
        for token in sorted([] if alone else vocabulary, key=len):
            letters = [BYTE_OF.get(letter) for letter in token] if self._bytes else token
            self._longest.update(dict.fromkeys(letters, len(token)))
            if len(token) == 1:
                singles.add(letters[0])
        for token in added:
            forms = [self._letters(text) for text in self._forms(token)]
            for letter in {letter for form in forms for letter in form}:
                self._longest[letter] = max(self._longest.get(letter, 1), *map(len, forms))
        # Characters without a token of their own are left out, or become one unknown token together, but for these:
        each = alone or ("<0x00>" in vocabulary and getattr(model, "byte_fallback", False))
        self._weights = {letter: 1 / longest for letter, longest in self._longest.items() if each or letter in singles}
        self._other = 1.0 if each else 0.0

    def least(self, text: str, enough: int) -> int:
        """A number that the text's tokens are not fewer than; `enough` ends the count."""
        found = 0.0
        for start in range(0, len(text) if self._known else 0, _PIECE):
            piece = text[start : start + _PIECE]
            if self._drops_blanks:
                piece = "".join(piece.split())
            if self._normalizer is not None:
                piece = self._normalizer.normalize_str(piece)
            counts = Counter(self._letters(piece))
            weight = sum(count * self._weights.get(letter, self._other) for letter, count in counts.items())
            found += max(0.0, weight - _SLACK)
            if found >= enough:
                break
        return int(found)

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
        found = token_ids_of(self._tokenizer, name, text, special=add_special_tokens)
        check_room(name, len(found), self._max_seq_len)
        return found


def check_room(name: str, tokens: int, max_seq_len: int, *, least: bool = False) -> None:
    """ValueError for a prompt that leaves no room for an answer. `least`: it may have more tokens."""
    most = max_seq_len - 1
    if tokens > most:
        count = f"more than {most}" if least else tokens
        raise ValueError(
            f"{name} has {count} tokens and leaves no room for an answer in max_seq_len={max_seq_len}; shorten it to {most} "
            f"tokens"
        )


def _steps(pre_tokenizer: Any) -> list[dict[str, Any]]:
    """Pre-tokenizers that follow each other, as JSON."""
    if pre_tokenizer is None:
        return []
    found = json.loads(pre_tokenizer.__getstate__())
    return found.get("pretokenizers", [found])
