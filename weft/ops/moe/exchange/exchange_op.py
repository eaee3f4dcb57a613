"""Base of moe_dispatch and moe_combine: arguments, plans, search, cases, workspaces, shared code.

Tokens of a rank go in chunks of CHUNK. Every rank sends a flag for each chunk to every other rank, also for chunks without a
row for it, so no rank needs to know how many rows will come.
"""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.costs.choice import least
from weft.kernels.fp8 import COLUMNS, scales_of
from weft.ops.case import BF16, FP16, FP32, Case, Draw
from weft.ops.collectives.over_nodes import OverNodes
from weft.ops.knobs import design_type, halved, knob, powers
from weft.ops.moe.choices import draw_ids
from weft.ops.moe.moe_op import MoeOp, MoeShape
from weft.ops.moe.routing import Experts, Routing
from weft.ops.op import Call
from weft.ops.registration import FLOATS
from weft.plan.planned import Machine, Planned
from weft.runtime.arithmetic import cdiv, next_power_of_2
from weft.runtime.capabilities import launch_options
from weft.runtime.launching import launch_of
from weft.runtime.team.workspace import capacity_for, grown_workspace
from weft.transport.copy_channel import CopyChannel

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


# Most programs of a kernel that pushes rows.
MAX_PROGRAMS = 256


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


class CombineArguments(NamedTuple):
    """Arguments of moe_combine.

    ids, weights  of all ranks' tokens; without weights y has a row for each token [W * max_tokens, H], added up as it is
    experts       of all ranks together
    tp            neighbouring ranks that hold slices of the same experts
    """

    y: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor | None
    experts: int
    tokens: int
    team: str
    algorithm: str
    tp: int = 1

    def held(self, team: Team) -> Experts:
        """Experts of this rank."""
        return Experts.grouped(self.experts, team.rank, team.size // self.tp, self.tp)


@design_type
class PushRows:
    """One kernel pushes to each rank the rows of tokens that chose an expert there.

    chunk  tokens under one flag; block: columns at a time; both powers of two
    """

    chunk: int = knob(8, powers(), halved())
    block: int = knob(1024, powers(), halved(16))
    num_warps: int = knob(8, powers(), halved(1, 16))


def channel_of(team: Team, op: str, dtype: torch.dtype, size: int) -> CopyChannel:
    """The op's channel, with two halves of at least ``size`` elements."""

    def make(capacity: int) -> CopyChannel:
        return CopyChannel.make(team, team.empty((2, capacity), dtype=dtype), team.size)

    return grown_workspace(team, (op, dtype), size, make)


def channel_bytes(size: int, itemsize: int = 1) -> int:
    """Bytes of the heap that ``channel_of`` takes for halves of ``size`` elements."""
    return 2 * capacity_for(size) * itemsize


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
    """out[t] = rows[t] of tokens that chose an expert of this rank, else 0, and the row is not read

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


def kept_tensors(design: PushRows, sizes: Sizes, team: Team, arrived: list[torch.Tensor]) -> list[torch.Tensor]:
    """New tensors [rows, ids, weights] of receive buffers; rows without an expert of this rank are 0."""
    rows, ids, weights = arrived
    constants = {"SIZES": sizes, "num_warps": design.num_warps, **launch_options(team.caps)}
    out = torch.empty_like(rows)
    launch = launch_of(team, copy_chosen_kernel, (sizes, design), lambda: constants)
    launch(cdiv(len(rows), sizes.chunk), rows, ids, out, len(rows), team.view)
    return [out, ids.clone(), weights.clone()]


def padded(x: torch.Tensor, tokens: int, fill: int) -> torch.Tensor:
    """``x`` [T, n] followed by rows of ``fill``, [tokens, n]; ``x`` itself if T = tokens."""
    return x if len(x) == tokens else torch.nn.functional.pad(x, (0, 0, 0, tokens - len(x)), value=fill)


def dense(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Contiguous tensors; None as it is."""
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


# chunk, block, num_warps, from many small programs to few large ones.
PUSHES = (
    (1, 1024, 4), (1, 2048, 4), (2, 1024, 4), (2, 1024, 8), (4, 512, 4), (4, 1024, 8), (8, 1024, 8), (8, 512, 8), (8, 2048, 16),
    (16, 512, 8), (16, 1024, 16), (32, 512, 16),
)  # fmt: skip
QUICK_PUSHES = ((1, 1024, 4), (4, 1024, 8), (16, 512, 8))


class ExchangeCall(Call, Protocol):
    """Call of an exchange. tp: ranks that hold slices of the same experts."""

    tokens: int
    choices: int
    width: int
    tp: int

    def _replace(self, **fields: object) -> ExchangeCall: ...


class TokensOp(MoeOp):
    """Op of the tokens of all ranks.

    A case's first sizes are max_tokens, k, experts; its field ``tokens`` has each rank's.
    """

    internal = ("over_nodes",)
    spans_nodes = True
    dtypes = FLOATS

    def case_of(self, shape: Sequence[int], dtype: torch.dtype, world_size: int, **fields: Any) -> Case:
        return super().case_of(shape, dtype, world_size, **{"tokens": (shape[0],) * world_size, **fields})

    def moved_bytes(self, sizes: Sequence[int], dtype: torch.dtype) -> int:
        """Rows of all ranks."""
        shape = MoeShape(*sizes).of_all_ranks
        return shape.tokens * shape.hidden * dtype.itemsize


def choices_of_all(case: Case, draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, weights) of all ranks' tokens in a case, as they arrive."""
    most, k, experts, *_ = case.sizes
    tokens = [(T, Draw(case, rank, draw.call, draw.device)) for rank, T in enumerate(case.field("tokens"))]
    ids = torch.cat([padded(draw_ids(one, T, k, experts), most, -1) for T, one in tokens])
    return ids, torch.cat([padded(one.own("weights", (T, k)), most, 0) for T, one in tokens])


class ExchangeOp(TokensOp):
    """Rows by the ranks that need them ("push"), or all rows to or from all ranks.

    flag  field of cases that the other op has not

    Sizes of a case: max_tokens, k, experts, H.
    """

    flag: ClassVar[str]
    sizes = ("max_tokens", "k", "H")
    moves_quickly = True
    pinned = slice(1, None)  # choices decide how many rows a rank needs, the width which designs can send them

    def case_sizes(self, shape: MoeShape) -> tuple[int, ...]:
        return shape.tokens, shape.k, shape.experts, shape.hidden

    def call_of_case(self, case: Case, machine: Machine) -> Any:
        tokens, k, _, H = case.sizes
        call = self.call_of((tokens, k, H), case.dtype, machine, case.design)
        return call._replace(tp=case.field("tp") or 1)

    def choose(self, call: ExchangeCall, machine: Machine) -> Planned:
        if machine.nodes == 1:
            return super().choose(call, machine)
        # Where ranks of several nodes hold slices of an expert, each node has all of it.
        node = self.plan(call._replace(tp=min(call.tp, machine.node.world_size)), machine.node)
        return Planned("over_nodes", OverNodes(node=node), f"{machine.nodes} nodes: a token crosses once for each")

    def rule(self, call: ExchangeCall, machine: Machine) -> tuple[str, str]:
        """The least predicted time, of designs that take the call and whose buffers leave room in the heap."""
        if machine.world_size == 1:
            return "push", "one rank: nothing to send"
        times, received = self.costs(call, machine), machine.world_size * call.tokens * self.token_bytes(call)
        if channel_bytes(received) > machine.heap_bytes // 4:
            times.pop("pipelined", None)
        if not self.has_room(call, machine) and len(times) > 1:
            del times["push"]
        return least(times, machine.caps)

    def has_room(self, call: ExchangeCall, machine: Machine) -> bool:
        """True if the receive buffers of "push" leave half of the heap."""
        return 2 * machine.world_size * call.tokens * self.token_bytes(call) <= machine.heap_bytes // 2

    @abstractmethod
    def costs(self, call: ExchangeCall, machine: Machine) -> dict[str, float]:
        """Predicted µs of each design that takes the call."""

    def token_bytes(self, call: ExchangeCall) -> int:
        """Bytes of a token's row as it is sent, and what goes with it."""
        return call.width * call.dtype.itemsize

    def default(self, name: str, call: ExchangeCall, machine: Machine) -> Any:
        return self.designs[name]()

    def table_key(self, call: ExchangeCall, machine: Machine) -> tuple[str, tuple[int, ...], int]:
        return self.row_name(call), (call.tokens, call.choices, call.width), machine.world_size

    def tuned(self, call: ExchangeCall, machine: Machine) -> Planned | None:
        # Rows of tables were measured with whole experts.
        return super().tuned(call, machine) if call.tp == 1 else None

    def space(self, call: ExchangeCall, machine: Machine, quick: bool = False) -> Iterator[Any]:
        yield self.default("pipelined", call, machine)
        pushes = QUICK_PUSHES if quick else PUSHES
        for chunk, block, num_warps in pushes:
            yield PushRows(chunk=chunk, block=block, num_warps=num_warps)

    def exchange_cases(self) -> Iterator[Case]:
        """Cases that both ops have, with each design that a caller can ask for."""
        for name in self.algorithms[1:]:
            case = functools.partial(self.case, design=name)
            yield case(1, BF16, 9, 2, 8, 40, tokens=(9,))
            for w in (2, 3, 4, 8):
                yield case(w, BF16, 20, 3, 24, 136, tokens=(20, 0, 13, 1, 7, 20, 20, 3)[:w])
            for w in (2, 3):
                for dtype in (FP16, FP32):
                    yield case(w, dtype, 5, 8, 12, 48, tokens=(5, 3, 5)[:w])
                for skew in ("one expert", "last expert", "some", "none", "recorded"):
                    yield case(w, BF16, 17, 2, 12, 40, tokens=(17, 16, 2)[:w], skew=skew)
                yield case(w, BF16, 3, 1, 6, 24, tokens=(0, 0, 0)[:w])
                if (self.name, name) != ("moe_dispatch", "lamport"):  # rows that are no whole words
                    yield case(w, BF16, 3, 1, 6, 25, tokens=(0, 3, 0)[:w])
            for w, tp in ((2, 2), (4, 2), (8, 2), (8, 4)):
                yield case(w, BF16, 4, 2, 8, 24, tokens=(4, 0, 3, 1, 2, 4, 1, 0)[:w], tp=tp)

    def large_cases(self) -> Iterator[Case]:
        for w in (2, 4):
            for T, H in ((128, 7168), (1000, 2048)):
                for design in self.algorithms[1:]:
                    for more in ({}, {self.flag: True}):
                        tokens = (T, T - 1, 0, T)[:w]
                        yield self.case(w, BF16, T, 8, 64, H, design=design, tokens=tokens, **more)

    def traffic(self, sizes: Sequence[int], dtype: torch.dtype, world_size: int) -> int:
        return int(rows_sent(sizes, world_size) * sizes[3] * dtype.itemsize)


def rows_sent(sizes: Sequence[int], world_size: int) -> float:
    """Rows that leave a rank if all experts are chosen alike: to each peer the rows that need its experts."""
    tokens, k, experts, _ = sizes
    elsewhere = experts - experts // world_size
    return (world_size - 1) * tokens * (1 - math.comb(elsewhere, k) / math.comb(experts, k))


def shared_experts(case: Case, rank: int) -> Experts:
    """Experts of ``rank`` in a case of an exchange, shared by the ranks of its field ``tp``."""
    tp = case.field("tp") or 1
    return Experts.grouped(case.sizes[2], rank, case.world_size // tp, tp)
