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
from weft.ops.moe.fp8_rows import COLUMNS, scales_of
from weft.ops.moe.routing import Routing
from weft.runtime.arithmetic import cdiv, next_power_of_2
from weft.runtime.capabilities import launch_options
from weft.runtime.codec import exchangeable
from weft.runtime.launching import launch_of
from weft.transport.copy_channel import MAX_CHUNKS

if TYPE_CHECKING:
    from weft.runtime.team.team import Team

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

    chunk: int = 8
    block: int = 1024
    num_warps: int = 8

    def __post_init__(self) -> None:
        check_powers(self, "chunk", "block", "num_warps")


def check_powers(design: Any, *names: str) -> None:
    """ValueError unless these fields of ``design`` are powers of two."""
    for name in names:
        value = getattr(design, name)
        if value < 1 or value & (value - 1):
            raise ValueError(f"{name}={value} is not a power of two")


def check_pieces(pieces: tuple[int, ...]) -> None:
    """ValueError unless ``pieces`` are relative sizes of 1 to MAX_CHUNKS pieces."""
    if not 1 <= len(pieces) <= MAX_CHUNKS or min(pieces) < 1:
        raise ValueError(f"pieces={pieces} are not 1 to {MAX_CHUNKS} relative sizes of at least 1")


def piece_ends(pieces: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    """Number of ``tokens`` up to the end of each piece of these relative sizes; none is empty.

    All but the last are multiples of ALIGNED_TOKENS.
    """
    shares = accumulate(pieces)
    ends = (cdiv(tokens * share, sum(pieces) * ALIGNED_TOKENS) * ALIGNED_TOKENS for share in shares)
    return tuple(sorted({min(end, tokens) for end in ends} - {0}))


class Arrivals(NamedTuple):
    """Flags of one kind of exchange, shared by its calls of one team and number of chunks.

    arrived  int32 [W * chunks], symmetric: arrived[s * chunks + c] = e, once chunk c of rank s has arrived in call e
    entered  int32 [W], symmetric: entered[s] = e, once rank s has begun call e, and so ended what it ran before
    filled   int32 [MAX_PROGRAMS], this rank's: the last call that filled this half of the buffers, a copy for each program; so
             all calls have the same number of programs
    epoch    int32 [2], this rank's: ``wl.next_epoch``
    """

    arrived: torch.Tensor
    entered: torch.Tensor
    filled: torch.Tensor
    epoch: torch.Tensor


@dataclass(slots=True, kw_only=True)
class Halves:
    """Buffers that alternate from call to call, with their flags.

    calls  number that the host has made; all ranks make the same ones
    """

    buffers: tuple[torch.Tensor, ...]
    flags: tuple[Arrivals, Arrivals]
    calls: int = 0

    @classmethod
    def make(cls, team: Team, chunks: int, shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> Halves:
        """Symmetric buffers [2, *shape] of these names. Collective."""
        buffers = tuple(team.empty((2, *shape), dtype, name=name) for name, (shape, dtype) in shapes.items())
        arrived, entered = team.signals(team.size * chunks), team.signals(team.size)
        filled, epoch = team.local((2, MAX_PROGRAMS), torch.int32), team.local(2, torch.int32)
        return cls(buffers=buffers, flags=tuple(Arrivals(arrived, entered, half, epoch) for half in filled.unbind()))

    def next(self) -> tuple[tuple[torch.Tensor, ...], Arrivals]:
        """The half of the next call: its buffers and flags.

        Torch counts it as a write, so a backward that has saved rows of an earlier call is refused.
        """
        half = self.calls % 2
        self.calls += 1
        for buffer in self.buffers:
            if not buffer.is_inference():
                torch.autograd.graph.increment_version(buffer)
        return tuple(buffer[half] for buffer in self.buffers), self.flags[half]


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
def begin_call(flags, team):
    """Number of this call, once this half of every peer's buffers may be written.

    All programs call it first.

    signals  program 0, to every peer: entered[me] = this call, once all that this rank ran before has ended
    waits    entered[peer] > filled: the peer has begun a later call than the one that filled this half last, so what it ran
             between the two has ended
    """
    world: tl.constexpr = wl.num_ranks(team)
    program, me = tl.program_id(0), wl.rank(team)
    now = wl.next_epoch(flags.epoch)
    last = tl.load(flags.filled + program)
    if program == 0:
        for step in range(1, world):
            wl.notify(flags.entered + me, (me + step) % world, now, team)
    for step in range(1, world):
        wl.wait(flags.entered + (me + step) % world, last + 1, team)
    return now


@triton.jit
def await_chunk(flags, chunk, CHUNKS: tl.constexpr, now, team):
    """Acquire: returns once every peer has announced ``chunk`` in call ``now``.

    It pairs with their notifies of ``arrived``: what they stored before is visible.
    """
    world: tl.constexpr = wl.num_ranks(team)
    for step in range(1, world):
        wl.wait(flags.arrived + (wl.rank(team) + step) % world * CHUNKS + chunk, now, team)


@triton.jit
def end_call(flags, now):
    """End this program's part of call ``now``. All programs call it last."""
    tl.store(flags.filled + tl.program_id(0), now)
    wl.advance_epoch(flags.epoch, now)


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
    flags: Arrivals,
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
    launch(programs, *dense, T, buffers, flags, team.view)
