"""Log-probabilities of an answer's tokens, in the shapes of both endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.engine.answers import Piece
from weft.engine.tokenizer import TokenBytes

# JSON has no infinity; vLLM sends this too.
LEAST = -9999.0


def of_chat(pieces: Sequence[Piece], top: int, tokens: TokenBytes | None) -> dict[str, Any]:
    """Log-probabilities of a conversation's answer, with the `top` likeliest tokens of each place."""
    content = []
    for piece in pieces:
        token, *others = _entries(piece, tokens)
        content.append({**token, "top_logprobs": _top(piece, [token, *others], top)})
    return {"content": content, "refusal": None}


def of_completion(pieces: Sequence[Piece], top: int, tokens: TokenBytes | None) -> dict[str, Any]:
    """Log-probabilities of a completion."""
    found: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for piece in pieces:
        entries = _entries(piece, tokens)
        found["tokens"].append(entries[0]["token"])
        found["token_logprobs"].append(entries[0]["logprob"])
        found["top_logprobs"].append(_by_text(piece, entries) if top else None)
        found["text_offset"].append(piece.offset or 0)
    return found


def _entries(piece: Piece, tokens: TokenBytes | None) -> list[dict[str, Any]]:
    """JSON of the tokens at a place, the chosen one first."""
    return [_entry(token, one.logprob, tokens) for token, one in piece.logprobs.items()]


def _entry(token: int, logprob: float, tokens: TokenBytes | None) -> dict[str, Any]:
    """JSON of a token; without text or bytes where it has none."""
    data = None if tokens is None else tokens[token]
    text = _named(token) if data is None else _text(data)
    return {"token": text, "logprob": max(logprob, LEAST), "bytes": None if data is None else list(data)}


def _named(token: int) -> str:
    return f"token_id:{token}"


def _text(data: bytes) -> str:
    """Text of a token; of one that is a part of a character its bytes, as OpenAI writes them."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(chr(byte) if 0x20 <= byte < 0x7F else f"\\x{byte:02x}" for byte in data)


def _by_text(piece: Piece, entries: list[dict[str, Any]]) -> dict[str, float]:
    """Log-probabilities by text, the chosen token's first; by id where one before has the same text."""
    found: dict[str, float] = {}
    for token, entry in zip(piece.logprobs, entries, strict=True):
        found[_named(token) if entry["token"] in found else entry["token"]] = entry["logprob"]
    return found


def _top(piece: Piece, entries: list[dict[str, Any]], top: int) -> list[dict[str, Any]]:
    """The `top` likeliest of the entries, without the chosen token where it is not one of them."""
    ranked = sorted(zip(piece.logprobs.values(), entries, strict=True), key=lambda pair: pair[0].rank)
    return [entry for _, entry in ranked[:top]]
