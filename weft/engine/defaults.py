"""Sampling parameters that a checkpoint names, of requests that name none."""

from __future__ import annotations

from weft.engine.params import SamplingParams
from weft.errors import CheckpointError
from weft.models import Checkpoint


def sampling_defaults(checkpoint: Checkpoint) -> SamplingParams:
    """Parameters by generation_config.json. CheckpointError for values that mean nothing."""
    found = checkpoint.generation_defaults()
    tokens = SamplingParams().max_tokens if found.max_new_tokens is None else found.max_new_tokens
    try:
        return SamplingParams(temperature=found.temperature, top_p=found.top_p, max_tokens=tokens, stop=found.stop)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.directory}: generation_config.json: {error}") from None


def unused_defaults(checkpoint: Checkpoint) -> list[str]:
    """At most one line, on what generation_config.json asks for and weft does not do."""
    unused = checkpoint.generation_defaults().unused
    if not unused:
        return []
    return [
        f"{checkpoint.directory}: generation_config.json: not used: {', '.join(unused)} (weft follows do_sample, temperature, "
        f"top_p, max_new_tokens, stop_strings and eos_token_id)"
    ]
