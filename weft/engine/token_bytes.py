"""Bytes that a token adds to a text, also where they are a part of a character."""

from __future__ import annotations

import json
import re

from tokenizers import Tokenizer

# Token of sentencepiece for a byte that no other token holds.
FALLBACK = re.compile("<0x([0-9A-Fa-f]{2})>")
# A token before the one in question: decoders treat the first token of a text differently.
BEFORE = "a"


class TokenBytes(dict[int, bytes | None]):
    """Bytes that each token adds to a text behind other tokens, worked out when first asked for.

    A blank that the decoder writes before a word is among them, so the bytes of an answer's tokens, joined, are its text,
    but for a blank at its begin. Special tokens have the bytes of their names. None for an id without a token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer, self._decoder = tokenizer, tokenizer.decoder
        steps = {} if self._decoder is None else json.loads(self._decoder.__getstate__())
        self._kinds = {step.get("type") for step in steps.get("decoders", [steps])}

    def __missing__(self, token_id: int) -> bytes | None:
        token = self._tokenizer.id_to_token(token_id)
        found = self[token_id] = None if token is None else self._bytes_of(token)
        return found

    def _bytes_of(self, token: str) -> bytes:
        if "ByteFallback" in self._kinds and (byte := FALLBACK.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        if "ByteLevel" in self._kinds:
            known = all(letter in BYTE_OF for letter in token)  # others stand in added tokens, as they are
            return bytes(BYTE_OF[letter] for letter in token) if known else token.encode()
        if self._decoder is None:  # tokens are joined by blanks
            return f" {token}".encode()
        return self._decoder.decode([BEFORE, token]).removeprefix(BEFORE).encode()


def _letters() -> dict[str, int]:
    """Byte of each letter of byte-level tokens: GPT-2 has a printable letter for every byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTE_OF = _letters()
