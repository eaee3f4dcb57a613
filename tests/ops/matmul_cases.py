"""The case table's matrix products. Importing this adds their Operations to OPERATIONS (tests/ops/cases.py).

A case's shape is (M, N, K): M rows of the whole product, N and K of the GEMM of one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tests.ops.cases import BF16, FP16, FP32, OPERATIONS, Case, Inputs, Operation, part_of, values
from tests.ops.designs import gemm_design
from weft import ops
from weft.ops.gemm.matmul import MATMUL
from weft.ops.op import find_op

MATMUL_OPS = ("matmul", "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
# Of the ops whose ranks' rows may come in this order: an own Operation for each.
OWN_FIRST = tuple(f"{op}+own_first" for op in ("all_gather_matmul", "matmul_reduce_scatter"))


def operands(case: Case, rank: int, generator: torch.Generator) -> Inputs:
    M, N, K = case.shape
    rows = M // case.world_size if case.op.startswith("all_gather_matmul") else M
    return values(case, (rows, K), generator), values(case, (N, K), generator)


def run(case: Case, team: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    name, _, order = case.op.partition("+")
    if case.config:
        world_size = 1 if name == "matmul" else team.size
        design = gemm_design(name, dict(case.config), case.shape, case.dtype, world_size)
        return run_design(name, design, team, a, b, bool(order))
    of_team = () if name == "matmul" else (team,)
    return getattr(ops, name)(a, b, *of_team, **({order: True} if order else {}))


def run_design(
    name: str, design: Any, team: Any, a: torch.Tensor, b: torch.Tensor, local_first: bool = False
) -> torch.Tensor:
    """GEMM op ``name`` by ``design``; on one rank it is that of ``matmul``."""
    if name == "matmul" or team.size == 1:
        return MATMUL.run(design, None, a, b)
    op = find_op(name)
    return op.run(design, team, a, b, local_first) if op.rows_sharded else op.run(design, team, a, b)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.double() @ b.double().T


def gathered(case: Case, rank: int, everyone: Sequence[Inputs]) -> torch.Tensor:
    return product(torch.cat([a for a, _ in everyone]), everyone[rank][1])


def turned(x: torch.Tensor, first: int, world_size: int) -> torch.Tensor:
    """The W parts of x's rows from part ``first`` on (mod W)."""
    parts = x.chunk(world_size)
    return torch.cat([*parts[first:], *parts[:first]])


def gathered_own_first(case: Case, rank: int, everyone: Sequence[Inputs]) -> torch.Tensor:
    return turned(gathered(case, rank, everyone), rank, case.world_size)


def summed_own_first(case: Case, rank: int, everyone: Sequence[Inputs]) -> torch.Tensor:
    w = case.world_size
    in_order = [(turned(a, -r % w, w), b) for r, (a, b) in enumerate(everyone)]
    return part_of(summed(case, rank, in_order), rank, w)


def summed(case: Case, rank: int, everyone: Sequence[Inputs]) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64, device=everyone[0][0].device)
    for a, b in everyone:
        total = total + product(a, b)
    return total


def length(case: Case) -> int:
    ranks = case.world_size if case.op.startswith(("matmul_reduce_scatter", "matmul_all_reduce")) else 1
    return case.shape[2] * ranks


OPERATIONS |= {
    "matmul": Operation(
        inputs=operands, run=run, length=length, reference=lambda case, rank, everyone: product(*everyone[rank])
    ),
    "all_gather_matmul": Operation(inputs=operands, run=run, length=length, reference=gathered),
    "matmul_reduce_scatter": Operation(
        inputs=operands,
        run=run,
        length=length,
        reference=lambda case, rank, everyone: part_of(summed(case, rank, everyone), rank, case.world_size),
        partials=lambda case: case.world_size - 1,
    ),
    "all_gather_matmul+own_first": Operation(inputs=operands, run=run, length=length, reference=gathered_own_first),
    "matmul_reduce_scatter+own_first": Operation(
        inputs=operands,
        run=run,
        length=length,
        reference=summed_own_first,
        partials=lambda case: case.world_size - 1,
    ),
    "matmul_all_reduce": Operation(
        inputs=operands,
        run=run,
        length=length,
        reference=summed,
        replicated=True,
        partials=lambda case: case.world_size - 1,
    ),
}


def config(block_m: int, block_n: int, block_k: int, **more: Any) -> tuple[tuple[str, Any], ...]:
    return (("block_m", block_m), ("block_n", block_n), ("block_k", block_k), *more.items())


# Small enough for the simulator.
MATMULS: list[Case] = []
# For GPUs: the configs that config_for chooses there, many tiles a program, several chunks a shard.
LARGE_MATMULS: list[Case] = []


def _cases() -> None:
    def add(op: str, w: int, dtype: torch.dtype, shape: tuple[int, int, int], **more: Any) -> None:
        MATMULS.append(Case(op=op, world_size=w, dtype=dtype, shape=shape, **more))

    small, wide = config(16, 16, 32, group=3), config(32, 32, 16, group=1, num_warps=2, num_stages=2)
    for w in (2, 3, 4, 8):
        for op in MATMUL_OPS[1:]:
            add(op, w, BF16, (w * 4, 48, 64))
            # Rows of K elements that start on no 16 bytes.
            add(op, w, FP16, (w, 33, 21))
    for w in (2, 3, 4):
        for op in MATMUL_OPS[1:]:
            add(op, w, FP32, (w * 7, 40, 36))
        # Fewer tiles than ranks, and rows that no world size divides.
        add("matmul_all_reduce", w, BF16, (1, 16, 40))
        add("matmul_all_reduce", w, BF16, (19, 50, 24), config=small)
    for op in MATMUL_OPS[1:]:
        # Several tile rows a panel, the last short; groups and chunks that do not divide them.
        add(op, 2, BF16, (2 * 41, 40, 72), config=(*small, ("chunks", 2)))
        add(op, 4, BF16, (4 * 33, 70, 48), config=wide)
        add(op, 2, BF16, (2 * 12, 24, 20), layout="transposed")
        add(op, 3, BF16, (3 * 5, 24, 32), layout="offset")
        # Tiles split in several parts, and none split; a tile that goes out in many pieces, and in one.
        add(op, 2, BF16, (2 * 40, 72, 150), config=config(16, 16, 16, piece=32))
        add(op, 2, BF16, (2 * 20, 40, 90), config=config(16, 16, 16, piece=256, split=False))
    for w in (2, 3, 4, 8):
        for op in MATMUL_OPS[1:]:
            add(op, w, BF16, (w * 20, 40, 48), config=config(16, 16, 32, design="segments"))
            add(op, w, BF16, (w * 19, 40, 48), config=config(16, 16, 32, design="segments", chunks=3, lanes=3))
            add(op, w, FP16, (w, 33, 21), config=config(16, 32, 16, design="segments"), layout="transposed")
            add(op, w, BF16, (w * 3, 40, 24), config=config(16, 32, 16, design="library"))
        for op, span in (("all_gather_matmul", 3), ("matmul_reduce_scatter", 2), ("matmul_all_reduce", 2)):
            add(op, w, BF16, (w * 20, 40, 48), config=config(16, 16, 32, design="segments", span=span))
        for fields in ({"own_pieces": 2}, {"chunks": 3, "own_pieces": 2, "lanes": 1}, {"span": 2, "own_pieces": 32}):
            fields = config(16, 16, 32, design="segments", **fields)
            add("matmul_reduce_scatter", w, BF16, (w * 19, 40, 48), config=fields)
        for op in OWN_FIRST:
            # Every design; runs of ranks' rows that end at no last rank.
            add(op, w, BF16, (w * 20, 40, 48), config=small)
            add(op, w, FP32, (w * 5, 40, 36), config=config(16, 16, 32, design="segments", span=2, lanes=1))
            add(op, w, BF16, (w * 19, 40, 48), config=config(16, 16, 32, design="segments", span=8))
            add(op, w, BF16, (w * 19, 40, 48), config=config(16, 16, 32, design="segments", chunks=3))
            add(op, w, FP16, (w * 3, 33, 21), config=config(16, 32, 16, design="library"), layout="transposed")
        # Blocks of a row for each rank; with a last one of a row or three, so of none for some ranks.
        blocks = config(16, 16, 32, design="segments", chunks=8, lanes=1)
        add("matmul_all_reduce", w, FP32, (w * 8, 24, 40), config=blocks)
        blocks = config(16, 16, 32, design="segments", chunks=min(w + 1, 8))
        add("matmul_all_reduce", w, BF16, (w * (w + 1) + 1, 24, 40), config=blocks)
        # Ranks with more rows than others, and with none.
        add("matmul_all_reduce", w, BF16, (w * 9 - 1, 40, 24), config=config(16, 32, 16, design="segments", chunks=4))
        add("matmul_all_reduce", w, BF16, (w - 1, 40, 24), config=config(16, 32, 16, design="segments", chunks=2))
    fields = config(16, 16, 32, design="segments", begin_first=True)
    add("all_gather_matmul", 3, BF16, (36, 24, 32), config=fields)
    for chunks, shape in ((1, (40, 40, 48)), (3, (38, 33, 21))):
        fields = config(16, 16, 32, design="segments", chunks=chunks, accumulate=True)
        add("matmul_reduce_scatter", 2, BF16, shape, config=fields)
    add("all_gather_matmul", 3, BF16, (3 * 70, 20, 16), config=config(16, 32, 16, chunks=8))
    add("all_gather_matmul", 2, BF16, (2 * 60, 90, 40), config=config(16, 32, 16, chunks=2, flatten=True))
    for op in (*MATMUL_OPS, *OWN_FIRST):
        add(op, 1, BF16, (20, 24, 40))
    for dtype in (FP16, BF16, FP32):
        add("matmul", 1, dtype, (1, 70, 33))
        add("matmul", 1, dtype, (90, 50, 96), config=small)
        add("matmul", 1, dtype, (40, 48, 16), layout="transposed")
    add("matmul", 1, BF16, (33, 33, 33), layout="offset")

    for w in (2, 4, 8):
        for op in MATMUL_OPS[1:]:
            for dtype, shape in (
                (BF16, (2048, 1280, 1024)),
                (FP16, (w * 1000, 520, 2048)),
                (BF16, (w * 130, 700, 333)),
                (BF16, (w * 16, 5120, 640)),
                (FP32, (w * 100, 300, 200)),
            ):
                LARGE_MATMULS.append(Case(op=op, world_size=w, dtype=dtype, shape=shape))
        LARGE_MATMULS.append(Case(op="matmul_all_reduce", world_size=w, dtype=BF16, shape=(1, 5120, 1600)))
        for rows in (w * 16, w * 256, w * 1000):
            for op, shape in zip(OWN_FIRST, ((rows, 12800, 1024), (rows, 5120, 640)), strict=True):
                LARGE_MATMULS.append(Case(op=op, world_size=w, dtype=BF16, shape=shape))
        LARGE_MATMULS.append(Case(op="all_gather_matmul", world_size=w, dtype=BF16, shape=(w * 2048, 1280, 5120)))
        # The designs by name, whatever dispatch chooses for the shape; tiles that are split on 132 SMs.
        wide = {"block_m": 128, "block_n": 256, "block_k": 64, "num_warps": 8}
        for op in MATMUL_OPS[1:]:
            for more in ({"num_stages": 4}, {"num_stages": 4, "split": False, "piece": 512}, {"design": "library"}):
                fields = tuple((wide | more).items())
                LARGE_MATMULS.append(Case(op=op, world_size=w, dtype=BF16, shape=(1024, 5120, 2000), config=fields))
        for op, more in (
            ("all_gather_matmul", {"flatten": True, "chunks": 2}),
            ("all_gather_matmul", {"design": "segments"}),
            ("all_gather_matmul", {"design": "segments", "chunks": 2, "lanes": 4, "begin_first": True}),
            ("all_gather_matmul", {"design": "segments", "span": 3}),
            ("all_gather_matmul+own_first", {"design": "segments", "span": 3}),
            ("all_gather_matmul+own_first", {"design": "segments", "chunks": 2}),
            ("all_gather_matmul+own_first", {"flatten": True, "chunks": 2}),
            ("matmul_reduce_scatter+own_first", {"design": "segments", "span": 2, "lanes": 1}),
            ("matmul_reduce_scatter+own_first", {"num_stages": 4}),
            ("matmul_reduce_scatter", {"design": "segments", "span": 2}),
            ("matmul_reduce_scatter", {"design": "segments"}),
            ("matmul_reduce_scatter", {"design": "segments", "chunks": 2, "lanes": 1}),
            ("matmul_reduce_scatter", {"design": "segments", "span": 2, "lanes": 1, "own_pieces": 2}),
            ("matmul_reduce_scatter+own_first", {"design": "segments", "chunks": 2, "own_pieces": 3}),
            ("matmul_all_reduce", {"design": "segments", "chunks": 2, "lanes": 4}),
            ("matmul_all_reduce", {"design": "segments", "chunks": 3, "lanes": 1}),
            ("matmul_all_reduce", {"design": "segments", "span": 2, "lanes": 1}),
        ):
            fields = tuple((wide | more).items())
            LARGE_MATMULS.append(Case(op=op, world_size=w, dtype=BF16, shape=(1024, 5120, 2000), config=fields))
    adding = {"design": "segments", "chunks": 2, "accumulate": True}
    fields = tuple((wide | adding).items())
    LARGE_MATMULS.append(
        Case(op="matmul_reduce_scatter", world_size=2, dtype=BF16, shape=(1024, 5120, 2000), config=fields)
    )
    LARGE_MATMULS.append(Case(op="matmul", world_size=1, dtype=BF16, shape=(4096, 4096, 4096)))


_cases()
