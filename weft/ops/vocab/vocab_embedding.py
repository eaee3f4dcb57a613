"""vocab_embedding: one rank's share of a vocabulary-parallel embedding; other ranks' rows are 0."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.ops.case import BF16, FP32, Case, Draw, Inputs
from weft.ops.local import capabilities_of, check_like, check_shape
from weft.ops.op import UNCHANGED, Op, register
from weft.ops.registration import FLOATS, check_count
from weft.runtime.arithmetic import cdiv
from weft.runtime.capabilities import launch_options
from weft.runtime.team.team import Team

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
    check_like("vocab_embedding", "tokens", tokens, weight.device, (torch.int64,), ("T",))
    return VOCAB_EMBEDDING.dispatch(tokens, weight, first)


class VocabEmbedding(Op):
    name, alias = "vocab_embedding", "vocab-embedding"
    bits = UNCHANGED
    no_plan = "one kernel; a program copies a block of a row"

    def inputs(self, case: Case, rank: int, draw: Draw) -> Inputs:
        """Token ids below 3 * rows and the weight of the second third. sizes: tokens, rows, H."""
        tokens, rows, width = case.sizes
        ids = (draw.own("tokens", (tokens,), dtype=torch.int64) + 100) * 7 % (3 * rows)
        return ids, draw.own("weight", (rows, width))

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> torch.Tensor:
        tokens, weight = by_rank[rank]
        return torch.cat((torch.zeros_like(weight), weight, torch.zeros_like(weight)))[tokens]

    def call(self, case: Case, team: Team, tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return vocab_embedding(tokens, weight, weight.shape[0])

    def cases(self) -> Iterator[Case]:
        for dtype in (BF16, FP32):
            for sizes in ((1, 4, 8), (7, 5, 1030), (40, 100, 96), (0, 3, 8)):
                yield self.case(1, dtype, sizes)

    def forward(self, tokens: torch.Tensor, weight: torch.Tensor, first: int) -> torch.Tensor:
        x = weight.new_empty((tokens.shape[0], weight.shape[1]))
        if x.numel() > 0:
            grid, options = (x.shape[0], cdiv(x.shape[1], BLOCK)), launch_options(capabilities_of(x.device))
            arguments = tokens.contiguous(), weight.contiguous(), x, first, weight.shape[0]
            vocab_embedding_kernel[grid](*arguments, WIDTH=x.shape[1], BLOCK=BLOCK, **options)
        return x

    def fake(self, tokens: torch.Tensor, weight: torch.Tensor, first: int) -> torch.Tensor:
        return weight.new_empty((tokens.shape[0], weight.shape[1]))


VOCAB_EMBEDDING = register(VocabEmbedding())
