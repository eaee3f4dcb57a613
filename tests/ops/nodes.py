"""Cases of the ops that work over several nodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from tests.sampled import sampled
from weft.ops.attention.cases import sharded_case
from weft.ops.case import BF16, FP16, FP32, Case


def teams_of_nodes(seeds: int) -> list[Any]:
    """Parameters (nodes, node_size, seed) of a test."""
    shapes = (2, 1), (2, 2), (2, 4), (4, 2), (3, 2)
    return sampled(((*shape, seed) for shape in shapes for seed in range(seeds)), lambda *one: one == (2, 2, 0))


def collectives(nodes: int, world_size: int) -> Iterator[Case]:
    """Even, ragged and empty sizes, several dtypes and layouts; designs within a node by name."""
    sizes = {
        "all_gather": ((5, 7), (1,), (0, 3), (640,)),
        "reduce_scatter": ((world_size, 33), (2 * world_size,), (world_size, 0), (3 * world_size, 64)),
        "all_reduce": ((3, 11), (1,), (0,), (4 * world_size, 64)),
        "all_to_all": ((world_size, 9), (2 * world_size, 3), (world_size, 0), (world_size, 128)),
    }
    for op, shapes in sizes.items():
        for shape, dtype in zip(shapes, (BF16, FP32, BF16, FP16), strict=True):
            yield Case(op=op, world_size=world_size, dtype=dtype, sizes=shape, fields=(("nodes", nodes),))
        fields = {"fields": (("nodes", nodes),), "dtype": BF16}
        yield Case(op=op, world_size=world_size, sizes=shapes[0], layout="transposed", **fields)
        yield Case(op=op, world_size=world_size, sizes=shapes[3], design="copy_engine", **fields)
    for op in ("all_gather", "all_to_all"):
        yield Case(op=op, world_size=world_size, dtype=torch.int8, sizes=(world_size, 5), fields=(("nodes", nodes),))


def gemms(world_size: int) -> Iterator[Case]:
    for op in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"):
        for dtype, (rows, n, k), layout in (
            (BF16, (5, 24, 40), "contiguous"), (FP32, (1, 7, 19), "contiguous"), (FP16, (16, 32, 32), "transposed"),
        ):  # fmt: skip
            yield Case(op=op, world_size=world_size, dtype=dtype, sizes=(world_size * rows, n, k), layout=layout)
    for rows in (1, 2 * world_size + 1):  # some ranks have no row
        for design in ("fused", "pipelined"):
            yield Case(op="matmul_all_reduce", world_size=world_size, dtype=BF16, sizes=(rows, 24, 40), design=design)


def norms(nodes: int, world_size: int) -> Iterator[Case]:
    """Ops with a norm behind the sum over the ranks."""
    fields = {"fields": (("nodes", nodes),), "dtype": BF16}
    yield Case(
        op="all_reduce_rms_norm", world_size=world_size, dtype=FP32, sizes=(2, 3, 20), fields=(("nodes", nodes),)
    )
    yield Case(op="all_reduce_rms_norm", world_size=world_size, sizes=(0, 64), **fields)
    for partials in (1, 3):
        more = (("nodes", nodes), ("partials", partials))
        yield Case(op="all_reduce_rms_norm", world_size=world_size, dtype=BF16, sizes=(3, 64), fields=more)
    experts = {"op": "grouped_matmul_all_reduce_rms_norm", "world_size": world_size, "dtype": BF16}
    yield Case(**experts, sizes=(5, 2, 2 * world_size, 32, 16), fields=(("held", 2), ("nodes", nodes)))
    yield Case(**experts, sizes=(4, 2, 4, 32, 16), fields=(("nodes", nodes), ("shared", "gated")))


def experts(nodes: int, world_size: int) -> Iterator[Case]:
    """Ops that exchange the rows of experts: ranks without tokens, padding, experts that none chose."""
    tokens = (5, 0, 3, 1, 5, 5, 0, 2)[:world_size]
    common = {"world_size": world_size, "dtype": BF16}
    fields = (("tokens", tokens), ("nodes", nodes))
    both = "pipelined", "lamport", "push"
    for op in ("moe_dispatch", "moe_combine"):
        for design in ("auto", *both):
            yield Case(op=op, sizes=(5, 3, 3 * world_size, 24), design=design, fields=fields, **common)
    for skew in ("some", "last expert"):
        for op in ("moe_dispatch", "moe_combine"):
            yield Case(op=op, sizes=(5, 1, world_size, 25), fields=(*fields, ("skew", skew)), **common)
    if world_size // nodes % 2 == 0:
        shared = (*fields, ("tp", 2))
        for op, design in (("moe_dispatch", "push"), ("moe_combine", "push"), ("moe_combine", "lamport")):
            yield Case(op=op, sizes=(5, 2, 3 * world_size, 24), design=design, fields=shared, **common)
    fields += (("unweighted", True),)
    for design in ("push", "sum_then_scatter", "pipelined", "lamport"):
        yield Case(op="moe_combine", sizes=(5, 2, 3 * world_size, 40), design=design, fields=fields, **common)
    named = (("tokens", tokens), ("layout", "slices"), ("nodes", nodes), ("shared", "gated"))
    yield Case(op="grouped_matmul_reduce_scatter", sizes=(5, 2, 3, 24, 16), fields=named, **common)
    for op, sizes in (("all_gather_grouped_matmul_silu_mul", (16, 24)), ("grouped_matmul_reduce_scatter", (24, 16))):
        for layout, total in (("whole", 2 * world_size), ("slices", 3)):
            named = (("tokens", tokens), ("layout", layout), ("nodes", nodes))
            yield Case(op=op, sizes=(5, 2, total, *sizes), fields=named, **common)


def attentions(nodes: int, world_size: int) -> Iterator[Case]:
    """Sequences without a token at some ranks, none at all, and of several pages at each."""
    for heads, lengths in (
        ((2 * world_size, 1, 16, 16), (1, 0, 16 * world_size + 5)),
        ((4 * world_size, 2, 16, 16), (90,)),
    ):
        case = sharded_case("sharded_decode_attention", world_size, (heads, BF16), "auto", lengths, spare=1)
        yield replace(case, fields=(*case.fields, ("nodes", nodes)))


def large(nodes: int, world_size: int) -> Iterator[Case]:
    """Cases that only GPUs run: several MiB over each rail."""
    for op in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
        rows = 16 if op == "all_gather" else 16 * world_size
        for design in ("auto", "copy_engine"):
            yield Case(
                op=op,
                world_size=world_size,
                dtype=BF16,
                sizes=(rows, 40_000),
                design=design,
                fields=(("nodes", nodes),),
            )
    fields = (("tokens", (1000, 999, 0, 1000, 1000, 7, 1000, 1000)[:world_size]), ("nodes", nodes))
    for op in ("moe_dispatch", "moe_combine"):
        yield Case(op=op, world_size=world_size, dtype=BF16, sizes=(1000, 8, 64, 2048), fields=fields)
    for op, sizes in (
        ("all_gather_grouped_matmul_silu_mul", (768, 2048)), ("grouped_matmul_reduce_scatter", (2048, 768)),
    ):  # fmt: skip
        for design in ("auto", "sequential"):
            yield Case(
                op=op, world_size=world_size, dtype=BF16, sizes=(1000, 8, 64, *sizes), design=design, fields=fields
            )
    for op in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"):
        for design in ("auto", *(() if op == "all_gather_matmul" else ("fused",)), "pipelined", "sequential"):
            yield Case(op=op, world_size=world_size, dtype=BF16, sizes=(world_size * 512, 1024, 1536), design=design)
