"""Workspaces of moe_dispatch and moe_combine, and what their kernels share.

Tokens of a rank go in chunks of CHUNK. Every rank sends a flag for each chunk to every other rank, also for chunks without a
row for it, so no rank needs to know how many rows will come.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.kernels.fp8 import COLUMNS, scales_of
from weft.ops.knobs import check_knobs, either, halved, knob, powers
from weft.ops.moe.routing import Routing
from weft.runtime.arithmetic import cdiv, next_power_of_2
from weft.runtime.capabilities import launch_options
from weft.runtime.codec import exchangeable
from weft.runtime.launching import launch_of
from weft.transport.copy_channel import MAX_CHUNKS
from weft.transport.halves import Half, Halves

if TYPE_CHECKING:
    from weft.runtime.team.team import Team

# Relative sizes of pieces, from few large ones to many small ones.
PIECES = (1,), (1, 1), (1, 3), (1, 2, 1), (1, 1, 1, 1), (1, 3, 3, 1), (1, 2, 4, 4, 4, 1), (1, 1, 1, 1, 1, 1, 1, 1)
# Most programs of a kernel that pushes rows.
MAX_PROGRAMS = 256
# Tokens whose rows of 16 bits begin at a multiple of 16 bytes, whatever their width.
ALIGNED_TOKENS = 8


class DispatchArguments(NamedTuple):
    """Arguments of moe_dispatch.

    experts  of all ranks together
    kept     rows, ids and weights of the result are new tensors, not receive buffers
    tp       neighbouring ranks that hold slices of the same experts
    """

    x: torch.Tensor
    routing: Routing
    experts: int
    max_tokens: int
    fp8: bool
    kept: bool
    team: str
    algorithm: str
    tp: int = 1


@exchangeable
@dataclass(frozen=True, slots=True, kw_only=True)
class PushRows:
    """One kernel pushes to each rank the rows of tokens that chose an expert there.

    chunk  tokens under one flag; block: columns at a time; both powers of two
    """

    chunk: int = knob(8, powers(), halved())
    block: int = knob(1024, powers(), halved(16))
    num_warps: int = knob(8, powers(), halved(1, 16))
    __post_init__ = check_knobs


def pieces_knob(*default: int) -> Any:
    """Knob of relative sizes of 1 to MAX_CHUNKS pieces."""
    rule = f"are not 1 to {MAX_CHUNKS} relative sizes of at least 1"

    def legal(pieces: tuple[int, ...]) -> str | None:
        return None if 1 <= len(pieces) <= MAX_CHUNKS and min(pieces) >= 1 else rule

    return knob(default, legal, either(*PIECES))


def piece_ends(pieces: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    """Number of ``tokens`` up to the end of each piece of these relative sizes; none is empty.

    All but the last are multiples of ALIGNED_TOKENS.
    """
    shares = accumulate(pieces)
    ends = (cdiv(tokens * share, sum(pieces) * ALIGNED_TOKENS) * ALIGNED_TOKENS for share in shares)
    return tuple(sorted({min(end, tokens) for end in ends} - {0}))


def mailboxes(team: Team, chunks: int, shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> Halves:
    """Symmetric buffers [2, *shape] of these names, with a flag for each chunk of a rank. Collective."""
    buffers = tuple(team.empty((2, *shape), dtype, name=name) for name, (shape, dtype) in shapes.items())
    return Halves.make(team, buffers, team.size, chunks, MAX_PROGRAMS)


class Sizes(NamedTuple):
    """Compile-time sizes of an exchange.

    tokens   most of a rank
    width    elements of a row
    choices  k; padded: k or the next power of two
    experts  of each rank
    chunk, block  of the design
    scales   of a row that is sent in fp8; 0: rows are sent as they are
    tp       neighbouring ranks that hold slices of the same experts
    """

    tokens: int
    width: int
    choices: int
    padded: int
    experts: int
    chunk: int
    block: int
    scales: int = 0
    tp: int = 1

    @classmethod
    def of(
        cls, design: Any, tokens: int, width: int, choices: int, experts: int, *, fp8: bool = False, tp: int = 1
    ) -> Sizes:
        block = min(design.block, max(COLUMNS.value if fp8 else 16, next_power_of_2(width)))
        if fp8 and block < COLUMNS.value:
            raise ValueError(f"block={design.block} is less than the {COLUMNS.value} columns of a scale of fp8 rows")
        scales = scales_of(width) if fp8 else 0
        return cls(tokens, width, choices, next_power_of_2(choices), experts, design.chunk, block, scales, tp)

    @property
    def chunks(self) -> int:
        return cdiv(self.tokens, self.chunk)


@triton.jit
def chosen_of(ids, token, there, rank, SIZES: tl.constexpr):
    """[chunk, 1]: True for tokens that chose an expert of ``rank``.

    ids [tokens, k]; there: mask [chunk] of tokens
    """
    choice = tl.arange(0, SIZES.padded)[None, :]
    at = ids + token.to(tl.int64)[:, None] * SIZES.choices + choice
    id = tl.load(at, mask=there[:, None] & (choice < SIZES.choices), other=-1)
    return tl.max(((id >= 0) & (id // SIZES.experts == rank // SIZES.tp)).to(tl.int32), axis=1, keep_dims=True) > 0


@triton.jit
def copy_chosen_kernel(rows, ids, out, tokens, team, SIZES: tl.constexpr):
    """out[t] = rows[t] of tokens that chose an expert of this rank, 0 of others, whose rows are not read

    grid: (cdiv(tokens, SIZES.chunk),). rows, out [tokens, H]; ids [tokens, k]
    """
    token = tl.program_id(0) * SIZES.chunk + tl.arange(0, SIZES.chunk)
    there = token < tokens
    wl.follow_previous_kernel()
    chosen = chosen_of(ids, token, there, wl.rank(team), SIZES)
    for begin in range(0, SIZES.width, SIZES.block):
        column = begin + tl.arange(0, SIZES.block)[None, :]
        at, inside = token.to(tl.int64)[:, None] * SIZES.width + column, column < SIZES.width
        row = tl.load(rows + at, mask=chosen & inside, other=0.0)
        tl.store(out + at, row, mask=there[:, None] & inside)


def copy_chosen(design: PushRows, sizes: Sizes, team: Team, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """New tensor like ``rows`` [tokens, H], with zeros for tokens that chose no expert of this rank."""
    out, options = torch.empty_like(rows), {"num_warps": design.num_warps, **launch_options(team.caps)}
    launch = launch_of(team, copy_chosen_kernel, (sizes, design), lambda: {"SIZES": sizes, **options})
    launch(cdiv(len(rows), sizes.chunk), rows, ids, out, len(rows), team.view)
    return out


def padded(x: torch.Tensor, tokens: int, fill: int) -> torch.Tensor:
    """``x`` [T, n] with rows of ``fill`` behind it, [tokens, n]; ``x`` itself if T = tokens."""
    return x if len(x) == tokens else torch.nn.functional.pad(x, (0, 0, 0, tokens - len(x)), value=fill)


def launch_rows(
    kernel: Any,
    design: PushRows,
    sizes: Sizes,
    team: Team,
    tensors: tuple[torch.Tensor | None, ...],
    T: int,
    buffers: Any,
    half: Half,
) -> None:
    """Launch a kernel of ``PushRows`` with as many programs as chunks, or as can be resident."""
    programs = min(sizes.chunks, MAX_PROGRAMS, team.max_programs(design.num_warps))
    launch = launch_of(
        team,
        kernel,
        (sizes, design),
        lambda: {
            "SIZES": sizes,
            "CHUNKS": sizes.chunks,
            "num_warps": design.num_warps,
            "launch_cooperative_grid": True,
            **launch_options(team.caps),
        },
    )
    dense = (None if tensor is None else tensor.contiguous() for tensor in tensors)
    launch(programs, *dense, T, buffers, half, team.view)
