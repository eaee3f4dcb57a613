"""The one GEMM body, and what its operands must be.

``C[M, N] = A[M, K] @ B[N, K].T``, accumulated in fp32. Operands are read through tensor descriptors (TMA on NVIDIA from
sm_90 on, ordinary loads elsewhere); where a row does not start on 16 bytes, through masked pointer loads, chosen by a
constexpr.

Along K the accumulator has half of all registers, and what is computed before it for use behind it would be spilled. So
addresses are computed where they are used (``wl.zero_here``), and a large tile is finished in ``halves``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

import weft.language as wl
from weft.ops.arithmetic import next_power_of_2
from weft.ops.gemm_config import GemmConfig
from weft.ops.registration import FLOATS, check_is_tensor
from weft.ops.tiles import MAX_PARTS, Tiles, contributors, whole_places

if TYPE_CHECKING:
    from weft.runtime.team import Team

T = TypeVar("T")
# Elements of the smallest output tile: how many tiles, each with its signal, a buffer can hold.
SMALLEST_TILE = 16 * 16


@triton.jit
def gemm_tile(
    a, a_stride, a_rows, b, b_stride, b_rows, row, column, K, first, last, source, target, left,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DESCRIPTORS: tl.constexpr,
    PIECE: tl.constexpr,
):  # fmt: skip
    """acc[BLOCK_M, BLOCK_N] (fp32) = a[row : row + BLOCK_M, k] @ b[column : column + BLOCK_N, k].T over the steps
    first .. last - 1 of BLOCK_K along k

    a, b: tensor descriptors over [a_rows, K] and [b_rows, K] if DESCRIPTORS, else pointers to rows that are a_stride
    and b_stride elements apart. Rows outside count as zeros. The order of additions depends on BLOCK_K and ``first``.

    Along the way it copies target[0:left] = source[0:left], PIECE elements a step and the rest at the end, so that a
    link takes them evenly. ``source`` is memory of this program, which a CTA barrier has made readable. 0: no copy.
    """
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    moved = 0
    if PIECE > 0:
        lanes = tl.arange(0, PIECE)
        piece = tl.load(source + lanes, mask=lanes < left, other=0.0)
    if DESCRIPTORS:
        for k in range(first * BLOCK_K, last * BLOCK_K, BLOCK_K):
            acc = tl.dot(a.load([row, k]), b.load([column, k]).T, acc, input_precision="ieee")
            if PIECE > 0:
                # Loaded a step ago: the tensor cores do not wait for it.
                tl.store(target + moved + lanes, piece, mask=lanes < left - moved)
                moved += PIECE
                piece = tl.load(source + moved + lanes, mask=lanes < left - moved, other=0.0)
    else:
        m, n, depth = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
        a_stride += 16 * wl.zero_here()
        b_stride += 16 * wl.zero_here()
        # 64-bit to the tile, 32-bit in it: half the registers of a pointer for each element.
        a_tile = a + tl.cast(row, tl.int64) * a_stride
        b_tile = b + tl.cast(column, tl.int64) * b_stride
        for k in range(first * BLOCK_K, last * BLOCK_K, BLOCK_K):
            deep = k + depth < K
            x_mask = (m < a_rows - row)[:, None] & deep[None, :]
            y_mask = (n < b_rows - column)[None, :] & deep[:, None]
            x = tl.load(a_tile + (m[:, None] * a_stride + (k + depth)[None, :]), mask=x_mask, other=0.0)
            y = tl.load(b_tile + (n[None, :] * b_stride + (k + depth)[:, None]), mask=y_mask, other=0.0)
            acc = tl.dot(x, y, acc, input_precision="ieee")
    if PIECE > 0:
        # All at once as far as registers go: each round is a trip to the L2 and back.
        REST: tl.constexpr = min(BLOCK_M * BLOCK_N, 8192)
        source += 16 * wl.zero_here()
        while moved < left:
            at = moved + tl.arange(0, REST)
            tl.store(target + at, tl.load(source + at, mask=at < left, other=0.0), mask=at < left)
            moved += REST
    return acc


@triton.jit
def leave_part(
    acc, scratch, tickets, place, tiles, whole, depth,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Leaves this program's part of a split tile in ``scratch``; whether it was the last, who puts them together.

    scratch  fp32 [programs, tile]: every program's part
    tickets  [split tiles], 0: how many parts are there. Left as 0 for the next kernel of this stream
    """
    low, end = contributors(place, tiles, whole, depth)
    scratch += 16 * wl.zero_here()
    mine = scratch + tl.program_id(0).to(tl.int64) * (BLOCK_M * BLOCK_N)
    tl.store(mine + packed(BLOCK_M, BLOCK_N, BLOCK_N), acc)
    wl.gather_stores()
    ticket = tl.atomic_add(tickets + (place - whole), 1, sem="acq_rel", scope="gpu")
    is_last = ticket == end - low - 1
    if is_last:
        tl.store(tickets + (place - whole), 0)
    return is_last


@triton.jit
def join_parts(
    scratch, place, row, tiles, whole, depth,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rows row .. row + ROWS - 1 of the split tile, fp32: its parts added up by program, for the last program only."""
    low, end = contributors(place, tiles, whole, depth)
    scratch += row * BLOCK_N
    x = tl.load(scratch + low.to(tl.int64) * (BLOCK_M * BLOCK_N) + packed(ROWS, BLOCK_N, BLOCK_N))
    for other in tl.range(low + 1, end, num_stages=1):
        x += tl.load(scratch + other.to(tl.int64) * (BLOCK_M * BLOCK_N) + packed(ROWS, BLOCK_N, BLOCK_N))
    return x


@triton.jit
def store_tile(out, x, row, column, first_row, rows, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """out[first_row + row :, column :] = x, cut off at ``rows`` rows (counted from ``first_row``) and N columns.

    ``out``: rows of N elements, one after the other.
    """
    N += 16 * wl.zero_here()
    m = row + tl.arange(0, BLOCK_M)
    n = column + tl.arange(0, BLOCK_N)
    at = out + (first_row + m).to(tl.int64)[:, None] * N + n[None, :]
    tl.store(at, x.to(out.dtype.element_ty), mask=(m < rows)[:, None] & (n < N)[None, :])


@triton.jit
def packed(ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Offsets of the first ROWS rows and COLUMNS columns of a tile of BLOCK_N columns where tiles lie whole, one behind the
    other: no masks, every row on 16 bytes."""
    return tl.arange(0, ROWS)[:, None] * BLOCK_N + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def halves(x):
    """The left and the right columns of a tile. A thread has some of both, so that nothing is moved."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


def check_operands(op: str, a: torch.Tensor, b: torch.Tensor, device: torch.device | None, name: str = "a") -> None:
    """ValueError unless a[., K] and b[N, K] are matrices of one supported dtype on ``device`` (None: on a's)."""
    try:
        fits = a.dtype in FLOATS and a.dtype == b.dtype and a.device == b.device and a.device == (device or a.device)
        fits = fits and a.dim() == 2 == b.dim() and 0 not in a.shape and 0 not in b.shape and a.shape[1] == b.shape[1]
    except (AttributeError, TypeError):
        fits = False
    if not fits:
        _refuse_operands(op, a, b, device, name)


def _refuse_operands(op: str, a: torch.Tensor, b: torch.Tensor, device: torch.device | None, name: str) -> None:
    for label, x in ((name, a), ("b", b)):
        check_is_tensor(op, label, x)
        if x.dim() != 2 or 0 in x.shape:
            raise ValueError(
                f"{op}: {label} has shape {tuple(x.shape)}; pass a matrix with at least one row and column"
            )
        if x.device != (device := device or x.device):
            raise ValueError(f"{op}: {label} is on {x.device}, not on {device}; move it with {label}.to('{device}')")
    if a.dtype != b.dtype or a.dtype not in FLOATS:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
        raise ValueError(f"{op}: {name}.dtype={a.dtype} and b.dtype={b.dtype} must be the same one of {allowed}")
    raise ValueError(
        f"{op}: {name} has K={a.shape[1]} columns and b has {b.shape[1]}; b is [N, K], a row for each output column"
    )


def check_design(op: str, config: GemmConfig, *designs: str) -> None:
    if config.design not in designs:
        raise ValueError(f"{op}: design={config.design!r} is not one of {', '.join(map(repr, designs))}")


def for_one_rank(config: GemmConfig | None) -> GemmConfig | None:
    """What ``matmul`` makes of a fused op's config: a library GEMM for each rank's rows is the library's GEMM."""
    return replace(config, design="library") if config is not None and config.design == "segments" else config


def agree(op: str, team: Team, given: dict[str, Any]) -> None:
    """``given``, values by their names, is the same on all ranks, or a ValueError on all of them: with other tiles, or by
    another design, they would wait for each other for ever.

    The ranks meet once for each set of values; one that comes with new ones alone is told by the meeting.
    """
    seen = team.workspace("gemm agreed", set)
    key = op, *given.values()
    if key in seen:
        return
    everyone = team.exchange({"op": op, **given})
    different = [
        f"{name} is {', '.join(f'{value} on rank {rank}' for rank, value in enumerate(values))}"
        for name in ("op", *given)
        if len(set(values := [of_rank.get(name) for of_rank in everyone])) > 1
    ]
    if different:
        raise ValueError(f"{op}: {'; '.join(different)}; pass the same on all ranks")
    seen.add(key)


def rows_contiguous(x: torch.Tensor) -> torch.Tensor:
    """``x`` where its rows are dense and do not overlap (a slice of rows or columns is), else a dense copy."""
    dense = x.shape[1] == 1 or x.stride(1) == 1
    apart = x.shape[0] == 1 or x.stride(0) >= x.shape[1]
    return x if dense and apart else x.contiguous()


def row_stride(x: torch.Tensor) -> int:
    """Elements from row to row. The stride of a single row means nothing: one that any descriptor takes."""
    return x.stride(0) if x.shape[0] > 1 else -(-x.shape[1] // 16) * 16


def can_describe(*matrices: torch.Tensor) -> bool:
    """Whether tensor descriptors reach them all: base and every row on 16 bytes."""
    return all(x.data_ptr() % 16 == 0 and row_stride(x) * x.element_size() % 16 == 0 for x in matrices)


def operand(x: torch.Tensor, block_rows: int, block_k: int, descriptors: bool) -> Any:
    """What a kernel is given for the matrix ``x``: a descriptor of [block_rows, block_k] blocks, or ``x`` itself."""
    if not descriptors:
        return x
    return TensorDescriptor(x, list(x.shape), [row_stride(x), 1], [block_rows, block_k])


def operands(a: torch.Tensor, b: torch.Tensor, config: GemmConfig) -> tuple[tuple, bool]:
    """(a, a_stride, b, b_stride) as a kernel is given them, and whether they are descriptors."""
    descriptors = can_describe(a, b)
    one = operand(a, config.block_m, config.block_k, descriptors), row_stride(a)
    return (*one, operand(b, config.block_n, config.block_k, descriptors), row_stride(b)), descriptors


def grown_workspace(team: Team, key: Hashable, size: int, make: Callable[[int], T]) -> T:
    """The team's workspace under ``key`` that holds ``size`` elements; ``make(capacity)`` where none is large enough.

    Capacities are powers of two, so all that were ever made take less than twice the largest. None is given back: a
    captured CUDA graph may go on using it. Calls of any shape share one: the kernels prove reuse from call to call.
    """
    by_capacity = team.workspace(key, dict)
    capacity = max(by_capacity, default=0)
    if capacity < size:
        capacity = capacity_for(size)
        by_capacity[capacity] = make(capacity)
    return by_capacity[capacity]


def capacity_for(size: int) -> int:
    """Of a workspace that is made for ``size`` elements."""
    return max(1 << 16, next_power_of_2(size))


def programs(team: Team, tiles: Tiles, config: GemmConfig) -> int:
    """Programs of a fused kernel: all are resident, one an SM, as each takes most of its shared memory."""
    most = min(team.caps.sms, team.max_programs(config.num_warps))
    return min(most, tiles.count * (MAX_PARTS.value if config.split else 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Where split tiles are put together, and the finished tile that each program is sending away."""

    scratch: torch.Tensor
    tickets: torch.Tensor
    outbox: torch.Tensor


def parts_for(team: Team, config: GemmConfig, dtype: torch.dtype) -> Parts:
    """The team's ``Parts`` for tiles of this size, all zero between kernels of its stream."""
    tile = config.block_m * config.block_n

    def make() -> Parts:
        sms = team.caps.sms
        return Parts(
            scratch=team.local((sms, tile), torch.float32),
            tickets=team.local((sms,), torch.int32),
            outbox=team.local((sms, tile), dtype),
        )

    return team.workspace(("gemm parts", tile, dtype), make)


def whole_for(tiles: Tiles, programs: int, config: GemmConfig, least: int = 0) -> int:
    """How many places of a kernel of so many programs are computed whole."""
    return whole_places(tiles.count, programs, least) if config.split else tiles.count


def constants(config: GemmConfig, descriptors: bool, arch: str) -> dict[str, Any]:
    """The keyword arguments of every GEMM kernel that come from its config, on a GPU of ``arch``."""
    block_k, num_warps = config.block_k, config.num_warps
    if not descriptors:
        # Single elements are loaded through registers, which the accumulator fills: a thin slice, over more threads.
        # The tile itself stays: a peer's operands may be aligned otherwise, and both must cut the output alike.
        block_k, num_warps = 16, max(num_warps, min(config.block_m * config.block_n // 2048, 8))
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": block_k,
        "DESCRIPTORS": descriptors,
        # Rows of a split tile that are put together at a time: few registers, so that all their loads are in flight.
        "ROWS": min(config.block_m, max(1, 4096 // config.block_n)),
        "PIECE": min(config.piece, config.block_m * config.block_n),
        "num_warps": num_warps,
        "num_stages": config.num_stages,
        # One program an SM: ptxas need not spill for room for more, as it does with small tiles where not told.
        **({"maxnreg": 255} if arch.startswith("sm_") else {}),
    }
