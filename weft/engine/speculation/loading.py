"""Draft models and heads beside a model, from checkpoints or configurations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from weft.engine.speculation.draft_model import ModelDrafter
from weft.engine.speculation.hidden import HiddenDrafter
from weft.engine.speculation.ngram import NgramDrafter
from weft.errors import ModelTooLarge
from weft.kernels.fp8 import check_e4m3
from weft.models import Decoder, DecoderConfig
from weft.models.checkpoint import Checkpoint
from weft.models.eagle3 import Eagle3, Eagle3Config
from weft.models.memory import check_memory
from weft.models.mtp import Mtp
from weft.text.tokenizer import has_tokenizer, load_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from weft.engine.config import EngineConfig
    from weft.engine.graphs import DecodeGraph
    from weft.engine.speculation.drafting import Drafter
    from weft.engine.speculation.options import SpeculativeConfig

Draft = Decoder | Eagle3 | Mtp


def load_draft(
    config: EngineConfig,
    model: Decoder,
    checkpoint: Checkpoint | None,
    tokenizer: Tokenizer | None,
    opened: Callable[[Any], Checkpoint],
) -> Draft | None:
    """Draft model or head beside `model`, as config.speculative asks; None: it asks for none. Collective.

    ValueError, in a line, for one that does not fit the model, or the memory beside it.

    checkpoint  of the model; None: it has random weights
    tokenizer   of the model
    opened      checkpoint by the name of a draft
    """
    speculative = config.speculative
    if speculative is None or speculative.method == "ngram":
        return None
    if speculative.method == "mtp":
        with _memory_for("speculative: the MTP head"):
            return _load_mtp(model, checkpoint, config)
    made, load = {"draft_model": (DecoderConfig, _load_model), "eagle3": (Eagle3Config, _load_eagle3)}[
        speculative.method
    ]
    source, name = speculative.model, "speculative: model"
    if not isinstance(source, made):
        source = opened(source)
        name = f"{name}={source.directory}"
        check_same_tokens(name, source, tokenizer)
    with _memory_for(name):
        return load(name, source, model, config)


@contextmanager
def _memory_for(name: str) -> Iterator[None]:
    """ValueError, with the draft's name, where its weights do not fit beside the model's."""
    try:
        yield
    except (ModelTooLarge, torch.OutOfMemoryError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{name} does not fit beside the model: {reason}; or draft with method='ngram'") from None


def drafter_of(
    draft: Draft | None, options: SpeculativeConfig, decoding: DecodeGraph, max_seq_len: int, rows: int
) -> Drafter:
    """Drafter for the batch slots of `decoding`; without a draft by look-up.

    rows  of the model's longest pass of prompts
    """
    model, slots, newest = decoding.pipeline.model, decoding.slots, decoding.tokens
    if draft is None:
        looked_up = options.prompt_lookup_min, options.prompt_lookup_max
        return NgramDrafter(slots, newest, max_seq_len, *looked_up, fused=model.runs_kernels)
    if isinstance(draft, Decoder):
        return ModelDrafter(draft, slots, newest, max_seq_len, decoding.page_size)
    rows = max(rows, len(newest) * (options.num_speculative_tokens + 1))
    return HiddenDrafter(draft, model, slots, newest, decoding.page_size, rows)


def check_same_tokens(name: str, source: Checkpoint, tokenizer: Tokenizer | None) -> None:
    """ValueError where a draft's tokenizer gives a token another id than the model's."""
    if tokenizer is None or not has_tokenizer(source.directory):
        return
    theirs, ours = load_tokenizer(source.directory).get_vocab(), tokenizer.get_vocab()
    if (odd := next((token for token in theirs if theirs[token] != ours.get(token)), None)) is not None:
        raise ValueError(
            f"{name}: {odd!r} is token id {theirs[odd]} there and {ours.get(odd)} of the model; pass one of the same tokenizer"
        )


def _load_mtp(model: Decoder, checkpoint: Checkpoint | None, config: EngineConfig) -> Mtp:
    options = {"positions": config.max_seq_len, "kv_cache_dtype": config.kv_cache_dtype}
    if checkpoint is None:  # as published heads of quantized models are
        head = Mtp(model, quantized=model.config.quantization is not None, **options).fill_dummy()
    else:
        head = Mtp.of(checkpoint, model, **options)
    if config.speculative.draft_head == "fp8":
        check_e4m3('draft_head="fp8"', model.team.caps)
        head.choose_in_fp8()
    return head


def _load_model(name: str, source: Checkpoint | DecoderConfig, model: Decoder, config: EngineConfig) -> Decoder:
    sizes = source if isinstance(source, DecoderConfig) else DecoderConfig.of(source)
    if sizes.vocab_size > model.config.vocab_size:
        raise ValueError(
            f"{name} has {sizes.vocab_size} token ids and the model {model.config.vocab_size}; pass one of the same tokenizer"
        )
    if sizes.max_position_embeddings < config.max_seq_len:
        raise ValueError(
            f"{name} has {sizes.max_position_embeddings} positions, and max_seq_len={config.max_seq_len}; lower that"
        )
    if sizes.linear_attention is not None:
        raise ValueError(
            f"{name} has gated delta nets, whose states take no token twice; draft with method='mtp' or 'ngram', or a model of "
            f"attention layers alone"
        )
    taken = sum(weight.nbytes for weight in model.parameters())
    check_memory(sizes, model.team, model.dtype, range(sizes.num_hidden_layers), taken=taken)
    draft = Decoder(
        replace(sizes, max_position_embeddings=config.max_seq_len),
        model.team,
        mode=model.mode,
        dtype=model.dtype,
        fused=config.fused,
        kv_cache_dtype=config.kv_cache_dtype,
        context_parallel=model.context_parallel,
    )
    if isinstance(source, DecoderConfig):
        return draft.fill_dummy()
    draft.load(source, None, model.team)
    return draft


def _load_eagle3(name: str, source: Checkpoint | Eagle3Config, model: Decoder, config: EngineConfig) -> Eagle3:
    sizes = source
    try:
        if isinstance(source, Checkpoint):
            sizes = Eagle3Config.from_dict(source.config)
        head = Eagle3(sizes, model, positions=config.max_seq_len, kv_cache_dtype=config.kv_cache_dtype)
    except ValueError as error:
        raise type(error)(f"{name}: {error}") from None
    if isinstance(source, Checkpoint):
        head.load(source)
        return head
    return head.fill_dummy()
