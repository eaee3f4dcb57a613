"""Parts of draft heads: a layer beside a model, on the same ranks and pages."""

from __future__ import annotations

from dataclasses import replace

from weft.layers.norm import RMSNorm
from weft.models.config import DecoderConfig
from weft.models.decoder import Decoder
from weft.parallel.modes import Mode


def body_beside(sizes: DecoderConfig, model: Decoder, positions: int, kv_cache_dtype: str, index: int = 1) -> Decoder:
    """One layer beside `model`, as a stage of a decoder without ends.

    positions  tokens of the longest sequence
    index      of the layer, in names of tensors

    Its window is the model's longest one if that is shorter: pages that the model has given back are read no more.
    """
    window = model.config.attention.longest_window
    if window is not None:
        window = min(window, sizes.attention.longest_window or window)
    else:
        window = sizes.attention.longest_window
    options = replace(sizes.attention, windows=(window,))
    sizes = replace(sizes, num_hidden_layers=index + 2, max_position_embeddings=positions, attention=options)
    return Decoder(
        sizes,
        model.team,
        mode=shared_mode(model),
        dtype=model.dtype,
        fused=model.fused,
        kv_cache_dtype=kv_cache_dtype,
        context_parallel=model.context_parallel,
        layers=range(index, index + 1),
    )


def shared_mode(model: Decoder) -> Mode:
    """Mode of a head beside `model`: all ranks have all rows."""
    return "reference" if model.mode == "reference" else "replicated"


def norm_beside(sizes: DecoderConfig, model: Decoder) -> RMSNorm:
    """Norm of hidden states of a head of these sizes."""
    one_plus = sizes.block.one_plus_norms
    return RMSNorm(sizes.hidden_size, sizes.rms_norm_eps, team=model.team, dtype=model.dtype, one_plus=one_plus)
