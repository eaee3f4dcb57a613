"""Check of all ops: ``python -m tests.check.sweep --schedules 500 --world-size 2,3,4 [--op NAME,NAME]``.

``--table`` runs the ops' cases, with each design, instead of the list here; ``--node-size L`` the ops
over nodes of L ranks. ``--jobs`` spreads the schedules over processes. ``--json FILE`` writes the runs
and findings, after each call; with ``--resume`` the file's rows stay, and calls that it has clean with as
many schedules are left out.

Prints findings and times. tests/check/test_ops.py runs a few schedules of the same calls.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
import triton

import weft
import weft.check
from tests.ops.checking import call_op, inputs_of
from tests.ops.nodes import experts, norms
from weft import ops
from weft.bench.harness.machine import revision
from weft.ops.case import Case
from weft.ops.collectives.all_reduce import ALL_REDUCE
from weft.ops.moe.all_gather_grouped_matmul_silu_mul import AG_MOE
from weft.ops.moe.grouped import GroupedTiles
from weft.ops.moe.grouped_matmul_reduce_scatter import MOE_RS
from weft.ops.moe.routing import Experts, Routing
from weft.ops.op import Op, registered
from weft.ops.overlap.sequential import Overlapped
from weft.runtime.files import put

# Lamport stages are reused in the eighth call.
CALLS = 10
# Schedules that one process runs at a time.
SHARE = 50


@dataclass(frozen=True, slots=True)
class Call:
    """``run(team, tensor)``, called ``calls`` times on GPUs with ``sms`` SMs.

    ``tensor(*shape)`` makes an input that differs by rank and call.
    """

    name: str
    run: Callable[[Any, Callable[..., torch.Tensor]], Any]
    calls: int = CALLS
    sms: int = 8

    def __call__(self, team: Any) -> list[Any]:
        generator = torch.Generator().manual_seed(team.rank)

        def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            # One operation without operands: the check sees nothing between two calls' kernels, which may overlap.
            return torch.randn(shape, generator=generator, dtype=dtype)

        # No barrier in between: a rank may be one call ahead.
        return [self.run(team, tensor) for _ in range(self.calls)]


def mixed(team: Any, x: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    """Run large calls after small ones and vice versa, on one workspace."""
    out = []
    for n in (7, 900, 64):
        out += [ops.all_reduce(x(n), team, "one_shot"), ops.all_gather(x(n), team)]
        out += [ops.reduce_scatter(x(team.size, n), team), ops.all_reduce(x(n), team, "two_shot")]
    return out


def fused_norm(team: Any, x: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return ops.all_reduce_rms_norm(x(3, 64), torch.ones(3, 64).bfloat16(), torch.ones(64).bfloat16(), 1e-6, team)


def deferred_norm(team: Any, x: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the op and the GEMM that applies the RMS scale, which reads all programs' parts of a row."""
    normed, hidden = ops.all_reduce_rms_norm(
        x(3, 640), torch.ones(3, 640).bfloat16(), torch.ones(640).bfloat16(), 1e-6, team, factored=True
    )
    return ops.matmul(normed, torch.ones(16, 640).bfloat16()), hidden


def norm_of_parts(team: Any, x: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the op after the GEMM that makes its partial sums, whose kernel may still run."""
    parts = ops.matmul_parts(x(3, 192), torch.ones(64, 192).bfloat16())
    return ops.all_reduce_rms_norm(parts, torch.ones(3, 64).bfloat16(), torch.ones(64).bfloat16(), 1e-6, team)


def sum_of_parts(team: Any, x: Callable[..., torch.Tensor]) -> torch.Tensor:
    return ALL_REDUCE.run_of_partials(ops.matmul_parts(x(3, 192), torch.ones(64, 192).bfloat16()), torch.bfloat16, team)


def rows_of_norm(team: Any, x: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return ops.all_reduce_rms_norm(
        x(4, 64), torch.ones(4, 64).bfloat16(), torch.ones(64).bfloat16(), 1e-6, team, "one_shot"
    )


def copied(team: Any, x: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    """Run all ops, which share receive buffers of all sizes, while a rank may be one call ahead."""
    w, by = team.size, "copy_engine"
    out = [ops.all_reduce(x(w * 40), team, by), ops.all_gather(x(3, 24), team, by)]
    return [*out, ops.reduce_scatter(x(w, 64), team, by), ops.all_to_all(x(w, 40), team, by)]


def pipelined(op: Overlapped, team: Any, x: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Run the pipelined design (cuBLAS and copy engines), which plans choose on GPUs only."""
    return op.run(op.designs["pipelined"](chunks=2), team, x(team.size * 24, 32), x(48, 32))


def routed(
    team: Any, x: Callable[..., torch.Tensor], algorithm: str, width: int = 40, dtype: torch.dtype | None = None
) -> tuple[ops.Dispatched, int]:
    """Tokens of a rank, another number in each call, at the ranks of their experts."""
    tokens = (team.rank + int(x(1).abs().item() * 8)) % 5
    routing = ops.route(x(tokens, 2 * team.size), 2)
    size = {"experts": 2 * team.size, "max_tokens": 5}
    return ops.moe_dispatch(x(tokens, width), routing, team, dtype=dtype, algorithm=algorithm, **size), tokens


def dispatched(team: Any, x: Callable[..., torch.Tensor], algorithm: str = "push") -> torch.Tensor:
    """Dispatch, and read what arrived in another kernel, while a peer may be in its next call."""
    found, _ = routed(team, x, algorithm)
    schedule = ops.moe_schedule(found.routing.ids, found.experts)
    result = ops.grouped_matmul(found.rows, torch.ones(2, 16, 40).bfloat16(), schedule, gather=True)
    return result[: int(schedule.counts.sum())].clone()


def dispatched_fp8(team: Any, x: Callable[..., torch.Tensor], algorithm: str = "push") -> torch.Tensor:
    found, _ = routed(team, x, algorithm, 144, torch.float8_e4m3fn)
    schedule, weight = ops.moe_schedule(found.routing.ids, found.experts), torch.ones(2, 16, 144).bfloat16()
    result = ops.grouped_matmul(found.rows, weight, schedule, gather=True, scales=found.scales)
    return result[: int(schedule.counts.sum())].clone()


def combined(team: Any, x: Callable[..., torch.Tensor], algorithm: str = "push") -> torch.Tensor:
    found, tokens = routed(team, x, "gather")
    return ops.moe_combine(x(len(found.rows) * 2, 40), found, tokens, team, algorithm=algorithm)


def heads_there(team: Any, x: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    """Exchange heads of tensors with several tiles each, of other numbers of tokens at every rank."""
    tokens = tuple(2 + 3 * (rank == 0) for rank in range(team.size))
    mine = [x(tokens[team.rank], heads * team.size, 60) for heads in (2, 1)]
    return ops.sequence_to_heads(mine, team, tokens=tokens)


def heads_back(team: Any, x: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    tokens = tuple(2 + 3 * (rank == 0) for rank in range(team.size))
    return ops.heads_to_sequence([x(sum(tokens), heads, 60) for heads in (2, 1)], team, tokens=tokens)


def prefilled(team: Any, x: Callable[..., torch.Tensor], algorithm: str = "gathered") -> torch.Tensor:
    """Attend to a prompt of a few tokens; a rank may be one call ahead."""
    shards = ops.ZigzagShards(lengths=(2 * team.size + 1,), world_size=team.size)
    heads = team.size if algorithm == "ulysses" else 1
    q, k, v = (x(shards.tokens[team.rank], heads, 16) for _ in range(3))
    return ops.gathered_prefill_attention(q, k, v, shards.lengths, team, algorithm=algorithm)


def attended(team: Any, x: Callable[..., torch.Tensor], algorithm: str) -> list[torch.Tensor]:
    """Attention to caches over ranks, of other batches and lengths, which share one workspace. 24 heads: for W = 8 too."""
    cache, out = (x(6, 1, 16, 16), x(6, 1, 16, 16)), []
    for lengths in ((16 * team.size + 1,), (33, 0), (1,)):
        pages = torch.arange(3 * len(lengths), dtype=torch.int32).view(-1, 3)
        given = torch.ones(len(lengths), 24, 16).bfloat16(), *cache, pages, torch.tensor(lengths, dtype=torch.int32)
        out.append(ops.sharded_decode_attention(*given, team, algorithm=algorithm))
    return out


def trained(team: Any, x: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    """Dispatch, compute, combine, and all gradients, while a peer may be in its next call."""
    tokens, experts = (team.rank + int(x(1).abs().item() * 8)) % 5, 2 * team.size
    leaves = [x(*shape).requires_grad_() for shape in ((tokens, 16), (experts, 16), (2, 16, 16))]
    rows, router, weight = leaves
    routing = ops.route(ops.matmul(rows, router) if tokens else rows @ router.T, 2)
    found = ops.moe_dispatch(rows, routing, team, experts=experts, max_tokens=5, algorithm="push")
    schedule = ops.moe_schedule(found.routing.ids, found.experts)
    h = ops.grouped_matmul(found.rows, weight, schedule, gather=True)
    y = ops.grouped_matmul(h, weight, schedule)
    ops.moe_combine(y, found, tokens, team, algorithm="push").backward(x(tokens, 16))
    return [leaf.grad for leaf in leaves]


def mlp_trained(team: Any, x: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    """AG-GEMM, GEMM-RS and GEMM-AR, and all gradients, in both orders of rows; a gather runs beside a GEMM-RS."""
    leaves = [x(*shape).requires_grad_() for shape in ((6, 16), (24, 16), (16, 24))]
    rows, up, down = leaves
    for own_first in (False, True):
        wide = ops.all_gather_matmul(rows, up, team, own_first=own_first)
        rows = ops.matmul_reduce_scatter(wide, down, team, own_first=own_first)
    ops.matmul_all_reduce(ops.matmul(rows, up), down, team).backward(x(6, 16))
    return [leaf.grad for leaf in leaves]


def normed_pairs(team: Any, x: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the op behind the kernels that make its rows, choices and weights, which may still run."""
    logits = torch.randn(2, team.size, generator=torch.Generator().manual_seed(0)).bfloat16()
    routing, experts = ops.route(logits, 2), ops.Experts.whole(team.size, team.rank, team.size)
    ones = torch.ones(2, 48).bfloat16(), torch.ones(48).bfloat16()
    given = x(4, 16), x(1, 48, 16), ops.moe_schedule(routing.ids, experts), routing, experts, *ones, 1e-6, team
    return ops.grouped_matmul_all_reduce_rms_norm(*given, algorithm="in_norm")


EXPERT_TILES = GroupedTiles(block_n=16, block_k=32, columns=16, num_warps=4, num_stages=2)


def chosen(x: Callable[..., torch.Tensor], tokens: int, experts: int) -> Routing:
    """Random choices of two experts a token."""
    return Routing(x(tokens, experts).topk(2).indices.int(), x(tokens, 2))


def experts_gathered(team: Any, x: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Whole experts' GEMM of tokens that arrive, sometimes none, while a peer may be in its next call."""
    tokens, total = 5 * ((team.rank + int(x(1).abs().item() * 8)) % 5 > 0), 2 * team.size
    experts, design = Experts.whole(total, team.rank, team.size), AG_MOE.designs["fused"]
    given = x(tokens, 32), *chosen(x, tokens, total), x(2, 16, 32), experts, 5, 16
    h, _, counts, *_ = AG_MOE.run(design(tiles=EXPERT_TILES, chunks=3, head=2), team, *given)
    return h[: int(counts.sum())].clone()


def experts_gathered_fp8(team: Any, x: Callable[..., torch.Tensor]) -> torch.Tensor:
    """As ``experts_gathered``, but rows are sent in fp8, with their scales."""
    tokens, total = 5 * ((team.rank + int(x(1).abs().item() * 8)) % 5 > 0), 2 * team.size
    experts, design = Experts.whole(total, team.rank, team.size), AG_MOE.designs["fused"]
    given = x(tokens, 144), *chosen(x, tokens, total), x(2, 16, 144), experts, 5, 16, True
    h, _, counts, *_ = AG_MOE.run(design(tiles=EXPERT_TILES, chunks=3, head=2, in_place=False), team, *given)
    return h[: int(counts.sum())].clone()


def experts_scattered(team: Any, x: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Two slabs of the GEMM of slices of experts, and their sums at the tokens' ranks."""
    experts, routing = Experts.slices(2), chosen(x, 3 * team.size, 2)
    schedule, design = ops.moe_schedule(routing.ids, experts, start=3 * team.rank), MOE_RS.designs["slabs"]
    given = x(6 * team.size, 16), x(2, 32, 16), schedule, routing, experts, 3
    return MOE_RS.run(design(tiles=EXPERT_TILES, slabs=2), team, *given)


# Calls in which a program has several tiles and sends the next one before it receives this one.
SEVERAL_TILES = [
    Call("all_reduce one_shot, tiles", lambda team, x: ops.all_reduce(x(1500), team, "one_shot"), 3, 2),
    Call("all_reduce two_shot, tiles", lambda team, x: ops.all_reduce(x(1300 * team.size), team, "two_shot"), 3, 2),
    Call("all_gather tiles", lambda team, x: ops.all_gather(x(1500), team), 3, 2),
    Call("reduce_scatter tiles", lambda team, x: ops.reduce_scatter(x(team.size, 1500), team), 3, 2),
    Call("all_to_all tiles", lambda team, x: ops.all_to_all(x(team.size, 1500), team), 3, 2),
    Call("all_reduce_rms_norm rows", rows_of_norm, 3, 1),
]
OPS = [
    Call("all_reduce one_shot", lambda team, x: ops.all_reduce(x(700), team, "one_shot")),
    Call("all_reduce two_shot", lambda team, x: ops.all_reduce(x(1100), team, "two_shot")),
    Call("all_reduce multimem_one_shot", lambda team, x: ops.all_reduce(x(4100), team, "multimem_one_shot"), 3),
    Call(
        "all_reduce multimem_two_shot",
        lambda team, x: ops.all_reduce(x(2100 * team.size), team, "multimem_two_shot"),
        3,
    ),
    Call("all_reduce fp32", lambda team, x: ops.all_reduce(x(300, dtype=torch.float32), team)),
    Call("all_gather int8", lambda team, x: ops.all_gather(x(5, 33).to(torch.int8), team)),
    Call("all_reduce_rms_norm", fused_norm),
    Call("all_reduce_rms_norm deferred", deferred_norm),
    Call("all_reduce_rms_norm of parts", norm_of_parts),
    Call("all_reduce of parts", sum_of_parts),
    Call("mixed collectives", mixed, calls=3),
    Call("all_gather", lambda team, x: ops.all_gather(x(3, 170), team)),
    Call("all_gather bytes", lambda team, x: ops.all_gather(x(77).to(torch.int8), team)),
    Call("reduce_scatter", lambda team, x: ops.reduce_scatter(x(team.size * 2, 300), team)),
    Call("all_to_all", lambda team, x: ops.all_to_all(x(team.size * 2, 200), team)),
    Call("all_reduce copy_engine", lambda team, x: ops.all_reduce(x(team.size * 40 + 3), team, "copy_engine"), 3),
    Call("all_gather copy_engine", lambda team, x: ops.all_gather(x(3, 24), team, "copy_engine"), 3),
    Call("reduce_scatter copy_engine", lambda team, x: ops.reduce_scatter(x(team.size, 64), team, "copy_engine"), 3),
    Call("all_to_all copy_engine", lambda team, x: ops.all_to_all(x(team.size, 40), team, "copy_engine"), 3),
    Call("mixed copy_engine", copied, 2),
    Call("sequence_to_heads", heads_there, 2, 2),
    Call("heads_to_sequence", heads_back, 2, 2),
    Call("gathered_prefill_attention", prefilled, 2),
    Call("moe_dispatch", dispatched, 4),
    Call("moe_dispatch gather", functools.partial(dispatched, algorithm="gather"), 2),
    Call("moe_dispatch lamport", functools.partial(dispatched, algorithm="lamport"), 2),
    Call("moe_dispatch fp8", dispatched_fp8, 2),
    Call("moe_combine", combined, 4),
    Call("moe_combine lamport", functools.partial(combined, algorithm="lamport"), 2),
    Call("moe_combine sum_then_scatter", functools.partial(combined, algorithm="sum_then_scatter"), 2),
    Call("sharded_decode_attention one_kernel", functools.partial(attended, algorithm="one_kernel"), 1),
    Call("sharded_decode_attention two_kernels", functools.partial(attended, algorithm="two_kernels"), 1),
    Call("grouped_matmul_all_reduce_rms_norm", normed_pairs, 2),
    Call("all_gather_grouped_matmul_silu_mul", experts_gathered, 2, 4),
    Call("all_gather_grouped_matmul_silu_mul fp8", experts_gathered_fp8, 2, 4),
    Call("grouped_matmul_reduce_scatter", experts_scattered, 2, 4),
    Call("barrier", lambda team, x: ops.barrier(team)),
    Call("matmul", lambda team, x: ops.matmul(x(40, 48), x(56, 48))),
    Call("all_gather_matmul", lambda team, x: ops.all_gather_matmul(x(24, 32), x(48, 32), team)),
    Call("matmul_reduce_scatter", lambda team, x: ops.matmul_reduce_scatter(x(team.size * 24, 32), x(48, 32), team)),
    Call("matmul_all_reduce", lambda team, x: ops.matmul_all_reduce(x(40, 32), x(48, 32), team)),
    *(
        Call(f"{op.name} pipelined", functools.partial(pipelined, op), 3)
        for op in registered()
        if isinstance(op, Overlapped)
    ),
    *SEVERAL_TILES,
]


def case_over_nodes(cases: Callable[[int, int], Iterator[Case]], index: int, team: Any, x: Callable) -> Any:
    """One of the ``cases`` of tests/ops/nodes.py."""
    case = list(cases(team.shape.nodes, team.size))[index]
    return call_op(case, team, inputs_of(case, team.rank))


def pipelined_over_nodes(op: Overlapped, team: Any, x: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Run the node's pipelined design, under whose GEMMs rails move pieces."""
    sizes = team.size * 8, 16, 32
    case = Case(op=op.name, world_size=team.size, dtype=torch.bfloat16, sizes=sizes, design="pipelined")
    return call_op(case, team, (x(8 if op.gathers else team.size * 8, 32), x(16, 32)))


# What works over nodes, with two calls in a row: the second writes where peers may still read the first one's, and makes no
# workspace, at which the ranks would meet.
OVER_NODES = [
    Call("all_gather", lambda team, x: ops.all_gather(x(3, 17), team), 2),
    Call("reduce_scatter", lambda team, x: ops.reduce_scatter(x(team.size * 2, 30), team), 2),
    Call("all_reduce", lambda team, x: ops.all_reduce(x(team.size * 40 + 3), team), 2),
    Call("all_to_all", lambda team, x: ops.all_to_all(x(team.size * 2, 20), team), 2),
    Call("all_gather copy_engine", lambda team, x: ops.all_gather(x(3, 24), team, "copy_engine"), 2),
    Call("reduce_scatter copy_engine", lambda team, x: ops.reduce_scatter(x(team.size, 64), team, "copy_engine"), 2),
    Call("all_reduce copy_engine", lambda team, x: ops.all_reduce(x(team.size * 40 + 3), team, "copy_engine"), 2),
    Call("all_to_all copy_engine", lambda team, x: ops.all_to_all(x(team.size, 40), team, "copy_engine"), 2),
    Call("barrier", lambda team, x: ops.barrier(team), 2),
    Call("all_reduce_rms_norm", fused_norm, 2),
    Call("grouped_matmul_all_reduce_rms_norm", functools.partial(case_over_nodes, norms, -2), 2),
    Call("all_gather_matmul", lambda team, x: ops.all_gather_matmul(x(8, 32), x(16, 32), team), 2),
    Call("matmul_reduce_scatter", lambda team, x: ops.matmul_reduce_scatter(x(team.size * 8, 32), x(16, 32), team), 2),
    Call("matmul_all_reduce", lambda team, x: ops.matmul_all_reduce(x(9, 32), x(16, 32), team), 2),
    *(
        Call(f"{op.name} pipelined", functools.partial(pipelined_over_nodes, op), 2)
        for op in registered()
        if isinstance(op, Overlapped)
    ),
    Call("moe_dispatch", dispatched, 2),
    Call("moe_combine", combined, 2),
    Call("moe_combine lamport", functools.partial(combined, algorithm="lamport"), 2),
    Call("all_gather_grouped_matmul_silu_mul", functools.partial(case_over_nodes, experts, -4), 2),
    Call("grouped_matmul_reduce_scatter", functools.partial(case_over_nodes, experts, -2), 2),
    Call("sharded_decode_attention", functools.partial(attended, algorithm="two_kernels"), 1),
]

# Too slow for a few schedules in every run of the tests.
SLOW = [
    Call("moe_dispatch and moe_combine, with gradients", trained, 2),
    Call("overlapped GEMMs, with gradients", mlp_trained, 2),
]


def table(world_size: int) -> list[Call]:
    """Calls for the cases of all ops at this world size."""
    return [
        Call(str(case), functools.partial(results_of, op, case))
        for op in registered()
        for case in op.cases()
        if case.world_size == world_size
    ]


def results_of(op: Op, case: Case, team: Any, x: Callable[..., torch.Tensor]) -> Any:
    """Results of a case, without the code that picks what the op defines: it reads all rows of a receive buffer."""
    return op.results(case, team, *op.arguments(case, team, *inputs_of(case, team.rank)))


@dataclass(frozen=True, slots=True)
class Share:
    """Part of the schedules of one call, from ``seed`` on."""

    table: bool
    node_size: int | None
    index: int
    world_size: int
    seed: int
    schedules: int


@dataclass(slots=True)
class Swept:
    """Results of one call's schedules. ``seconds``: of one core. ``revision``: the checked sources."""

    op: str
    world_size: int
    node_size: int | None
    revision: str
    schedules: int = 0
    seconds: float = 0.0
    findings: list[str] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, int, int | None]:
        return self.op, self.world_size, self.node_size

    def add(self, schedules: int, seconds: float, findings: list[str]) -> None:
        self.schedules += schedules
        self.seconds += seconds
        self.findings += [new for new in findings if new not in self.findings]


@functools.cache
def calls(from_table: bool, world_size: int, node_size: int | None = None) -> list[Call]:
    if node_size is not None:
        return OVER_NODES
    return table(world_size) if from_table else [*OPS, *SLOW]


def shares(chosen: argparse.Namespace, done: Collection[tuple[str, int, int | None]]) -> Iterator[Share]:
    """Shares of the chosen calls but those of ``done``."""
    for size in sorted((int(size) for size in chosen.world_size.split(",")), reverse=True):
        for index, call in enumerate(calls(chosen.table, size, chosen.node_size)):
            wanted = call.name.startswith(tuple(chosen.op.split(",")))
            if wanted and (call.name, size, chosen.node_size) not in done:
                for seed in range(0, chosen.schedules, SHARE):
                    count = min(SHARE, chosen.schedules - seed)
                    yield Share(chosen.table, chosen.node_size, index, size, chosen.seed + seed, count)


def sweep(share: Share) -> tuple[float, list[str]]:
    torch.set_num_threads(1)
    call = calls(share.table, share.world_size, share.node_size)[share.index]

    def main(team: Any) -> list[Any]:
        return call(team if share.node_size is None else weft.init(node_size=share.node_size))

    started = time.perf_counter()
    report = weft.check.check(
        main, share.world_size, schedules=share.schedules, seed=share.seed, sms=call.sms, heap_bytes=None
    )
    return time.perf_counter() - started, [] if report.ok else [str(report)]


def outcomes(todo: list[Share], jobs: int) -> Iterator[tuple[float, list[str]]]:
    """Results of ``sweep`` for ``todo``, in order. One job runs in this process."""
    if jobs == 1:
        yield from map(sweep, todo)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("fork")) as pool:
        yield from pool.map(sweep, todo)


def read(file: Path) -> dict[tuple[str, int, int | None], Swept]:
    """Rows that ``write`` has left in ``file``; none if there is no such file."""
    rows = json.loads(file.read_text())["swept"] if file.exists() else []
    return {one.key: one for one in (Swept(**row) for row in rows)}


def write(file: Path, swept: Iterable[Swept]) -> None:
    """Write the command, the revision and the results, one line per call."""
    head = {
        "command": " ".join(["python -m tests.check.sweep", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M"),
        "revision": running(),
        "versions": {module.__name__: module.__version__ for module in (torch, triton, numpy)},
    }
    rows = [json.dumps(asdict(one) | {"seconds": round(one.seconds, 1)}) for one in swept]
    lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    put(file, "\n".join(["{", *lines, ' "swept": [', ",\n".join(f"  {row}" for row in rows), " ]", "}"]) + "\n")


@functools.cache
def running() -> str:
    """Revision of the sources when the sweep began."""
    return revision(Path(weft.__file__).parent)


def command() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", default="2,3,4")
    parser.add_argument("--schedules", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--op", default="", help="run only the ops whose name has one of these prefixes")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--node-size", type=int)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", metavar="FILE", type=Path)
    parser.add_argument("--resume", action="store_true", help="go on where the --json FILE ends")
    chosen = parser.parse_args()
    if chosen.resume and not chosen.json:
        parser.error("--resume goes on where a file ends; name it with --json FILE")
    earlier = read(chosen.json) if chosen.resume else {}
    done = {key for key, one in earlier.items() if one.schedules >= chosen.schedules and not one.findings}
    running()
    todo = list(shares(chosen, done))
    left = Counter((share.world_size, share.index) for share in todo)
    swept: dict[tuple[str, int, int | None], Swept] = {}
    for share, (seconds, findings) in zip(todo, outcomes(todo, chosen.jobs), strict=True):
        name = calls(share.table, share.world_size, share.node_size)[share.index].name
        found = Swept(op=name, world_size=share.world_size, node_size=share.node_size, revision=running())
        found = swept.setdefault(found.key, found)
        found.add(share.schedules, seconds, findings)
        left[share.world_size, share.index] -= 1
        if not left[share.world_size, share.index]:
            print(
                f"{found.op:40} W={found.world_size} {found.schedules} schedules {found.seconds:7.1f} s"
                f"  {len(found.findings)} findings",
                flush=True,
            )
            for report in found.findings:
                print(report, flush=True)
            if chosen.json:
                write(chosen.json, {**earlier, **swept}.values())
    failed = sum(bool(one.findings) for one in swept.values())
    print(f"{len(swept)} calls, {sum(one.schedules for one in swept.values())} schedules, {failed} with findings")
    return 1 if failed or not (swept or done) else 0


if __name__ == "__main__":
    sys.exit(command())
