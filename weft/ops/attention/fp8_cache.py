"""A paged cache in fp8 e4m3, with one scale for a layer's keys and one for its values.

byte = x / scale, saturated at 448, rounded to the nearest even            x: a key or value, rounded to the dtype of q
x    = byte * scale                                                        scales: fp32, 1 element each, on the device, positive
"""

from __future__ import annotations

import torch

from weft.kernels.fp8 import E4M3, check_e4m3
from weft.kernels.paged_cache import LARGEST, PagedCache
from weft.ops.local import capabilities_of
from weft.ops.registration import HALVES


def check_queries(op: str, q: torch.Tensor, k_scale: torch.Tensor | None) -> None:
    """ValueError for queries of 32 bits with an fp8 cache."""
    if k_scale is not None and q.dtype not in HALVES:
        raise ValueError(f"{op}: q.dtype={q.dtype} with k_scale and v_scale; an fp8 cache is for fp16 and bf16 queries")


def cache_of(
    op: str, keys: torch.Tensor, values: torch.Tensor, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None
) -> PagedCache:
    """A checked cache as kernels take it. ValueError for fp8 on a GPU without conversions."""
    if k_scale is not None:
        check_e4m3(op, capabilities_of(keys.device))
    return PagedCache(keys, values, k_scale, v_scale)


def to_bytes(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """e4m3 bytes of ``x`` by torch, the same bits as kernels write."""
    return (x.float() / scale).clamp(-LARGEST.value, LARGEST.value).to(E4M3)


def quantized_cache(keys: torch.Tensor, values: torch.Tensor, *more: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(keys and values in e4m3, ``more``, k_scale, v_scale), for cases."""
    k_scale, v_scale = (torch.tensor([scale], device=keys.device) for scale in (0.037, 0.021))
    return to_bytes(keys, k_scale), to_bytes(values, v_scale), *more, k_scale, v_scale


def read_back(keys: torch.Tensor, values: torch.Tensor, *scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a cache, in fp64 if it is in fp8."""
    if not scales:
        return keys, values
    k_scale, v_scale = scales
    return keys.double() * k_scale, values.double() * v_scale
