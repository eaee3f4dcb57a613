"""Log-probabilities of an answer's tokens, in the shapes of both endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.engine.outputs import Logprob, Piece

# JSON has no infinity; vLLM sends this too.
LEAST = -9999.0


def of_chat(pieces: Sequence[Piece], top: int, offset: int) -> dict[str, Any]:
    """Log-probabilities of a conversation's answer, with the `top` likeliest tokens of each place."""
    content = []
    for piece in pieces:
        token, *others = _entries(piece)
        content.append({**token, "top_logprobs": _top(piece, [token, *others], top)})
    return {"content": content, "refusal": None}


def of_completion(pieces: Sequence[Piece], top: int, offset: int) -> dict[str, Any]:
    """Log-probabilities of a completion; `offset`: characters of it before these pieces."""
    found: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for piece in pieces:
        token, *others = _entries(piece)
        found["tokens"].append(token["token"])
        found["token_logprobs"].append(token["logprob"])
        found["top_logprobs"].append({one["token"]: one["logprob"] for one in [token, *others]} if top else None)
        found["text_offset"].append(offset)
        offset += len(piece.text or "")
    return found


def _entries(piece: Piece) -> list[dict[str, Any]]:
    """JSON of the tokens at a place, the chosen one first."""
    return [_entry(token, one) for token, one in piece.logprobs.items()]


def _entry(token: int, one: Logprob) -> dict[str, Any]:
    text = f"token_id:{token}" if one.decoded_token is None else one.decoded_token
    return {"token": text, "logprob": max(one.logprob, LEAST), "bytes": list(text.encode())}


def _top(piece: Piece, entries: list[dict[str, Any]], top: int) -> list[dict[str, Any]]:
    """The `top` likeliest of the entries, without the chosen token where it is not one of them."""
    ranked = sorted(zip(piece.logprobs.values(), entries, strict=True), key=lambda pair: pair[0].rank)
    return [entry for _, entry in ranked[:top]]
