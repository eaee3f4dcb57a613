"""vocab_embedding: one rank's share of a vocabulary-parallel embedding; other ranks' rows are 0."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.ops.custom_op import custom_op
from weft.ops.local import capabilities_of, check_like, check_shape
from weft.ops.registration import FLOATS, check_count
from weft.runtime.arithmetic import cdiv
from weft.runtime.capabilities import launch_options

BLOCK = 1024


@triton.jit(do_not_specialize=["first", "rows"])
def vocab_embedding_kernel(tokens, weight, x, first, rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """x[t, :] = weight[tokens[t] - first, :] where 0 <= tokens[t] - first < rows, else 0

    grid: (tokens, cdiv(WIDTH, BLOCK)). weight [rows, WIDTH] and x [tokens, WIDTH] contiguous
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    wl.follow_previous_kernel()
    local = tl.load(tokens + token) - first
    is_local = (local >= 0) & (local < rows)
    row = tl.load(weight + local * WIDTH + column, mask=inside & is_local, other=0.0)
    tl.store(x + token * WIDTH + column, row, mask=inside)


def vocab_embedding(tokens: torch.Tensor, weight: torch.Tensor, first: int) -> torch.Tensor:
    """x[T, H]: row t is weight[tokens[t] - first] if this rank holds that row, else zeros.

    tokens  [T] int64 token ids
    weight  [rows, H], fp16, bf16 or fp32: the rows of token ids first .. first + rows - 1

    No backward. ValueError for shapes, dtypes or devices that do not fit.
    """
    check_like("vocab_embedding", "weight", weight, None, FLOATS)
    check_count("vocab_embedding", "first", first)
    check_shape("vocab_embedding", "weight", weight, ("rows", "H"))
    check_like("vocab_embedding", "tokens", tokens, weight.device, (torch.int64,))
    check_shape("vocab_embedding", "tokens", tokens, ("T",))
    return torch.ops.weft.vocab_embedding.default(tokens, weight, first)


@custom_op("vocab_embedding", backward=False)
def _vocab_embedding(tokens: torch.Tensor, weight: torch.Tensor, first: int) -> torch.Tensor:
    x = weight.new_empty((tokens.shape[0], weight.shape[1]))
    if x.numel() > 0:
        grid, options = (x.shape[0], cdiv(x.shape[1], BLOCK)), launch_options(capabilities_of(x.device))
        arguments = tokens.contiguous(), weight.contiguous(), x, first, weight.shape[0]
        vocab_embedding_kernel[grid](*arguments, WIDTH=x.shape[1], BLOCK=BLOCK, **options)
    return x


@_vocab_embedding.register_fake
def _(tokens, weight, first):
    return weight.new_empty((tokens.shape[0], weight.shape[1]))
