"""A paged KV cache: the page and the address of a token, and the write of a new one.

Token t of a sequence is at offset t % PAGE of the page that entry t // PAGE of the sequence's row of the page table names.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

# Largest number of e4m3.
LARGEST: tl.constexpr = tl.constexpr(448.0)


class PagedCache(NamedTuple):
    """Keys and values of one layer, each contiguous, [pages, heads, page, dim] by ``CacheSizes``.

    k_scale, v_scale  of an fp8 cache, fp32 [1] each: a key is its byte times k_scale, a value its byte times v_scale; None: the
                      cache has 16 or 32 bits an element, and no scales
    """

    key_pages: torch.Tensor
    value_pages: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


class CacheSizes(NamedTuple):
    """Sizes of a ``PagedCache``, a compile-time constant: KV heads, tokens a page, elements a head.

    page  0: no pages. Keys and values are [rows, heads, dim], a token's row after another's; instead of a table ``pages_at``
          and ``over_keys`` get the row (int64) where token 0 would be
    """

    heads: int
    page: int
    dim: int

    @classmethod
    def of(cls, keys: torch.Tensor) -> "CacheSizes":
        _, heads, page, dim = keys.shape
        return cls(heads, page, dim)


class Sequences(NamedTuple):
    """Sequences of a batch: the page table, int32 [B, max_pages], and int32 [B] tokens of each."""

    pages: torch.Tensor
    lengths: torch.Tensor


@triton.jit
def pages_at(table, start, end, local, PAGE: tl.constexpr):
    """Pages of tokens start + ``local``, 0 where not before ``end``; a scalar if one page holds all.

    local  a block's tokens 0 .. BLOCK - 1 in any shape, else the result's; ``start`` is a multiple of BLOCK
    """
    if PAGE == 0:
        return table
    elif local.numel <= PAGE:
        return tl.load(table + start // PAGE, mask=start < end, other=0)
    else:
        token = start + local
        return tl.load(table + token // PAGE, mask=token < end, other=0)


@triton.jit
def cell_of(page, head, offset, SIZES: tl.constexpr):
    """Element offset of the key, and of the value, of the token at ``offset`` of ``page``."""
    return ((page.to(tl.int64) * SIZES.heads + head) * SIZES.page + offset) * SIZES.dim


@triton.jit
def cells_at(page, head, start, local, SIZES: tl.constexpr):
    """Element offsets of tokens start + ``local``, whose ``page`` ``pages_at`` has given."""
    if SIZES.page == 0:
        return ((page + start) * SIZES.heads + head) * SIZES.dim + local * (SIZES.heads * SIZES.dim)
    elif local.numel <= SIZES.page:
        return cell_of(page, head, start % SIZES.page, SIZES) + local * SIZES.dim
    else:
        return cell_of(page, head, 0, SIZES) + (start + local) % SIZES.page * SIZES.dim


@triton.jit
def scale_of_scores(scale, cache):
    """``scale`` of the scores with the bytes of ``cache``: times its k_scale, if it has one."""
    if cache.k_scale is None:
        return scale
    else:
        return scale * tl.load(cache.k_scale)


@triton.jit
def as_values(mean, cache):
    """``mean`` of the bytes of ``cache`` as a mean of values: times its v_scale, if it has one."""
    if cache.v_scale is None:
        return mean
    else:
        return mean * tl.load(cache.v_scale)


@triton.jit
def as_bytes(x, scale, DTYPE: tl.constexpr):
    """e4m3 bytes of ``x`` rounded to DTYPE: x / scale, saturated, rounded to the nearest even.

    NaN stays NaN. scale  pointer to fp32 [1]
    """
    x = tl.div_rn(x.to(DTYPE).to(tl.float32), tl.load(scale))
    x = tl.where(x > LARGEST, LARGEST, tl.where(x < -LARGEST, -LARGEST, x))
    return x.to(tl.float8e4nv)


@triton.jit
def write_token(cache, cell, key, value, D: tl.constexpr, DTYPE: tl.constexpr):
    """Write the key and value [1, D] of one token; all threads of this program see them from here on.

    DTYPE  in which the token's key and value are rounded before they become bytes of an fp8 cache
    """
    cells = cell + tl.arange(0, D)[None, :]
    if cache.k_scale is not None:
        key, value = as_bytes(key, cache.k_scale, DTYPE), as_bytes(value, cache.v_scale, DTYPE)
    tl.store(cache.key_pages + cells, key.to(cache.key_pages.dtype.element_ty))
    tl.store(cache.value_pages + cells, value.to(cache.value_pages.dtype.element_ty))
    tl.debug_barrier()
