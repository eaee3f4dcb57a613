"""Calls of ops that ``python -m tests.check.sweep`` checks; tests/check/test_ops.py runs a few schedules of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tests.ops.checking import call_op, inputs_of
from tests.ops.nodes import experts, norms
from weft import ops
from weft.kernels.fp8 import quantized_weight
from weft.ops.case import Case
from weft.ops.collectives.all_reduce import ALL_REDUCE
from weft.ops.moe.all_gather_grouped_matmul_silu_mul import AG_MOE
from weft.ops.moe.exchange.pipelined import CombinePieces
from weft.ops.moe.grouped.cases import quantized_experts
from weft.ops.moe.grouped.gemms import GroupedArguments, GroupedTiles
from weft.ops.moe.grouped_matmul_reduce_scatter import MOE_RS
from weft.ops.moe.moe_combine import MOE_COMBINE, CombineArguments
from weft.ops.moe.overlapped import GatherArguments, ScatterArguments
from weft.ops.moe.routing import Experts, Routing
from weft.ops.op import Op, registered
from weft.ops.overlap.matmul_reduce_scatter import MATMUL_REDUCE_SCATTER
from weft.ops.overlap.sequential import Overlapped

# Lamport stages are reused in the eighth call.
CALLS = 10


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


def norm_in_fp8(algorithm: str, team: Any, x: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the op with rows that travel in fp8, in several parts with a ragged last one."""
    ones = torch.ones(3, 640).bfloat16()
    return ops.all_reduce_rms_norm(x(3, 640), ones, ones[0], 1e-6, team, algorithm, wire="fp8")


def norm_of_parts(team: Any, x: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the op after the GEMM that makes its partial sums, whose kernel may still run."""
    parts = ops.matmul_parts(x(3, 192), torch.ones(64, 192).bfloat16())
    return ops.all_reduce_rms_norm(parts, torch.ones(3, 64).bfloat16(), torch.ones(64).bfloat16(), 1e-6, team)


def scattered_in_fp8(team: Any, x: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Run GEMM-RS in pieces that are put in fp8, of ragged groups."""
    design = MATMUL_REDUCE_SCATTER.designs["pipelined"](chunks=2, streams=2, fp8_wire=True)
    return MATMUL_REDUCE_SCATTER.run(design, team, x(team.size * 12, 32), x(200, 32))


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


def overlapped_fp8(op: Overlapped, team: Any, x: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    """Run the pipelined design and the plan's, whose scales travel beside the rows or are of whole rows."""
    rows = 6 if op.gathers else team.size * 6
    by_blocks, by_rows = (quantized_weight(x(16, 144), scheme) for scheme in ("block", "channel"))
    first = op.run(op.designs["pipelined"](chunks=2), team, x(rows, 144), by_blocks)
    return [first, getattr(ops, op.name)(x(rows, 144), by_rows, team)]


def routed(
    team: Any,
    x: Callable[..., torch.Tensor],
    algorithm: str,
    width: int = 40,
    dtype: torch.dtype | None = None,
    most: int = 5,
) -> tuple[ops.Dispatched, int]:
    """Tokens of a rank, another number in each call, at the ranks of their experts."""
    tokens = (team.rank + int(x(1).abs().item() * 8)) % 5 * most // 5
    routing = ops.route(x(tokens, 2 * team.size), 2)
    size = {"experts": 2 * team.size, "max_tokens": most}
    return ops.moe_dispatch(x(tokens, width), routing, team, dtype=dtype, algorithm=algorithm, **size), tokens


def dispatched(team: Any, x: Callable[..., torch.Tensor], algorithm: str = "push") -> torch.Tensor:
    """Dispatch, and read what arrived in another kernel, while a peer may be in its next call."""
    found, _ = routed(team, x, algorithm)
    schedule = ops.moe_schedule(found.routing.ids, found.experts)
    result = ops.grouped_matmul(found.rows, torch.ones(2, 16, 40).bfloat16(), schedule, gather=True)
    return result[: int(schedule.counts.sum())].clone()


def dispatched_fp8(
    team: Any, x: Callable[..., torch.Tensor], algorithm: str = "push", most: int = 5, width: int = 144
) -> torch.Tensor:
    found, _ = routed(team, x, algorithm, width, torch.float8_e4m3fn, most)
    schedule, weight = ops.moe_schedule(found.routing.ids, found.experts), torch.ones(2, 16, width).bfloat16()
    result = ops.grouped_matmul(found.rows, weight, schedule, gather=True, scales=found.scales)
    return result[: int(schedule.counts.sum())].clone()


def combined(team: Any, x: Callable[..., torch.Tensor], algorithm: str = "push", width: int = 40) -> torch.Tensor:
    found, tokens = routed(team, x, "lamport")
    return ops.moe_combine(x(len(found.rows) * 2, width), found, tokens, team, algorithm=algorithm)


def combined_in_pieces(team: Any, x: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Three pieces, of which a program of the last kernel adds up tokens of several."""
    (found, tokens), design = routed(team, x, "lamport", most=20), CombinePieces(pieces=(1, 1, 1), per_sm=1)
    given = CombineArguments(x(len(found.rows) * 2, 40), *found.routing, 2 * team.size, tokens, team.name, "auto")
    return MOE_COMBINE.run(design, team, given)


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


def attended(team: Any, x: Callable[..., torch.Tensor], algorithm: str, fp8: bool = False) -> list[torch.Tensor]:
    """Attention to caches over ranks, of other batches and lengths, which share one workspace. 24 heads: for W = 8 too."""
    cache, out = (x(6, 1, 16, 16), x(6, 1, 16, 16)), []
    scales = {"k_scale": torch.ones(1), "v_scale": torch.ones(1)} if fp8 else {}
    if fp8:
        cache = tuple(part.to(torch.float8_e4m3fn) for part in cache)
    for lengths in ((16 * team.size + 1,), (33, 0), (1,)):
        pages = torch.arange(3 * len(lengths), dtype=torch.int32).view(-1, 3)
        given = torch.ones(len(lengths), 24, 16).bfloat16(), *cache, pages, torch.tensor(lengths, dtype=torch.int32)
        out.append(ops.sharded_decode_attention(*given, team, algorithm=algorithm, **scales))
    return out


def merged(team: Any, x: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge parts, and what that gives once more, whose kernel may still run."""
    out, lse = ops.merge_attention(x(3, 2, 5, 24), x(3, 2, 5, dtype=torch.float32))
    return ops.merge_attention(out[None], lse[None])


def of_one_rank(team: Any, x: Callable[..., torch.Tensor]) -> torch.Tensor:
    """A layer of experts without a peer, each kernel of which may start while the one before runs."""
    routing, experts = ops.route(x(5, 4), 2), Experts.slices(4)
    schedule = ops.moe_schedule(routing.ids, experts)
    h = ops.grouped_matmul_silu_mul(x(5, 32), x(4, 48, 32), schedule)
    return ops.moe_sum(ops.grouped_matmul(h, x(4, 32, 24), schedule), routing, experts)


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


def experts_gathered(
    team: Any, x: Callable[..., torch.Tensor], width: int = 32, fp8: bool = False, in_fp8: bool = False
) -> torch.Tensor:
    """Whole experts' GEMM of tokens that arrive, sometimes none, while a peer may be in its next call.

    fp8  rows are sent in fp8, with their scales; in_fp8: experts are in fp8 too
    """
    tokens, total = 5 * ((team.rank + int(x(1).abs().item() * 8)) % 5 > 0), 2 * team.size
    experts, design = Experts.whole(total, team.rank, team.size), AG_MOE.designs["fused"]
    rows, routing, gate_up = x(tokens, width), chosen(x, tokens, total), x(2, 16, width)
    sizes = total, experts.first, experts.count, 5, 16
    of_experts = ()
    if in_fp8:
        rows, routing = rows.bfloat16(), routing._replace(weights=routing.weights.bfloat16())
        gate_up, *of_experts = quantized_experts(gate_up, "block")
    given = GatherArguments(rows, routing, gate_up, *sizes, fp8, team.name, "auto", *of_experts)
    h, _, _, counts, *_ = AG_MOE.run(design(tiles=EXPERT_TILES, chunks=3, head=2, in_place=not fp8), team, given)
    return h[: int(counts.sum())].clone()


def experts_scattered(team: Any, x: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Two slabs of the GEMM of slices of experts, and their sums at the tokens' ranks."""
    experts, routing = Experts.slices(2), chosen(x, 3 * team.size, 2)
    schedule, design = ops.moe_schedule(routing.ids, experts, start=3 * team.rank), MOE_RS.designs["slabs"]
    gemm = GroupedArguments(x(6 * team.size, 16), x(2, 32, 16), schedule, False, None)
    given = ScatterArguments(gemm, routing, 2, 0, 2, 3, team.name, "auto")
    return MOE_RS.run(design(tiles=EXPERT_TILES, slabs=2), team, given)


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
    Call("all_reduce one_shot fp8", lambda team, x: ops.all_reduce(x(6, 700), team, "one_shot", wire="fp8"), 3, 2),
    Call("all_reduce two_shot fp8", lambda team, x: ops.all_reduce(x(4, 1100), team, "two_shot", wire="fp8"), 3, 2),
    Call("all_reduce fp32", lambda team, x: ops.all_reduce(x(300, dtype=torch.float32), team)),
    Call("all_gather int8", lambda team, x: ops.all_gather(x(5, 33).to(torch.int8), team)),
    Call("all_reduce_rms_norm", fused_norm),
    Call("all_reduce_rms_norm deferred", deferred_norm),
    Call("all_reduce_rms_norm one_shot fp8", functools.partial(norm_in_fp8, "one_shot")),
    Call("all_reduce_rms_norm two_shot fp8", functools.partial(norm_in_fp8, "two_shot")),
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
    Call("gathered_prefill_attention pipelined", functools.partial(prefilled, algorithm="pipelined"), 2),
    Call("gathered_prefill_attention ulysses", functools.partial(prefilled, algorithm="ulysses"), 2),
    Call("moe_dispatch", dispatched, 4),
    Call("moe_dispatch lamport", functools.partial(dispatched, algorithm="lamport"), 2),
    Call("moe_dispatch fp8", dispatched_fp8, 2),
    Call("moe_dispatch lamport fp8", functools.partial(dispatched_fp8, algorithm="lamport", width=256), 2),
    Call("moe_dispatch pipelined", functools.partial(dispatched, algorithm="pipelined"), 3),
    Call("moe_dispatch pipelined fp8", functools.partial(dispatched_fp8, algorithm="pipelined", most=20), 3),
    Call("moe_combine", combined, 4),
    Call("moe_combine lamport", functools.partial(combined, algorithm="lamport"), 2),
    Call("moe_combine lamport, whole tiles", functools.partial(combined, algorithm="lamport", width=128), 2),
    Call("moe_combine sum_then_scatter", functools.partial(combined, algorithm="sum_then_scatter"), 2),
    Call("moe_combine pipelined", combined_in_pieces, 3, 4),
    Call("sharded_decode_attention one_kernel", functools.partial(attended, algorithm="one_kernel"), 1),
    Call("sharded_decode_attention two_kernels", functools.partial(attended, algorithm="two_kernels"), 1),
    Call("sharded_decode_attention fp8", functools.partial(attended, algorithm="one_kernel", fp8=True), 1),
    Call("merge_attention", merged, 2),
    Call("route, moe_schedule, grouped GEMMs, moe_sum", of_one_rank, 2),
    Call("grouped_matmul_all_reduce_rms_norm", normed_pairs, 2),
    Call("all_gather_grouped_matmul_silu_mul", experts_gathered, 2, 4),
    Call("all_gather_grouped_matmul_silu_mul fp8", functools.partial(experts_gathered, width=144, fp8=True), 2, 4),
    Call(
        "all_gather_grouped_matmul_silu_mul of experts in fp8",
        functools.partial(experts_gathered, width=144, fp8=True, in_fp8=True),
        2,
        4,
    ),
    Call("grouped_matmul_reduce_scatter", experts_scattered, 2, 4),
    Call("barrier", lambda team, x: ops.barrier(team)),
    Call("matmul", lambda team, x: ops.matmul(x(40, 48), x(56, 48))),
    Call("all_gather_matmul", lambda team, x: ops.all_gather_matmul(x(24, 32), x(48, 32), team)),
    Call("matmul_reduce_scatter", lambda team, x: ops.matmul_reduce_scatter(x(team.size * 24, 32), x(48, 32), team)),
    Call("matmul_reduce_scatter with sums in fp8", scattered_in_fp8, 3),
    Call("matmul_all_reduce", lambda team, x: ops.matmul_all_reduce(x(40, 32), x(48, 32), team)),
    Call(
        "matmul_all_reduce with sums in fp8",
        lambda team, x: ops.matmul_all_reduce(x(9, 32), x(200, 32), team, wire="fp8"),
    ),
    *(
        Call(f"{op.name} pipelined", functools.partial(pipelined, op), 3)
        for op in registered()
        if isinstance(op, Overlapped)
    ),
    *(
        Call(f"{op.name} of weights in fp8", functools.partial(overlapped_fp8, op), 2)
        for op in registered()
        if isinstance(op, Overlapped)
    ),
    *SEVERAL_TILES,
]


def own_cases(op: Op, team: Any, x: Callable[..., torch.Tensor]) -> list[Any]:
    """Run all cases of ``op`` for this number of ranks, in a row."""
    return [results_of(op, case, team, x) for case in op.cases() if case.world_size == team.size]


# An op of several ranks without a call above is checked by its cases.
NAMED = {call.name.split()[0] for call in OPS}
OPS += [
    Call(op.name, functools.partial(own_cases, op), 2)
    for op in registered()
    if op.name not in NAMED and any(case.world_size > 1 for case in op.cases())
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
    Call("moe_dispatch lamport", functools.partial(dispatched, algorithm="lamport"), 2),
    Call("moe_combine", combined, 2),
    Call("moe_combine lamport", functools.partial(combined, algorithm="lamport"), 2),
    Call("moe_combine sum_then_scatter", functools.partial(combined, algorithm="sum_then_scatter"), 2),
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
    """Results of a case, without the code that picks what the op defines, where that reads all rows of a receive buffer."""
    tensors = inputs_of(case, team.rank)
    out = op.results(case, team, *op.arguments(case, team, *tensors))
    # Its rows behind the last pair are not written.
    return op.defined(case, team, out, *tensors) if op is AG_MOE else out
