"""add_adapters: low-rank adapters (LoRA), added to the result of a GEMM by two kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.arguments import is_integer, quoted
from weft.kernels.operands import has_dense_rows, rows_contiguous
from weft.ops.case import BF16, FP16, FP32, Accuracy, Case, Draw, Inputs
from weft.ops.local import capabilities_of, check_like, check_shape
from weft.ops.op import Op, register
from weft.ops.registration import FLOATS
from weft.runtime.arithmetic import cdiv, next_power_of_2
from weft.runtime.capabilities import launch_options
from weft.runtime.launching import launch_on
from weft.runtime.team.team import Team

RANKS = 16, 32, 64
MOST_PARTS = 3
# Columns of x that a program of the first kernel takes at least, and programs from which it takes all.
FEWEST_COLUMNS, ENOUGH_PROGRAMS = 512, 64
# Rows of a program: of few rows as many as tensor cores take.
FEW_ROWS, ROWS = 16, 64
COLUMNS = 64
# Elements of A, and of B: the kernels count them in 32 bits.
MOST_ELEMENTS = 2**31


@triton.jit(do_not_specialize=["T", "count"])
def shrink_adapters_kernel(
    x,
    stride,
    adapters,
    A,
    inner,
    T,
    K,
    count,
    chunk,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """inner[s, t] = A[a] @ x[t], over the columns s * chunk .. of x        a = adapters[t], zeros for -1

    grid: (row tiles * WIDTH / RANK, splits), the parts of A first

    x [T, K], rows ``stride`` apart; A [count, WIDTH, K]; inner fp32 [splits, T, WIDTH], which expand_adapters_kernel adds up in
    the order of s. A tile reads the adapters of its rows alone.
    """
    parts: tl.constexpr = WIDTH // RANK
    row = tl.program_id(0) // parts * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % parts * RANK + tl.arange(0, RANK)
    begin = tl.program_id(1) * chunk
    end = tl.minimum(begin + chunk, K)
    wl.follow_previous_kernel()
    numbers = tl.load(adapters + row, mask=row < T, other=-1)
    total = tl.zeros([ROWS, RANK], tl.float32)
    for number in range(count):
        chosen = numbers == number
        if tl.max(chosen.to(tl.int32), axis=0) > 0:
            for at in range(begin, end, BLOCK_K):
                k = at + tl.arange(0, BLOCK_K)
                inside = k < end
                from_x = x + row.to(tl.int64)[:, None] * stride + k[None, :]
                rows = tl.load(from_x, mask=chosen[:, None] & inside[None, :], other=0.0)
                from_A = A + (number * WIDTH + column)[None, :] * K + k[:, None]
                weight = tl.load(from_A, mask=inside[:, None], other=0.0)
                total = tl.dot(rows, weight, total, input_precision="ieee")
    to = inner + (tl.program_id(1) * T + row)[:, None] * WIDTH + column[None, :]
    tl.store(to, total, mask=(row < T)[:, None])


@triton.jit(do_not_specialize=["T", "count", "splits"])
def expand_adapters_kernel(
    y,
    stride,
    adapters,
    B,
    scale,
    inner,
    T,
    N,
    count,
    splits,
    first_end,
    second_end,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """y[t, n] += scale[a] * B[a, n] @ inner[t, part of n]        a = adapters[t]

    grid: (row tiles * column tiles,), along N first. Rows of -1 stay as they are, bit for bit.

    y [T, N], rows ``stride`` apart; B [count, N, RANK]; scale fp32 [count]; inner as of shrink_adapters_kernel, added up in
    fp32 and rounded to y's dtype once. The columns of part p end at first_end, second_end, N. y is read, added to in fp32, and
    rounded once.
    """
    across = tl.cdiv(N, BLOCK)
    row = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    left = tl.program_id(0) % across * BLOCK
    column = left + tl.arange(0, BLOCK)
    place = tl.arange(0, RANK)
    wl.follow_previous_kernel()
    numbers = tl.load(adapters + row, mask=row < T, other=-1)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for number in range(count):
        chosen = numbers == number
        if tl.max(chosen.to(tl.int32), axis=0) > 0:
            factor = tl.load(scale + number)
            for part in tl.static_range(WIDTH // RANK):
                low = 0 if part == 0 else first_end if part == 1 else second_end
                high = N if part == WIDTH // RANK - 1 else first_end if part == 0 else second_end
                if (left < high) & (left + BLOCK > low):
                    summed = tl.zeros([ROWS, RANK], tl.float32)
                    for split in range(splits):
                        at = inner + (split * T + row)[:, None] * WIDTH + part * RANK + place[None, :]
                        summed += tl.load(at, mask=chosen[:, None], other=0.0)
                    at = B + (number * N + column)[None, :] * RANK + place[:, None]
                    weight = tl.load(at, mask=((column >= low) & (column < high))[None, :], other=0.0)
                    rows = summed.to(y.dtype.element_ty)
                    total += tl.dot(rows, weight, input_precision="ieee") * factor
    at = y + row.to(tl.int64)[:, None] * stride + column[None, :]
    written = (numbers >= 0)[:, None] & (column < N)[None, :]
    sums = tl.load(at, mask=written, other=0.0).to(tl.float32) + total
    tl.store(at, sums.to(y.dtype.element_ty), mask=written)


def add_adapters(
    y: torch.Tensor,
    x: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    scale: torch.Tensor,
    ends: Sequence[int],
    adapters: torch.Tensor,
) -> None:
    """y[t] += scale[a] * B[a] @ (A[a] @ x[t]), in place, with a = adapters[t]; of -1 nothing is added.

    y         [T, N], in fp16, bf16 or fp32, rows contiguous
    x         [T, K]
    A         [adapters, P * R, K]: R rows for each of P matrices, up to 3, whose columns lie side by side in y
    B         [adapters, N, R], R 16, 32 or 64: zeros pad adapters of lower ranks
    scale     [adapters] fp32
    ends      of the P matrices among the N columns, the last one N
    adapters  [T] int32, -1: none

    A @ x is rounded to the dtype of y, as peft does; T, K and P decide how K is split. No backward. ValueError for shapes,
    dtypes or devices that do not fit.
    """
    name = "add_adapters"
    check_like(name, "y", y, None, FLOATS, ("T", "N"))
    if not has_dense_rows(y):
        raise ValueError(
            f"{name}: y has strides {y.stride()}; its rows must be contiguous, since it is written in place"
        )
    for what, tensor, dtype in (
        ("x", x, y.dtype), ("A", A, y.dtype), ("B", B, y.dtype), ("scale", scale, torch.float32),
        ("adapters", adapters, torch.int32),
    ):  # fmt: skip
        check_like(name, what, tensor, y.device, (dtype,))
    check_shape(name, "B", B, ("adapters", y.shape[1], "R"))
    (count, N, rank), T = B.shape, len(y)
    if rank not in RANKS:
        raise ValueError(f"{name}: B has rank {rank}; pad it with zeros to one of {', '.join(map(str, RANKS))}")
    if (
        isinstance(ends, (str, bytes))
        or not isinstance(ends, Sequence)
        or not 0 < len(ends) <= MOST_PARTS
        or not all(map(is_integer, ends))
        or [0, *ends] != sorted({0, *ends})
        or ends[-1] != N
    ):
        raise ValueError(
            f"{name}: ends={quoted(ends)} do not ascend to N={N}; pass the end of each of up to 3 matrices"
        )
    check_shape(name, "x", x, (T, "K"))
    if x.shape[1] == 0:
        raise ValueError(f"{name}: x has shape {tuple(x.shape)}; pass 1 or more columns")
    check_shape(name, "A", A, (count, len(ends) * rank, x.shape[1]))
    for what, tensor in (("A", A), ("B", B)):
        if tensor.numel() > MOST_ELEMENTS:
            raise ValueError(
                f"{name}: {what} has {tensor.numel()} elements, more than {MOST_ELEMENTS}; pass a part of the adapters in each "
                "of several calls, with -1 for the rows of the other parts"
            )
    check_shape(name, "scale", scale, (count,))
    check_shape(name, "adapters", adapters, (T,))
    ADD_ADAPTERS.dispatch(AdapterArguments(y, x, A, B, scale, list(map(int, ends)), adapters))


class AdapterArguments(NamedTuple):
    """Arguments of add_adapters."""

    y: torch.Tensor
    x: torch.Tensor
    A: torch.Tensor
    B: torch.Tensor
    scale: torch.Tensor
    ends: Sequence[int]
    adapters: torch.Tensor


def by_torch(
    y: torch.Tensor,
    x: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    scale: torch.Tensor,
    ends: Sequence[int],
    adapters: torch.Tensor,
) -> torch.Tensor:
    """The rows that ``add_adapters`` leaves in y, in plain torch."""
    rank, added = B.shape[2], torch.zeros_like(y)
    for number in range(len(A)):
        inner, begin = x @ A[number].T, 0
        for part, end in enumerate(ends):
            of_part = inner[:, part * rank : (part + 1) * rank] @ B[number, begin:end].T * scale[number]
            added[:, begin:end] += torch.where((adapters == number)[:, None], of_part, 0.0)
            begin = end
    return y + added


class AddAdapters(Op):
    name, alias = "add_adapters", "add-adapters"
    bits = "depend on T, K and the number of matrices, which decide how K is split"
    no_plan = "two kernels, whose tiles follow from the number of rows and columns"
    mutates = ("y",)

    def inputs(self, case: Case, rank: int, draw: Draw) -> Inputs:
        """sizes: T, N, K, adapters, R. y, x, A, B, scale, adapters."""
        T, N, K, count, R = case.sizes
        parts = len(_ends(case))
        row = torch.arange(T, device=draw.device)
        adapters = ((row * 7 // 3 + 1) % (count + 1) - 1).to(torch.int32)
        y, x = draw.own("y", (T, N), 1.0), draw.own("x", (T, K), 1.0)
        A, B = draw.own("A", (count, parts * R, K), 1.0), draw.own("B", (count, N, R), 1.0)
        return y, x, A, B, 0.25 + draw.own("scale", (count,), 1.0, FP32).abs(), adapters

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> torch.Tensor:
        *numbers, adapters = by_rank[rank]
        y, x, A, B, scale = (part.double() for part in numbers)
        return by_torch(y, x, A, B, scale, _ends(case), adapters)

    def accuracy(self, case: Case) -> Accuracy:
        # The inner product is rounded, as a partial sum is, and then summed over the rank.
        return Accuracy(terms=case.sizes[2] + case.sizes[4], partials=1)

    def call(self, case: Case, team: Team, *tensors: torch.Tensor) -> torch.Tensor:
        y, *rest, adapters = tensors
        add_adapters(y, *rest, _ends(case), adapters)
        return y

    def cases(self) -> Iterator[Case]:
        joined = {"ends": (48, 64, 80)}
        for dtype, sizes, fields in (
            (FP32, (5, 80, 40, 2, 16), joined), (BF16, (5, 80, 40, 2, 16), joined), (FP16, (3, 33, 24, 1, 16), {}),
            (FP32, (1, 16, 16, 1, 16), {}), (BF16, (1, 16, 1100, 3, 32), {}), (FP32, (0, 16, 16, 1, 16), {}),
            (BF16, (70, 130, 72, 3, 16), {"ends": (64, 130)}), (BF16, (20, 70, 48, 2, 64), {"ends": (35, 70)}),
        ):  # fmt: skip
            yield self.case(1, dtype, sizes, **fields)

    def forward(self, given: AdapterArguments) -> None:
        y, x, A, B, scale, ends, adapters = given
        if y.numel() == 0:
            return
        (T, N), (count, width, K), rank = y.shape, A.shape, B.shape[2]
        x, (A, B, scale, adapters) = rows_contiguous(x), (one.contiguous() for one in (A, B, scale, adapters))
        rows = FEW_ROWS if T <= FEW_ROWS else min(ROWS, next_power_of_2(T))
        tiles = cdiv(T, rows) * len(ends)
        chunk, splits = _cut(K, tiles)
        inner = torch.empty((splits, T, width), dtype=FP32, device=y.device)
        caps = capabilities_of(y.device)

        def constants(**tile: int) -> dict[str, Any]:
            sizes = {"WIDTH": width, "ROWS": rows, "RANK": rank, **tile}
            return {**sizes, "num_warps": 4, **launch_options(caps)}

        key = width, rows, rank, y.dtype
        shrink = launch_on(y.device, shrink_adapters_kernel, key, lambda: constants(BLOCK_K=block_k(y.dtype)))
        shrink((tiles, splits), x, x.stride(0), adapters, A, inner, T, K, count, chunk)
        expand = launch_on(y.device, expand_adapters_kernel, key, lambda: constants(BLOCK=COLUMNS))
        first, second = (*ends, N, N)[:2]
        programs = cdiv(T, rows) * cdiv(N, COLUMNS)
        expand(programs, y, y.stride(0), adapters, B, scale, inner, T, N, count, splits, first, second)

    def fake(self, given):
        return None


def block_k(dtype: torch.dtype) -> int:
    """Columns of x that a program loads at a time."""
    return 32 if dtype == FP32 else 128


def _cut(K: int, tiles: int) -> tuple[int, int]:
    """(columns of x that a program takes, number of such programs for a tile), by the number of tiles."""
    splits = max(1, min(cdiv(K, FEWEST_COLUMNS), cdiv(ENOUGH_PROGRAMS, tiles)))
    chunk = cdiv(cdiv(K, splits), 128) * 128
    return chunk, cdiv(K, chunk)


def _ends(case: Case) -> tuple[int, ...]:
    return case.field("ends") or (case.sizes[1],)


ADD_ADAPTERS = register(AddAdapters())
