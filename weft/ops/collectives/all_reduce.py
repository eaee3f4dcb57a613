"""All-reduce: the sum of all ranks' tensors on every rank, bitwise equal on all and from run to run.

out[...] = round(sum over s of x_s[...])            summed in fp32, rounded once to x.dtype
one_shot   x tile --to all--> sum                           1 hop, W - 1 times the bytes out of each rank
two_shot   W tiles --one to each--> sum --to all--> out     2 hops, 2 (W - 1) / W times the bytes
copy_engine  the same with whole parts, which copy engines carry (weft.ops.collectives.copy_engine)
tree         the sum in a tree over the ranks, of the same bits on any number (weft.ops.collectives.tree)
multimem_…  the switch adds (weft.ops.collectives.multimem)

one_shot and two_shot may send their rows in fp8 (weft.ops.collectives.fp8_wire).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.costs import fitted, pushes
from weft.costs.choice import least
from weft.costs.gpu import gpu_of
from weft.kernels.partial_sums import rounded_sum
from weft.kernels.slices import node_of_ranks
from weft.ops.case import FP32, Accuracy, Case, Draw, Inputs, sum_of
from weft.ops.collectives import cases, fp8_wire, multimem, tree
from weft.ops.collectives.all_gather import ALL_GATHER
from weft.ops.collectives.collective import (
    ALONE,
    ENDLESS,
    OWN_FIRST,
    RANK_ORDER,
    Collective,
    CollectiveCall,
    Copy,
    OneShot,
    TwoShot,
)
from weft.ops.collectives.copy_engine import CopyEngine, add_and_share, on_lines, split
from weft.ops.collectives.over_nodes import ScatterGather
from weft.ops.collectives.reduce_scatter import REDUCE_SCATTER
from weft.ops.op import INVARIANT, register
from weft.ops.registration import FLOATS, check_choice, check_flag, check_tensor
from weft.plan.planned import AUTO, Machine, Planned, machine_of
from weft.runtime.arithmetic import cdiv
from weft.runtime.team.team import Team, find_team
from weft.transport import exchange
from weft.transport.exchange import Body, place_of, summed
from weft.transport.push import (
    clears_in_order,
    count_tiles,
    is_rank,
    is_sent,
    keep_epoch,
    my_slot,
    prepare,
    receive,
    send,
    send_order,
    sum_of_ranks,
    tile_rest,
)


@triton.jit
def summand(message, tile, team, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """This rank's tile, in out's dtype: for all ranks, and what this one keeps.

    x [n], or SIZES summands of it, fp32, n elements apart
    """
    start, columns, inside = place_of(message, tile, BLOCK)
    at = message.x + start + columns
    return rounded_sum(at, inside, message.n, message.SIZES, message.out.dtype.element_ty)


# out = sum over ranks of x                                   x [n] or summands of it, out [n]
# every rank   | push 0 to all | push 1 | receive, sum, store 0 | push 2 | receive, sum, store 1 | ...
ONE_SHOT = Body(name="all_reduce_kernel", send=summand, own=summand, store=summed)


@triton.jit
def two_shot_all_reduce_kernel(
    x,  # [n]
    out,  # [n]
    n,
    buffer,  # Slots, in out's dtype
    epochs,
    team,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TRANSPORT: tl.constexpr,
    TREE: tl.constexpr = False,
):
    """out = sum over ranks of x, in a tree over the ranks if TREE

    grid  (programs,), each over every programs-th tile of W * BLOCK elements, part s summed by rank s

    Parts, then sums, are sent and received; signals, order, reuse: weft.transport.push. Elements beyond n are sent as zeros, so
    that whole rows are sent.

    every rank   | push 0 | push 1 | receive, sum 0 | push sum 0 | receive, store 0 | push 2 | receive, sum 1 | ...
    """
    world: tl.constexpr = wl.num_ranks(team)
    program, programs = tl.program_id(0), tl.num_programs(0)
    slot = my_slot(buffer, BLOCK, TRANSPORT, team)
    wl.follow_previous_kernel()
    epoch = wl.next_epoch(epochs + program)
    columns = tl.arange(0, BLOCK)
    end = tl.cast(n, tl.int64)
    tiles = count_tiles(end, world * BLOCK)
    ordered = clears_in_order(slot, 2 * tl.cdiv(tiles, programs), BLOCK)
    from_peer = tl.arange(0, ROWS)[:, None] * BLOCK + columns[None, :]
    own_columns = wl.rank(team) * BLOCK + columns
    parts, before, following = epoch, epoch - 1, epoch + 1
    send_parts(x, end, program, slot, parts, team, BLOCK, ROWS, TRANSPORT)
    for tile in range(program, tiles, programs):
        next_parts = following
        if tile + programs < tiles:
            send_parts(x, end, tile + programs, slot, next_parts, team, BLOCK, ROWS, TRANSPORT)
            following += 1
        start = tl.cast(tile, tl.int64) * (world * BLOCK)
        rest = tile_rest(end, start, world * BLOCK)
        own = tl.load(x + start + own_columns, mask=own_columns < rest, other=0)
        received = receive(own, slot, parts, before, team, ordered, ROWS, TRANSPORT, BLOCK)
        if TREE:
            part = node_of_ranks(received).to(x.dtype.element_ty)
        else:
            part = sum_of_ranks(received).to(x.dtype.element_ty)
        send(tl.broadcast_to(part[None, :], (ROWS, BLOCK)), slot, following, team, TRANSPORT, BLOCK)
        whole = receive(part, slot, following, parts, team, ordered, ROWS, TRANSPORT, BLOCK)
        tl.store(out + start + from_peer, whole, mask=is_rank(team, ROWS) & (from_peer < rest))
        parts, before = next_parts, following
        following += 1
    keep_epoch(epochs, before)


@triton.jit
def send_parts(x, end, tile, slot, epoch, team, BLOCK: tl.constexpr, ROWS: tl.constexpr, TRANSPORT: tl.constexpr):
    """Send part s of a tile of W * BLOCK elements to rank s."""
    world: tl.constexpr = wl.num_ranks(team)
    start = tl.cast(tile, tl.int64) * (world * BLOCK)
    part = send_order(team, ROWS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = is_sent(team, ROWS) & (part < tile_rest(end, start, world * BLOCK))
    send(tl.load(x + start + part, mask=mask, other=0), slot, epoch, team, TRANSPORT, BLOCK)


class AllReduce(Collective):
    name, alias = "all_reduce", "all-reduce"
    replicated = True
    dtypes = FLOATS
    designs = {
        "one_shot": OneShot,
        "two_shot": TwoShot,
        "copy_engine": CopyEngine,
        **multimem.DESIGNS,
        "copy": Copy,
        "over_nodes": ScatterGather,
        "tree": tree.Tree,
    }
    bits = {
        "one_shot": RANK_ORDER,
        "two_shot": RANK_ORDER,
        "copy_engine": OWN_FIRST,
        **dict.fromkeys(multimem.DESIGNS, "depend on the switch, which promises no order of its additions"),
        "copy": ALONE,
        "over_nodes": OWN_FIRST,
        "tree": INVARIANT,
    }
    internal = (*Collective.internal, "tree")
    variants = options = ("invariant", "fp8_wire")
    rare = tuple(multimem.DESIGNS)  # need multicast
    staging_buffers = 2  # the peers' parts, and their sums
    copy_engine_from = {2: 256 << 20, 4: 256 << 20, 8: ENDLESS}
    # Two ranks' parts are long, and the engines wait for their sum: more programs. A smaller last piece is copied out sooner:
    # two H200s, 256 MiB, 762 us, in equal pieces 787 (lab/h200-x2-copy-engine.json@cd3ccc0).
    copies = {2: CopyEngine(pieces=(3, 1), programs=132), 8: CopyEngine(pieces=(3, 1))}

    cases, large_cases = cases.all_reduce_cases, cases.large_all_reduce_cases

    def sent(self, nbytes: int, world_size: int) -> int:
        return 2 * nbytes * (world_size - 1) // world_size

    def traffic_of(self, case: Case) -> int:
        return fp8_wire.sent(super().traffic_of(case), case)

    def offers(self, design: str, variants: Sequence[str]) -> bool:
        return "fp8_wire" not in variants or design in fp8_wire.DESIGNS

    def choose(self, call: CollectiveCall, machine: Machine) -> Planned:
        multimem.check(call.design, machine)
        if call.fp8_wire:
            fp8_wire.check_call(self.name, call, machine)
        if call.invariant and call.design in (AUTO, "tree"):
            return tree.planned(call, machine, lambda hops: self._by_stores(hops, machine))
        return super().choose(call, machine)

    def rule(self, call: CollectiveCall, machine: Machine) -> tuple[str, str]:
        return least(self.times(call, machine), machine.caps) if call.fp8_wire else super().rule(call, machine)

    def times(self, call: CollectiveCall, machine: Machine) -> dict[str, float]:
        """Predicted µs by design."""
        predicted = pushes.fp8_all_reduce if call.fp8_wire else pushes.all_reduce
        return predicted(gpu_of(machine.caps), fitted.read().pushes, call.nbytes, machine.world_size)

    def _by_stores(self, call: CollectiveCall, machine: Machine) -> Planned:
        """Plan of an all-reduce that kernels push, in one hop or two."""
        name, reason = self.push_rule(self.whole(call, machine.world_size), machine)
        return Planned(name, self.default(name, call, machine), reason)

    def push_rule(self, whole: int, machine: Machine) -> tuple[str, str]:
        """The least predicted time of one hop and two. W=3 and W=8 are not measured."""
        times = self.times(CollectiveCall(whole, torch.bfloat16), machine)
        return least({name: times[name] for name in ("one_shot", "two_shot")}, machine.caps)

    def inputs(self, case: Case, rank: int, draw: Draw) -> Inputs:
        return (drawn(case, draw),)

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> torch.Tensor:
        whole = [whole_of(case, x) for (x,) in by_rank]
        return fp8_wire.reference(case, whole) if case.field("fp8_wire") else sum_of(whole)

    def call(self, case: Case, team: Team, x: torch.Tensor) -> torch.Tensor:
        if case.field("invariant"):
            return all_reduce(x, team, invariant=True)
        if case.field("fp8_wire") and isinstance(case.design, str):
            return all_reduce(x, team, case.design, wire="fp8")
        return self.run_of_partials(x, case.dtype, team) if case.field("partials") else super().call(case, team, x)

    def accuracy(self, case: Case) -> Accuracy:
        if case.field("fp8_wire"):
            return fp8_wire.accuracy(case, terms=case.world_size)
        partials = case.world_size if case.field("invariant") else case.field("nodes") or 0
        return Accuracy(terms=case.world_size, partials=partials, replicated=True)

    def default(self, name: str, call: CollectiveCall, machine: Machine) -> Any:
        return multimem.DESIGNS[name]() if name in multimem.DESIGNS else super().default(name, call, machine)

    def function(self, x: torch.Tensor, team: Team, algorithm: str) -> torch.Tensor:
        return all_reduce(x, team, algorithm)

    def run(self, design: Any, team: Team, x: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """All-reduce of ``x``, checked, any strides: ``into``, or a new contiguous tensor of its shape."""
        self.check_design(design)
        if isinstance(design, tree.Tree):
            return self.run_of_nodes(design, team, x.detach().contiguous()[None], x.dtype, into)
        if isinstance(design, multimem.Multimem) and x.numel() > 0:
            total = multimem.all_reduce(x.detach().contiguous(), team, design)
            return total if into is None else into.copy_(total)
        out = torch.empty_like(x, memory_format=torch.contiguous_format) if into is None else into
        if isinstance(design, Copy):
            return out.copy_(x)
        if isinstance(design, ScatterGather):
            if x.numel() > 0:
                self._scatter_and_gather(design, team, x, out)
            return out
        if x.numel() > 0:
            if isinstance(design, CopyEngine):
                sources = split(on_lines(x.detach().contiguous().view(-1)), team.size)
                add_and_share(sources, split(out.view(-1), team.size), team, design)
            elif design.push.transport == "fp8":
                fp8_wire.all_reduce(design, team, x.detach().contiguous(), out)
            else:
                _push(out.numel(), out.dtype, team, design)(x.contiguous(), out)
        return out

    def prepared(
        self, design: Any, team: Team, nbytes: int, dtype: torch.dtype
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        if not isinstance(design, (OneShot, TwoShot)) or not nbytes:
            return super().prepared(design, team, nbytes, dtype)
        push = _push(nbytes // dtype.itemsize, dtype, team, design)

        def run(x: torch.Tensor) -> torch.Tensor:
            # Without a memory format, which takes the host as long as the allocation.
            x = x.contiguous()
            out = torch.empty_like(x)
            push(x, out)
            return out

        return run

    def _scatter_and_gather(self, design: ScatterGather, team: Team, x: torch.Tensor, out: torch.Tensor) -> None:
        n, part = x.numel(), cdiv(x.numel(), team.size)
        flat = x.detach().contiguous().view(-1)
        if n % team.size:
            flat = torch.cat((flat, flat.new_zeros(part * team.size - n)))
        sums = REDUCE_SCATTER.run(design.scatter.design, team, flat)
        out.view(-1).copy_(ALL_GATHER.run(design.gather.design, team, sums)[:n])

    def over_nodes(self, call: CollectiveCall, machine: Machine) -> Planned:
        if call.design not in (AUTO, "copy_engine"):
            raise ValueError(
                f"all_reduce: algorithm={call.design!r} is of one node, and the team has {machine.nodes}; pass 'auto' or "
                f"'copy_engine', or team.node"
            )
        part = cdiv(call.nbytes // call.dtype.itemsize, machine.world_size) * call.dtype.itemsize
        whole = CollectiveCall(part * machine.world_size, call.dtype, call.design)
        scatter = REDUCE_SCATTER.plan(whole, machine)
        gather = ALL_GATHER.plan(CollectiveCall(part, call.dtype, call.design), machine)
        reason = f"{machine.nodes} nodes: 1 / {machine.node.world_size} of the bytes goes over each rail"
        return Planned("over_nodes", ScatterGather(scatter=scatter, gather=gather), reason)

    def run_of_partials(
        self, x: torch.Tensor, dtype: torch.dtype, team: Team, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        """All-reduce of the sum of split-K partials ``x``, fp32 [partials, ...], contiguous; W > 1.

        into: as of ``run``. A rank's sum x[0] + x[1] + … is rounded to ``dtype`` before it is sent. One-shot, since partials
        of two-shot would not fit the registers.
        """
        out = torch.empty(x.shape[1:], dtype=dtype, device=x.device) if into is None else into
        call = CollectiveCall(out.nbytes, dtype, "one_shot")
        _push(out.numel(), dtype, team, self.plan(call, machine_of(team)).design, partials=x.shape[0])(x, out)
        return out

    def run_of_nodes(
        self, design: tree.Tree, team: Team, nodes: torch.Tensor, dtype: torch.dtype, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Node above all ranks' ``nodes`` [count, ...], contiguous, in ``dtype``; into: as of ``run``."""

        def two_shot(hops: TwoShot, x: torch.Tensor, out: torch.Tensor) -> None:
            _push(out.numel(), dtype, team, hops, tree_order=True)(x, out)

        if nodes.numel() == 0:
            return nodes[0] if into is None else into
        return tree.run(design, team, nodes, dtype, two_shot, into)

    def forward(
        self, x: torch.Tensor, team: str, algorithm: str = "auto", invariant: bool = False, wire: str = "same"
    ) -> torch.Tensor:
        if not invariant and wire == "same":
            return super().forward(x, team, algorithm)
        members = find_team(team)
        here, call = machine_of(members), CollectiveCall(x.nbytes, x.dtype, algorithm, invariant)
        return self.run(self.plan(fp8_wire.asked(self, wire, call, here), here).design, members, x)

    def fake(self, x, team, algorithm="auto", invariant=False, wire="same"):
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    def backward(self, given, grad):
        # Every rank's out contains x, so its gradient is the sum of all ranks' gradients.
        return {"x": torch.ops.weft.all_reduce.default(grad, given.team, given.algorithm)}


def _push(
    n: int, dtype: torch.dtype, team: Team, design: OneShot | TwoShot, partials: int = 1, tree_order: bool = False
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Launch for ``n`` elements of ``dtype``, of which x and out are given."""
    if isinstance(design, OneShot):
        return exchange.prepare(ONE_SHOT, n, dtype, team, design.push, sizes=partials)
    tiles = cdiv(n * dtype.itemsize, design.push.row_bytes * team.size)
    return prepare(two_shot_all_reduce_kernel, n, tiles, dtype, team, design.push, TREE=tree_order)


def drawn(case: Case, draw: Draw) -> torch.Tensor:
    """Summand of a rank; a case with the field ``partials`` has that number of split-K partials, fp32.

    Under ``invariant`` they are nodes of a tree.
    """
    partials = case.field("partials")
    if partials is None:
        return draw.own("x", case.sizes)
    return draw.own("x", (partials, *case.sizes), dtype=case.dtype if case.field("invariant") else FP32)


def whole_of(case: Case, x: torch.Tensor) -> torch.Tensor:
    """Sum of the split-K partials of ``drawn``, if any, rounded bit for bit as kernels do it."""
    if case.field("partials") is None:
        return x
    total = x[0]
    for partial in x[1:]:
        total = total + partial
    return total.to(case.dtype)


ALL_REDUCE = register(AllReduce())


def all_reduce_nodes(nodes: torch.Tensor, team: Team) -> torch.Tensor:
    """Sum in the tree of all ranks' ``nodes`` [8 / W, ...], fp16 or bf16, contiguous.

    Of the rest of the shape, in their dtype.
    """
    call = CollectiveCall(nodes[0].nbytes, nodes.dtype, invariant=True)
    return ALL_REDUCE.run_of_nodes(ALL_REDUCE.plan(call, machine_of(team)).design, team, nodes, nodes.dtype)


def all_reduce(
    x: torch.Tensor, team: Team, algorithm: str = "auto", *, invariant: bool = False, wire: str = "same"
) -> torch.Tensor:
    """Sum all ranks' ``x`` on every rank: a new contiguous tensor of ``x``'s shape and dtype.

    x          any shape and strides, fp16, bf16 or fp32, on ``team.device``; the same shape and dtype on all ranks
    algorithm  "auto" (weft.ops.explain tells its choice), "one_shot", "two_shot" or "copy_engine"; where
               ``team.caps.multicast`` is true also "multimem_one_shot" and "multimem_two_shot", by which the switch adds
    invariant  the sum is a tree in rank order, every node rounded to x's dtype: of eight summands that ranks have added up
               alike before, the bits are the same on 1, 2, 4 and 8 ranks; -0.0 becomes 0.0. With algorithm "auto"
    wire       "same": rows travel in x's dtype; "fp8": in e4m3 with a scale for 128 columns, half of the bytes, from fp16 or
               bf16, within one node, by "one_shot" or "two_shot"; "auto": so where it is predicted to take less time. Bound on
               the error: weft.ops.collectives.fp8_wire. The gradient travels in its dtype

    Bitwise equal on all ranks and from run to run, but for the multimem designs on GPUs. -0.0 may come out as +0.0. A team's
    collectives share workspaces, so one stream orders them. Captured in a CUDA graph it replays correctly, after one call
    outside with its shape, dtype and algorithm (which makes the workspace). ValueError for wrong arguments. The backward is an
    all-reduce, as of torch's functional all_reduce: the loss is the sum of all ranks' losses.
    """
    if not invariant and wire == "same" and (out := ALL_REDUCE.again(x, team, algorithm)) is not None:
        return out
    check_tensor("all_reduce", "x", x, team, FLOATS, over_nodes=True)
    check_choice("all_reduce", "algorithm", algorithm, ALL_REDUCE.algorithms)
    check_flag("all_reduce", "invariant", invariant)
    if invariant and algorithm != AUTO:
        raise ValueError(
            f"all_reduce: algorithm={algorithm!r} with invariant=True, which is a tree; leave algorithm out"
        )
    if wire != "same":
        check_choice("all_reduce", "wire", wire, fp8_wire.WIRES)
    return ALL_REDUCE.dispatch(x, team.name, algorithm, invariant, wire)
