"""Paths /tokenize and /detokenize in vLLM's forms: token ids of texts and chats, and their text."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from tokenizers import Tokenizer

from weft.arguments import check_bool, quoted
from weft.engine.params import plain_prompt
from weft.serve.app import ApiError, Service, check_model, read
from weft.serve.checks import BadField, a_text, an_object, checked, given_among
from weft.serve.fields import messages_of
from weft.text.tokenizer import token_ids_of

OF_TEXT = ("model", "prompt", "add_special_tokens", "return_token_strs")
OF_CONVERSATION = ("model", "messages", "chat_template_kwargs", "return_token_strs")
# Fields of vLLM, with the one value that weft has.
ONLY = {"add_generation_prompt": (True,), "continue_final_message": (False,), "add_special_tokens": (False,)}


async def tokenize(service: Service, request: Request) -> Response:
    """Token ids of `prompt`, or of the prompt that the chat template makes of `messages`."""
    given = await read(service, request, _tokenized_fields)
    check_model(service, given.get("model"))
    tokenizer = _tokenizer(service)

    def response(ids: list[int] | None) -> Response:
        if ids is None:
            ids = token_ids_of(tokenizer, "prompt", given["prompt"], special=given.get("add_special_tokens", True))
        names = [tokenizer.id_to_token(one) for one in ids] if given.get("return_token_strs") else None
        return JSONResponse(
            {"count": len(ids), "max_model_len": service.llm.max_seq_len, "tokens": ids, "token_strs": names}
        )

    try:
        ids = None
        if "messages" in given:
            ids = await service.chat_prompt(given["messages"], given.get("chat_template_kwargs"))
        return await asyncio.to_thread(response, ids)  # a long text takes a while, and would hold up streams
    except ValueError as error:
        raise BadField(str(error)) from None


async def detokenize(service: Service, request: Request) -> Response:
    """Text of `tokens`, special tokens included."""
    given = await read(service, request, _detokenized_fields)
    check_model(service, given.get("model"))
    tokenizer = _tokenizer(service)
    most = tokenizer.get_vocab_size() - 1

    def response() -> Response:
        for index, token in enumerate(given["tokens"]):
            if not 0 <= token <= most:
                raise BadField(f"tokens[{index}]={quoted(token)} is a token id outside 0 .. {most}", "tokens")
        return JSONResponse({"prompt": tokenizer.decode(given["tokens"], skip_special_tokens=False)})

    return await asyncio.to_thread(response)


def _tokenizer(service: Service) -> Tokenizer:
    """The model's tokenizer. ApiError without one."""
    if service.llm.tokenizer is None:
        raise ApiError(400, "this model has no tokenizer; send and take token ids")
    return service.llm.tokenizer


def _tokenized_fields(body: object) -> dict[str, Any]:
    """Fields of /tokenize. BadField for one that is wrong, missing or unknown."""
    conversation = isinstance(body, dict) and body.get("messages") is not None
    given = given_among(body, OF_CONVERSATION if conversation else OF_TEXT, ONLY if conversation else {})
    checked("model", a_text, given.get("model"))
    for name in ("add_special_tokens", "return_token_strs"):
        checked(name, check_bool, given.get(name))
    if conversation:
        checked("chat_template_kwargs", an_object, given.get("chat_template_kwargs"))
        return {**given, "messages": messages_of(given["messages"])}
    if "prompt" not in given:
        raise BadField("prompt is missing; send it, or messages", "prompt")
    checked("prompt", a_text, given["prompt"])
    checked("prompt", plain_prompt, given["prompt"])
    return given


def _detokenized_fields(body: object) -> dict[str, Any]:
    """Fields of /detokenize. BadField as above."""
    given = given_among(body, ("model", "tokens"), {})
    checked("model", a_text, given.get("model"))
    ids = given.get("tokens")
    if not isinstance(ids, list):
        raise BadField(f"tokens={quoted(ids)} is not a list of token ids", "tokens")
    checked("tokens", plain_prompt, ids)
    return given
