"""moe_dispatch: a token's row goes to the ranks that hold an expert it chose.

Slots are not negotiated: row t of rank s lies at s * max_tokens + t on every rank that gets it. All ranks learn all choices, so
each computes by itself which rows it has and in which order (``moe_schedule``): no counts are exchanged, the host waits for
nothing, and no token is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.arguments import check_int, quoted
from weft.ops.case import BF16, Accuracy, Case, Draw, Inputs
from weft.ops.collectives.all_gather import all_gather
from weft.ops.local import check_shape
from weft.ops.moe.exchange import MAX_PROGRAMS, Arrivals, Halves, PushRows, Sizes, chosen_of
from weft.ops.moe.moe_cases import draw_ids, exchange_cases
from weft.ops.moe.routing import Experts, Routing
from weft.ops.op import Op, register
from weft.ops.registration import FLOATS, check_choice, check_team, check_tensor
from weft.plan.planned import AUTO, Machine, Planned, machine_of
from weft.runtime.capabilities import launch_options
from weft.runtime.codec import exchangeable
from weft.runtime.launching import launch_of
from weft.runtime.team.team import find_team

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


class Dispatched(NamedTuple):
    """Tokens of all ranks as one rank has them. Row s * max_tokens + t is token t of rank s.

    rows     [W * max_tokens, H]: those of tokens that chose an expert of this rank; the others are undefined
    routing  of all tokens of all ranks; ids of -1 where there is no token
    experts  this rank's
    """

    rows: torch.Tensor
    routing: Routing
    experts: Experts


@exchangeable
@dataclass(frozen=True, slots=True, kw_only=True)
class GatherRows:
    """All rows to all ranks, by all_gather: where nearly all get a row, as with 8 choices."""


class DispatchCall(NamedTuple):
    """Sizes that the plan depends on."""

    tokens: int
    choices: int
    width: int
    dtype: torch.dtype
    design: str = AUTO


class Mail(NamedTuple):
    """One half of the receive buffers, symmetric: rows [W, tokens, H], ids and weights [W, tokens, k]."""

    rows: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


@triton.jit
def send_chunk(x, ids, weights, T, chunk, peer, mail, SIZES: tl.constexpr, team):
    """Store to ``peer`` the choices of this rank's tokens in ``chunk``, and the rows that it needs."""
    local = chunk * SIZES.chunk + tl.arange(0, SIZES.chunk)
    there, choice = local < T, tl.arange(0, SIZES.padded)[None, :]
    slot = wl.rank(team) * SIZES.tokens + local
    at, of_token = local.to(tl.int64)[:, None] * SIZES.choices + choice, choice < SIZES.choices
    target = slot.to(tl.int64)[:, None] * SIZES.choices + choice
    exists = (local < SIZES.tokens)[:, None] & of_token
    id = tl.load(ids + at, mask=there[:, None] & of_token, other=-1)
    weight = tl.load(weights + at, mask=there[:, None] & of_token, other=0.0)
    tl.store(wl.symm_at(mail.ids, peer, team) + target, id, mask=exists)
    tl.store(wl.symm_at(mail.weights, peer, team) + target, weight, mask=exists)
    chosen = chosen_of(ids, local, there, peer, SIZES)
    rows = wl.symm_at(mail.rows, peer, team)
    for begin in range(0, SIZES.width, SIZES.block):
        column = begin + tl.arange(0, SIZES.block)[None, :]
        mask = chosen & (column < SIZES.width)
        row = tl.load(x + local.to(tl.int64)[:, None] * SIZES.width + column, mask=mask, other=0.0)
        tl.store(rows + slot.to(tl.int64)[:, None] * SIZES.width + column, row, mask=mask)


@triton.jit(do_not_specialize=["T"])
def moe_dispatch_kernel(x, ids, weights, T, mail, flags, team, SIZES: tl.constexpr, CHUNKS: tl.constexpr):
    """Store this rank's T choices at all ranks, and each row at the ranks with an expert it chose.

    grid: (programs,), each over every programs-th chunk of SIZES.chunk tokens

    x [T, H], ids int32 and weights [T, k]; mail: ``Mail``; flags: ``Arrivals``; SIZES: ``Sizes``
    An epoch is one call.

    signals   program 0, to every peer: entered[me] = e, once all that this rank ran before has ended
              program p, to every peer: arrived[me, c] = e, once its part of chunk c lies there; for every chunk, rows or not
    waits     entered[peer] > filled before any store: the peer has ended the call that read this half last, and what it ran
              behind that call
              arrived[s, c] >= e for every peer s and this program's chunks, at the end: what runs next reads all rows
    reuse     the half is written again in the next call that takes it, after the wait for ``entered``
    progress  a program waits for program 0 and for the one of the same number at its peers: all must be resident
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    world: tl.constexpr = wl.num_ranks(team)
    me = wl.rank(team)
    wl.follow_previous_kernel()
    now = wl.next_epoch(flags.epoch)
    last = tl.load(flags.filled + program)
    if program == 0:
        for step in range(1, world):
            wl.notify(flags.entered + me, (me + step) % world, now, team)
    for step in range(1, world):
        wl.wait(flags.entered + (me + step) % world, last + 1, team)
    for chunk in range(program, CHUNKS, programs):
        for step in range(1, world + 1):
            peer = (me + step) % world
            send_chunk(x, ids, weights, T, chunk, peer, mail, SIZES, team)
            if step < world:
                wl.notify(flags.arrived + me * CHUNKS + chunk, peer, now, team)
    for chunk in range(program, CHUNKS, programs):
        for step in range(1, world):
            wl.wait(flags.arrived + (me + step) % world * CHUNKS + chunk, now, team)
    tl.store(flags.filled + program, now)
    wl.advance_epoch(flags.epoch, now)


def moe_dispatch(
    x: torch.Tensor, routing: Routing, team: Team, *, experts: int, max_tokens: int, algorithm: str = "auto"
) -> Dispatched:
    """Send each row of ``x`` to the ranks that hold an expert it chose. Collective.

    x           [T, H], fp16, bf16 or fp32, this rank's tokens; T may differ by rank and be 0
    routing     ids int32 [T, k] and weights [T, k] of x's dtype, as of ``route``
    experts     of all ranks together, divided by W: rank r holds experts r * experts / W and on
    max_tokens  of any rank; the same on all ranks, as H, k, dtype and ``experts`` must be
    algorithm   "auto", "push" (rows to the ranks that need them) or "gather" (all rows to all ranks)

    The tensors of the result may be the team's receive buffers: they hold until the next call but one with these sizes. Bits
    arrive as they were sent, in every algorithm. The host reads nothing; captured in a CUDA graph it replays correctly, after
    one call outside. No backward. ValueError for arguments that do not fit.
    """
    op = "moe_dispatch"
    check_team(op, team)
    check_tensor(op, "x", x, team, FLOATS)
    check_routing(op, routing, team)
    check_shape(op, "x", x, (routing.ids.shape[0], "H"))
    check_tensor(op, "weights", routing.weights, team, (x.dtype,))
    check_int(f"{op}: max_tokens", max_tokens, max(1, len(x)))
    mine = Experts.whole(check_int(f"{op}: experts", experts, 1), team.rank, team.size)
    check_choice(op, "algorithm", algorithm, MOE_DISPATCH.algorithms)
    if x.shape[1] == 0:
        raise ValueError(f"{op}: x has shape {tuple(x.shape)}; rows have at least one element")
    rows, ids, weights = MOE_DISPATCH.dispatch(x, *routing, experts, max_tokens, team.name, algorithm)
    return Dispatched(rows, Routing(ids, weights), mine)


def check_routing(op: str, routing: Routing, team: Team) -> None:
    """ValueError unless ``routing`` is one of a supported number of choices on the team's device."""
    if not isinstance(routing, Routing):
        raise ValueError(f"{op}: routing={quoted(routing)} is not a Routing; weft.ops.route gives one")
    check_tensor(op, "ids", routing.ids, team, (torch.int32,))
    check_shape(op, "ids", routing.ids, ("T", "k"))
    check_shape(op, "weights", routing.weights, routing.ids.shape)
    if not 1 <= routing.ids.shape[1] <= 16:
        raise ValueError(f"{op}: ids has shape {tuple(routing.ids.shape)}; a token has 1 to 16 choices")


def share_of_rows(choices: int, world_size: int) -> float:
    """Share of a rank's tokens that another rank gets on average, where all experts are chosen alike."""
    return 1 - (1 - 1 / world_size) ** choices


class MoeDispatch(Op):
    """sizes of a case: max_tokens, k, experts, H. Its field ``tokens`` has those of each rank."""

    name, alias = "moe_dispatch", "moe-dispatch"
    designs = {"push": PushRows, "gather": GatherRows}
    sizes = ("max_tokens", "k", "H")
    dtypes = FLOATS

    def call_of(self, sizes: Sequence[Any], dtype: torch.dtype, machine: Machine, design: str = AUTO) -> DispatchCall:
        checked = (check_int(f"{self.name}: {name}", size, 1) for name, size in zip(self.sizes, sizes, strict=True))
        return DispatchCall(*checked, dtype, design)

    def choose(self, call: DispatchCall, machine: Machine) -> Planned:
        share = share_of_rows(call.choices, machine.world_size)
        name = call.design if call.design != AUTO else "gather" if machine.world_size > 1 and share > 0.75 else "push"
        reason = f"a rank needs {share:.2f} of the rows of another if all experts are chosen alike"
        return Planned(
            name, self.designs[name](), reason if call.design == AUTO else f"asked for design={call.design!r}"
        )

    # --- running -----------------------------------------------------------------------------------------------------

    def run(
        self,
        design: Any,
        team: Team,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        experts: int,
        most: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(rows, ids, weights) of all ranks. ``most``: max_tokens."""
        self.check_design(design)
        if isinstance(design, GatherRows):
            return tuple(
                all_gather(padded(tensor, most, fill), team) for tensor, fill in ((x, 0), (ids, -1), (weights, 0))
            )
        (T, H), k, W = x.shape, ids.shape[1], team.size
        sizes = Sizes.of(design, most, H, k, experts // W)
        of_choices = (W, most, k)
        shapes = {"rows": ((W, most, H), x.dtype), "ids": (of_choices, torch.int32), "weights": (of_choices, x.dtype)}
        halves = team.workspace(("moe_dispatch", sizes, x.dtype), lambda: Halves.make(team, sizes.chunks, shapes))
        buffers, flags = halves.next()
        launch_rows(moe_dispatch_kernel, design, sizes, team, (x, ids, weights), T, Mail(*buffers), flags)
        return tuple(buffer.flatten(0, 1) for buffer in buffers)

    def forward(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        experts: int,
        max_tokens: int,
        team: str,
        algorithm: str,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        members = find_team(team)
        call = DispatchCall(max_tokens, ids.shape[1], x.shape[1], x.dtype, algorithm)
        design = self.plan(call, machine_of(members)).design
        return self.run(design, members, x, ids, weights, experts, max_tokens)

    def fake(self, x, ids, weights, experts, max_tokens, team, algorithm):
        rows, k = find_team(team).size * max_tokens, ids.shape[1]
        return x.new_empty((rows, x.shape[1])), ids.new_empty((rows, k)), weights.new_empty((rows, k))

    # --- judging -----------------------------------------------------------------------------------------------------

    def inputs(self, case: Case, rank: int, draw: Draw) -> Inputs:
        """x, ids and weights of this rank's tokens."""
        _, k, experts, H = case.sizes
        T = case.field("tokens")[rank]
        return draw.own("x", (T, H)), draw_ids(draw, T, k, experts), draw.own("weights", (T, k))

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> tuple[torch.Tensor, ...]:
        """(rows, 0 for those that this rank does not need, ids, weights)"""
        most, _, experts, _ = case.sizes
        rows, ids, weights = (
            torch.cat([padded(tensors[at], most, fill) for tensors in by_rank])
            for at, fill in ((0, 0), (1, -1), (2, 0))
        )
        mine = ((ids >= 0) & (ids // (experts // case.world_size) == rank)).any(-1, keepdim=True)
        return torch.where(mine, rows, 0), ids, weights

    def accuracy(self, case: Case) -> Accuracy:
        return Accuracy(exact=True)

    def call(self, case: Case, team: Team, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> tuple:
        """Rows, ids and weights that arrived, as ``reference`` has them, in tensors of their own."""
        most, _, experts, _ = case.sizes
        if isinstance(case.design, str):
            routing = Routing(ids, weights)
            found = moe_dispatch(x, routing, team, experts=experts, max_tokens=most, algorithm=case.design)
            rows, (ids, weights) = found.rows, found.routing
        else:
            rows, ids, weights = self.run(case.design, team, x, ids, weights, experts, most)
        mine = ((ids >= 0) & (ids // (experts // team.size) == team.rank)).any(-1, keepdim=True)
        return torch.where(mine, rows, 0), ids.clone(), weights.clone()

    def cases(self) -> Iterator[Case]:
        for case in exchange_cases(self.name):
            for design in ("push", "gather"):
                yield Case(**{**case, "design": design})
        for w in (2, 3):
            fields = (("tokens", (30, 7, 30)[:w]),)
            design = PushRows(chunk=4, block=32, num_warps=4)
            yield Case(op=self.name, world_size=w, dtype=BF16, sizes=(30, 2, 12, 72), design=design, fields=fields)

    def large_cases(self) -> Iterator[Case]:
        for w in (2, 4):
            for T, H in ((128, 7168), (1000, 2048)):
                for design in ("push", "gather"):
                    fields = (("tokens", (T, T - 1, 0, T)[:w]),)
                    yield Case(
                        op=self.name, world_size=w, dtype=BF16, sizes=(T, 8, 64, H), design=design, fields=fields
                    )


def padded(x: torch.Tensor, tokens: int, fill: int) -> torch.Tensor:
    """``x`` [T, n] with rows of ``fill`` behind it, [tokens, n]."""
    return torch.nn.functional.pad(x, (0, 0, 0, tokens - len(x)), value=fill)


def launch_rows(
    kernel: Any,
    design: PushRows,
    sizes: Sizes,
    team: Team,
    tensors: tuple[torch.Tensor, ...],
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
    launch(programs, *(tensor.contiguous() for tensor in tensors), T, buffers, flags, team.view)


MOE_DISPATCH = MoeDispatch()
register(MOE_DISPATCH)
