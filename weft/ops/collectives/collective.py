"""Base of the collectives: their calls, their designs, and the rule that chooses among them.

The limits are crossovers on H200s linked by NVLink 4 without multicast, by benchmarks/lab/collectives.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch

from weft.arguments import quoted
from weft.ops.case import Accuracy, Case, Draw, Inputs
from weft.ops.collectives.copy_engine import ROUND_BYTES, CopyEngine, add, exchange, on_lines
from weft.ops.collectives.over_nodes import OverNodes, added_over_nodes, swapped
from weft.ops.collectives.space import copy_engines, pushes, pushes_around
from weft.ops.knobs import design_type, knob
from weft.ops.op import Op, is_plain
from weft.ops.registration import as_words, check_divides
from weft.plan.memo import MOST, generation
from weft.plan.planned import AUTO, Machine, Planned, machine_of
from weft.runtime.arithmetic import cdiv
from weft.runtime.team.team import COMPARING, Team, find_team
from weft.runtime.team.workspace import capacity_for
from weft.transport.exchange import Body, launch, prepare
from weft.transport.plans import LINE_BYTES, PushPlan, word_of

# ``Op.bits`` of sums over the ranks: in an order that the kernel's layout decides, beginning with a rank's own summand, and of
# one rank.
RANK_ORDER = "depend on W and the design"
OWN_FIRST = "depend on W, the design and a row's place: its sum begins with the summand of the rank that adds it up"
ALONE = "depend on W, which is 1: values are moved"


class CollectiveCall(NamedTuple):
    """Inputs of a collective's plan. nbytes: bytes of each rank's input. design: a name, or "auto".

    invariant  bits of a sum do not depend on the number of ranks (weft.ops.collectives.tree)
    fp8_wire   rows travel in fp8 (weft.ops.collectives.fp8_wire)
    """

    nbytes: int
    dtype: torch.dtype
    design: str = AUTO
    invariant: bool = False
    fp8_wire: bool = False


class NormCall(NamedTuple):
    """Inputs of the plan of all_reduce_rms_norm.

    nbytes, row_bytes: bytes of the normed tensor, and of a row of it. invariant, fp8_wire: as of ``CollectiveCall``
    """

    nbytes: int
    row_bytes: int
    dtype: torch.dtype
    design: str = AUTO
    invariant: bool = False
    fp8_wire: bool = False


class Sums(NamedTuple):
    """How a call asks for sums over the ranks: each field as of ``weft.ops.all_reduce``."""

    algorithm: str = AUTO
    invariant: bool = False
    wire: str = "same"


PLAIN_SUMS = Sums()


@design_type
class Push:
    """Kernels push tiles to the peers in one hop (weft.transport.push)."""

    push: PushPlan = knob(near=pushes_around)


@design_type
class OneShot:
    """All-reduce in one hop: every rank pushes its tiles to all ranks, and sums all."""

    push: PushPlan = knob(near=pushes_around)


@design_type
class TwoShot:
    """All-reduce in two hops: every rank sums its share of the tiles, and pushes the sums to all ranks."""

    push: PushPlan = knob(near=pushes_around)


@design_type
class Copy:
    """A copy, the result of a collective on one rank."""


ENDLESS = 1 << 62
ONE_RANK = "one rank: nothing to send"
# Push plans by world size: (largest message, row_bytes, num_warps, programs_per_sm); the first that the message fits.
# Many small programs start soonest and have all of a small message in flight at once. For large messages, a program that sends
# a tile ahead keeps the links busy, and fewer and larger programs poll less: four H200s, two-shot of 64 MiB, 296 us, by the
# programs of small messages 350 (lab/h200-x4-collectives.json@cd3ccc0).
TWO_HOPS = {
    2: ((2 << 20, 512, 1, 32), (ENDLESS, 8192, 16, 2)),
    8: ((2 << 20, 512, 1, 32), (128 << 20, 4096, 8, 2), (ENDLESS, 4096, 4, 2)),
}
# One-shot all-reduce; all-gather, all-to-all and reduce-scatter by the bytes of all parts together.
ONE_HOP = {
    2: ((2 << 20, 512, 1, 32), (32 << 20, 4096, 8, 4), (ENDLESS, 8192, 16, 2)),
    8: ((1 << 20, 512, 1, 32), (128 << 20, 4096, 8, 2), (ENDLESS, 4096, 4, 4)),
}
# The same of all-reduces in fp8, by the bytes of the tensor in 16 bits: a row has half as many, and a thread 16 columns of a
# tile, which it has in fp32. One shot of 40 MiB takes 137 us on two H200s, in 16 bits 125; no more was measured.
FP8_HOPS = {8: ((2 << 20, 512, 2, 16), (32 << 20, 2048, 8, 4), (ENDLESS, 4096, 16, 2))}


class Collective(Op):
    """A collective of tensors of equal size.

    moves_bits       no arithmetic: any bits are moved
    gathers          the output holds W inputs
    rows_divided     dimension 0 is divided among the ranks
    replicated       all ranks get the same result
    staging_buffers  receive buffers of one rank's part per peer that its copy-engine design needs
    copy_engine_from bytes of all parts together from which copy engines carry them, by world size. W=3 takes the value of W=4;
                     W=8 is not measured. Four H100s, all-reduce of 256 MiB: 1165 us, by stores 1203
    copies           the default CopyEngine, by world size
    body             of the kernel that pushes
    """

    moves_bits: ClassVar[bool] = False
    gathers: ClassVar[bool] = False
    staging_buffers: ClassVar[int] = 1
    copy_engine_from: ClassVar[dict[int, int]]
    copies: ClassVar[dict[int, CopyEngine]]
    body: ClassVar[Body]
    rows_divided: ClassVar[bool] = False
    replicated: ClassVar[bool] = False
    spans_nodes = True
    designs = {"push": Push, "copy_engine": CopyEngine, "copy": Copy, "over_nodes": OverNodes}
    sizes = ("shape",)
    form = "bytes"
    moves_quickly = True

    internal = ("copy", "over_nodes")

    # --- choosing ----------------------------------------------------------------------------------------------------

    def call_of(
        self, sizes: Sequence[Any], dtype: torch.dtype, machine: Machine, design: str = AUTO, **fields: bool
    ) -> CollectiveCall:
        shape = checked_shape(self.name, sizes[0])
        if self.rows_divided:
            check_divides(self.name, "shape[0]", shape[0] if shape else 1, machine.world_size)
        return CollectiveCall(math.prod(shape) * dtype.itemsize, dtype, design, **fields)

    def inputs(self, case: Case, rank: int, draw: Draw) -> Inputs:
        return (draw.own("x", case.sizes),)

    def accuracy(self, case: Case) -> Accuracy:
        return Accuracy(
            terms=1 if self.moves_bits else case.world_size,
            partials=case.field("nodes") or 0,
            exact=self.moves_bits,
            replicated=self.replicated,
        )

    def call(self, case: Case, team: Team, x: torch.Tensor) -> torch.Tensor:
        if isinstance(case.design, str):
            return self.function(x, team, case.design)
        return self.run(case.design, team, x)

    def function(self, x: torch.Tensor, team: Team, algorithm: str) -> torch.Tensor:
        """The function in weft.ops."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor, team: str, algorithm: str = "auto") -> torch.Tensor:
        members = find_team(team)
        calls = members.workspace("calls", dict)
        # With the inputs of the plan that may change: how the heap is filled, and the tables.
        key = self.name, x.nbytes, x.dtype, algorithm, members.is_traced, members.node.heap_changes, generation()
        prepared = calls.get(key)
        if prepared is None:
            design = self.plan(CollectiveCall(x.nbytes, x.dtype, algorithm), machine_of(members)).design
            if len(calls) >= MOST:
                calls.clear()
            prepared = calls[key] = self.prepared(design, members, x.nbytes, x.dtype)
        if members.name not in COMPARING:
            if len(members.calls_again) >= MOST:
                members.calls_again.clear()
            members.calls_again[self.name, x.dtype, x.shape, algorithm] = *key[4:], prepared
        return prepared(x)

    def again(self, x: torch.Tensor, team: Team, algorithm: str) -> torch.Tensor | None:
        """Result of an eager call like one before, by a few comparisons and a launch; None: of another.

        Such a call has a checked dtype, shape and algorithm, and nothing has changed that its plan depends on.
        """
        if torch.compiler.is_compiling() or type(x) is not torch.Tensor or type(team) is not Team:
            return None
        if type(algorithm) is not str:
            return None
        known = team.calls_again.get((self.name, x.dtype, x.shape, algorithm))
        if known is None or x.layout is not torch.strided or x.device != team.device or not is_plain((x,)):
            return None
        is_traced, heap_changes, of, prepared = known
        if is_traced is not team.is_traced or heap_changes != team.node.heap_changes or of != generation():
            return None
        return prepared(x)

    def prepared(
        self, design: Any, team: Team, nbytes: int, dtype: torch.dtype
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """``run`` by ``design`` for tensors of one size and dtype."""
        if not isinstance(design, Push) or not nbytes:
            return partial(self.run, design, team)
        part = nbytes if self.gathers else nbytes // team.size
        word = word_of(part) if self.moves_bits else dtype
        push = prepare(self.body, part // word.itemsize, word, team, design.push)

        def run(x: torch.Tensor) -> torch.Tensor:
            out = x.new_empty(self.result_shape(x.shape, team.size))
            if self.moves_bits:
                push(as_words(x.detach(), word), as_words(out, word))
            else:
                push(x.contiguous(), out)
            return out

        return run

    def case_of(self, shape: Sequence[int], dtype: torch.dtype, world_size: int, **fields: bool) -> Case:
        elements = shape[0] // dtype.itemsize
        return super().case_of((elements // world_size if self.gathers else elements,), dtype, world_size, **fields)

    def result_shape(self, shape: Sequence[int], world_size: int) -> tuple[int, ...]:
        """Shape of the result for a tensor of ``shape`` at each rank."""
        if self.gathers:
            return (world_size * shape[0], *shape[1:])
        return tuple(shape) if self.moves_bits else (shape[0] // world_size, *shape[1:])

    def run(self, design: Any, team: Team, x: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """Result for ``x``, checked, any strides: ``into``, or a new contiguous tensor."""
        self.check_design(design)
        out = x.new_empty(self.result_shape(x.shape, team.size)) if into is None else into
        if isinstance(design, Copy):
            return out.copy_(x)
        if x.numel() == 0:
            return out
        x = x.detach()
        if isinstance(design, OverNodes):
            return self._run_over_nodes(design.node, team, x.contiguous(), out)
        part = x.nbytes if self.gathers else x.nbytes // team.size
        if self.moves_bits:
            word = word_of(part)
            source, target = as_words(x, word), as_words(out, word)
        else:
            word, source, target = x.dtype, x.contiguous(), out
        if isinstance(design, CopyEngine):
            sources = self.parts(on_lines(source.view(-1)), team.size)
            if self.moves_bits:
                exchange(sources, target.chunk(team.size), team, design)
            else:
                add(sources, target.view(-1), team, design)
        else:
            launch(self.body, (source, target, part // word.itemsize), word, team, design.push)
        return out

    def parts(self, x: torch.Tensor, count: int) -> Sequence[torch.Tensor]:
        """Part of ``x``, contiguous, for each of ``count`` ranks or nodes."""
        return [x] * count if self.gathers else x.chunk(count)

    def _run_over_nodes(self, node: Planned, team: Team, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        parts = self.parts(x, team.shape.nodes)
        if not self.moves_bits:
            return added_over_nodes(team, lambda to: self.run(node.design, team.node, parts[to]), node, out)
        for source, piece in swapped(team, parts, node):
            self.run(node.design, team.node, piece, into=out.chunk(team.shape.nodes)[source])
        return out

    def fake(self, x, team, algorithm="auto"):
        return x.new_empty(self.result_shape(x.shape, find_team(team).size))

    def traffic(self, sizes: Sequence[int], dtype: torch.dtype, world_size: int) -> int:
        return self.sent(math.prod(sizes) * dtype.itemsize, world_size)

    def sent(self, nbytes: int, world_size: int) -> int:
        """Least number of bytes that leave each rank for an input of ``nbytes`` at each rank."""
        return nbytes * (world_size - 1) if self.gathers else nbytes * (world_size - 1) // world_size

    def whole(self, call: CollectiveCall, world_size: int) -> int:
        """Bytes of all parts together: the output of an all-gather, else the input."""
        return call.nbytes * world_size if self.gathers else call.nbytes

    def table_key(self, call: CollectiveCall, machine: Machine) -> tuple[str, tuple[int, ...], int]:
        name = "+".join([self.name, *(one for one in self.variants if getattr(call, one))])
        return name, (self.whole(call, machine.world_size),), machine.world_size

    def choose(self, call: CollectiveCall, machine: Machine) -> Planned:
        if machine.nodes > 1:
            return self.over_nodes(call, machine)
        if machine.world_size == 1:
            return Planned("copy", Copy(), ONE_RANK)
        return super().choose(call, machine)

    def over_nodes(self, call: CollectiveCall, machine: Machine) -> Planned:
        """Plan of a team of several nodes: the node's call has the design that was asked for."""
        nbytes = call.nbytes if self.gathers else call.nbytes // machine.nodes
        node = self.plan(CollectiveCall(nbytes, call.dtype, call.design), machine.node)
        return Planned("over_nodes", OverNodes(node=node), f"{machine.nodes} nodes: to each node once, by rail")

    def tuned(self, call: CollectiveCall, machine: Machine) -> Planned | None:
        planned = super().tuned(call, machine)
        if planned is None:
            return None
        # The row may have been measured with another alignment than this message's.
        whole = self.whole(call, machine.world_size)
        if isinstance(planned.design, CopyEngine):
            fits = call.design != AUTO or self.copies_fit(call, machine)
            return planned if fits and has_even_lines(whole, machine.world_size) else None
        return planned if planned.design.push.transport == self.transport(call, machine.world_size) else None

    def space(self, call: CollectiveCall, machine: Machine, quick: bool = False) -> Iterator[Any]:
        if machine.world_size == 1 or machine.nodes > 1:
            return
        whole = self.whole(call, machine.world_size)
        for kind in self.designs.values():
            if kind is CopyEngine and has_even_lines(whole, machine.world_size) and not call.fp8_wire:
                yield from copy_engines(whole)
            elif kind in (Push, OneShot, TwoShot):
                for push in pushes(self.transport(call, machine.world_size), quick):
                    yield kind(push=push)

    def rule(self, call: CollectiveCall, machine: Machine) -> tuple[str, str]:
        if machine.world_size == 1:
            return "copy", ONE_RANK
        whole, limit = self.whole(call, machine.world_size), of_world(self.copy_engine_from, machine.world_size)
        if whole < limit or not has_even_lines(whole, machine.world_size):
            return self.push_rule(whole, machine)
        if not self.copies_fit(call, machine):
            name, _ = self.push_rule(whole, machine)
            return name, f"{whole:,} bytes >= {limit:,}, but the heap has no room for copy engines' staging buffers"
        return "copy_engine", f"{whole:,} bytes >= {limit:,}: copy engines fill the links, one peer at a time"

    def push_rule(self, whole: int, machine: Machine) -> tuple[str, str]:
        """Name of the design that pushes ``whole`` bytes, and the reason."""
        return "push", "one hop, no flags"

    def default(self, name: str, call: CollectiveCall, machine: Machine) -> Any:
        world_size = machine.world_size
        if name == "copy":
            return Copy()
        if name == "copy_engine":
            return of_world(self.copies, world_size)
        whole = self.whole(call, world_size)
        hops = FP8_HOPS if call.fp8_wire else TWO_HOPS if name == "two_shot" else ONE_HOP
        table = of_world(hops, world_size)
        _, row_bytes, num_warps, per_sm = next(row for row in table if whole <= row[0])
        transport = self.transport(call, world_size)
        push = PushPlan(transport=transport, row_bytes=row_bytes, num_warps=num_warps, programs_per_sm=per_sm)
        return self.designs[name](push=push)

    def transport(self, call: CollectiveCall, world_size: int) -> str:
        """Arrival protocol: "lamport" for numbers, their own flags; "keyed" for any bits; "fp8"."""
        if call.fp8_wire:
            return "fp8"
        if not self.moves_bits or word_of(self.whole(call, world_size) // world_size).itemsize == 1:
            return "lamport"
        return "keyed"

    def copies_fit(self, call: CollectiveCall, machine: Machine) -> bool:
        """True if the heap has room for the staging buffers of copy engines."""
        part = call.nbytes if self.gathers else cdiv(call.nbytes, machine.world_size)
        buffers = (machine.world_size - 1) * self.staging_buffers
        return capacity_for(buffers * min(part, ROUND_BYTES // machine.world_size)) <= machine.staging_bytes


def checked_shape(op: str, shape: object) -> tuple[int, ...]:
    """``shape`` as a tuple. ValueError unless it is a sequence of sizes."""
    if not isinstance(shape, Sequence) or not all(isinstance(size, int) and size >= 0 for size in shape):
        raise ValueError(f"{op}: shape={quoted(shape)} is no shape; pass a tuple of sizes")
    return tuple(shape)


def has_even_lines(whole: int, world_size: int) -> bool:
    """True if every rank's part is whole memory lines, so that kernels copy 16 bytes a thread."""
    return whole % (LINE_BYTES * world_size) == 0


def of_world(table: dict[int, Any], world_size: int) -> Any:
    """Entry of the smallest measured world size that is at least this one, else of the largest."""
    return next((entry for size, entry in table.items() if size >= world_size), table[max(table)])
