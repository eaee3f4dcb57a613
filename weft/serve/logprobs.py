"""Log-probabilities of an answer's tokens, in the shapes of both endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.engine.answers import Piece
from weft.text.tokenizer import TokenBytes

# JSON has no infinity; vLLM sends this too.
LEAST = -9999.0


def of_chat(pieces: Sequence[Piece], top: int, tokens: TokenBytes | None) -> dict[str, Any]:
    """Log-probabilities of a conversation's answer, with the `top` likeliest tokens of each place."""
    content = []
    for piece in pieces:
        entries = _entries(piece, tokens)
        content.append({**entries[0], "top_logprobs": _top(piece, entries, top)})
    return {"content": content, "refusal": None}


def of_completion(pieces: Sequence[Piece], top: int, tokens: TokenBytes | None) -> dict[str, Any]:
    """Log-probabilities of a completion."""
    entries = [_entries(piece, tokens) for piece in pieces]
    by_text = [_by_text(*pair) if top else None for pair in zip(pieces, entries, strict=True)]
    return {
        "tokens": [chosen["token"] for chosen, *_ in entries],
        "token_logprobs": [chosen["logprob"] for chosen, *_ in entries],
        "top_logprobs": by_text,
        "text_offset": [piece.offset or 0 for piece in pieces],
    }


def _entries(piece: Piece, tokens: TokenBytes | None) -> list[dict[str, Any]]:
    """JSON of the tokens at a place, the chosen one first."""
    return [_entry(token, one.logprob, tokens) for token, one in piece.logprobs.items()]


def _entry(token: int, logprob: float, tokens: TokenBytes | None) -> dict[str, Any]:
    """JSON of a token; without text or bytes where it has none."""
    data = None if tokens is None else tokens[token]
    return {
        "token": token_text(token, tokens),
        "logprob": max(logprob, LEAST),
        "bytes": None if data is None else list(data),
    }


def token_text(token: int, tokens: TokenBytes | None) -> str:
    """Text of a token; its id where it has none."""
    data = None if tokens is None else tokens[token]
    return _named(token) if data is None else _text(data)


def _named(token: int) -> str:
    return f"token_id:{token}"


def _text(data: bytes) -> str:
    """Text of a token; of one that is a part of a character its bytes, as OpenAI writes them."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(chr(byte) if 0x20 <= byte < 0x7F else f"\\x{byte:02x}" for byte in data)


def _by_text(piece: Piece, entries: list[dict[str, Any]]) -> dict[str, float]:
    """Log-probabilities by text, the chosen token's first; by id where an earlier token has the same text."""
    by_text: dict[str, float] = {}
    for token, entry in zip(piece.logprobs, entries, strict=True):
        by_text[_named(token) if entry["token"] in by_text else entry["token"]] = entry["logprob"]
    return by_text


def _top(piece: Piece, entries: list[dict[str, Any]], top: int) -> list[dict[str, Any]]:
    """The `top` likeliest of the entries, without a chosen token that is less likely."""
    ranked = sorted(zip(piece.logprobs.values(), entries, strict=True), key=lambda pair: pair[0].rank)
    return [entry for _, entry in ranked[:top]]
