"""Path /v1/embeddings: vectors of texts and token ids, as OpenAI's API and vLLM have them."""

from __future__ import annotations

import asyncio
import base64
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
from fastapi import Request
from fastapi.responses import JSONResponse, Response

from weft.arguments import check_choice, check_int
from weft.engine.params import POOLINGS, Prompt, SamplingParams
from weft.errors import CheckpointError
from weft.models.files import read_object
from weft.serve.app import CLIENT_LEFT, Service, check_model, check_pieces, read, unless_left
from weft.serve.checks import BadField, a_text, checked, given_among
from weft.serve.fields import Asked, prompts_of

KNOWN = ("input", "model", "encoding_format", "dimensions", "pooling", "user", "cache_salt")
NEUTRAL = {"normalize": (True,), "truncate_prompt_tokens": (-1,), "add_special_tokens": (True,)}
# OpenAI's.
MOST_INPUTS, FORMATS = 2048, ("float", "base64")
# Inputs that are submitted together at most.
GROUP = 256
# Keys of 1_Pooling/config.json, which sentence-transformers writes.
OF_POOLING = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean"}


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedVectors:
    """Fields of a request for vectors.

    dimensions  the first numbers of a vector that count; None: all
    pooling     None: the checkpoint's
    """

    model: str | None
    prompts: list[Prompt]
    encoding: str
    dimensions: int | None
    pooling: str | None
    cache_salt: str | None

    @classmethod
    def of(cls, body: object) -> AskedVectors:
        """Fields of a decoded JSON body. BadField for any that is wrong, unknown or not supported."""
        given = given_among(body, KNOWN, NEUTRAL)
        for name in ("model", "user"):
            checked(name, a_text, given.get(name))
        checked("cache_salt", lambda name, value: SamplingParams(cache_salt=value), given.get("cache_salt"))
        for name, choices in (("encoding_format", FORMATS), ("pooling", POOLINGS)):
            checked(name, lambda name, value, choices=choices: check_choice(name, value, choices), given.get(name))
        if "input" not in given:
            raise BadField("input is missing", "input")
        prompts = prompts_of("input", given["input"])
        if len(prompts) > MOST_INPUTS:
            raise BadField(f"input has {len(prompts)} texts; send at most {MOST_INPUTS}", "input")
        return cls(
            model=given.get("model"),
            prompts=prompts,
            encoding=given.get("encoding_format", "float"),
            dimensions=checked("dimensions", lambda name, value: check_int(name, value, 1), given.get("dimensions")),
            pooling=given.get("pooling"),
            cache_salt=given.get("cache_salt"),
        )


async def embeddings(service: Service, request: Request) -> Response:
    """Vectors of the inputs, in order, each of length 1."""
    asked = await read(service, request, AskedVectors.of)
    check_model(service, asked.model)
    pooling = asked.pooling or pooling_of(service.llm.directory)
    answer_id = f"embd-{secrets.token_hex(12)}"
    try:
        got = await unless_left(request, asyncio.create_task(_vectors(service, asked, pooling, answer_id)))
    except BadField:
        raise
    except Exception as error:
        raise service.failure(error) from None
    if got is None:
        return Response(status_code=CLIENT_LEFT)
    vectors, tokens = got

    def response() -> Response:
        data = [
            {"object": "embedding", "index": index, "embedding": _written(vector, asked)}
            for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        model = asked.model or service.options.model_name
        return JSONResponse({"id": answer_id, "object": "list", "data": data, "model": model, "usage": usage})

    # In a thread, since a million numbers take a second to write, and would hold up streams.
    return await asyncio.to_thread(response)


async def _vectors(service: Service, asked: AskedVectors, pooling: str, answer_id: str) -> tuple[list[bytes], int]:
    """Vectors of the inputs, and the number of their tokens. BadField for more dimensions than there are."""
    params = SamplingParams(max_tokens=1, pooling=pooling, cache_salt=asked.cache_salt)
    vectors: dict[int, bytes] = {}
    tokens = 0
    group = min(GROUP, service.most_requests)
    for start in range(0, len(asked.prompts), group):
        prompts = asked.prompts[start : start + group]
        answer = await service.choices(Asked.of_prompts(prompts, params, asked.model), answer_id)
        try:
            async for index, pieces in answer.arrivals():
                check_pieces(pieces)
                vectors[start + index] = pieces[0].embedding
            tokens += answer.usage()["prompt_tokens"]
        finally:
            service.end(answer)
        if asked.dimensions is not None and asked.dimensions > (most := len(vectors[start]) // 4):
            raise BadField(f"dimensions={asked.dimensions} is more than the model's {most}; lower it", "dimensions")
    return [vectors[index] for index in range(len(asked.prompts))], tokens


def _written(vector: bytes, asked: AskedVectors) -> list[float] | str:
    numbers = unit_vector(vector, asked.dimensions)
    return base64.b64encode(numbers.tobytes()).decode() if asked.encoding == "base64" else numbers.tolist()


def unit_vector(vector: bytes, dimensions: int | None = None) -> numpy.ndarray:
    """The first `dimensions` numbers of a vector, all if None, at length 1."""
    numbers = numpy.frombuffer(vector, "<f4")[:dimensions]
    length = float(numpy.linalg.norm(numbers.astype(numpy.float64)))
    return (numbers / length if length > 0 else numbers).astype("<f4")


def pooling_of(directory: Path | None) -> str:
    """Pooling that a checkpoint was trained for, by sentence-transformers' file; "last" where it has none.

    BadField for a pooling that weft has not.
    """
    path = None if directory is None else directory / "1_Pooling" / "config.json"
    if path is None or not path.exists():
        return "last"
    try:
        modes: dict[str, Any] = read_object(path)
    except (CheckpointError, OSError):
        raise BadField("the checkpoint's 1_Pooling/config.json cannot be read; send pooling, last or mean") from None
    asked = [name for name, value in modes.items() if name.startswith("pooling_mode_") and value is True]
    if len(asked) != 1 or asked[0] not in OF_POOLING:
        raise BadField(
            f"the checkpoint asks for {', '.join(asked) or 'no pooling'}; send pooling, last or mean", "pooling"
        )
    return OF_POOLING[asked[0]]
