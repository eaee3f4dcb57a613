"""grouped_matmul and grouped_matmul_silu_mul: each expert's weight times the rows of its pairs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from weft.arguments import quoted
from weft.kernels.fp8 import E4M3, by_torch, check_e4m3, read_back, scales_of
from weft.ops.case import BF16, FP16, FP32, Accuracy, Case, Draw, Inputs, gated_terms
from weft.ops.gemm.space import STAGES_BYTES
from weft.ops.knobs import around
from weft.ops.layout import Given
from weft.ops.local import capabilities_of, check_like, check_shape, check_sizes, machine_on
from weft.ops.moe import grouped
from weft.ops.moe.grouped import GroupedArguments, GroupedCall, GroupedTiles, grouped_tiles_for
from weft.ops.moe.moe_schedule import BLOCKS, block_for, moe_schedule
from weft.ops.moe.routing import MoeOp, MoeShape, Schedule, common, draw_ids, experts_of
from weft.ops.op import register
from weft.ops.registration import FLOATS, check_flag
from weft.plan.planned import AUTO, Machine, Planned

if TYPE_CHECKING:
    from weft.runtime.capabilities import Capabilities
    from weft.runtime.team.team import Team


# block_n, block_k, num_warps, per_sm for 16-bit floats: bound by reading weights up to 32 pairs a tile, then by tensor cores.
FEW_PAIRS = (
    (64, 64, 4, 4), (64, 128, 4, 2), (64, 128, 4, 3), (64, 128, 4, 4), (64, 256, 4, 2), (128, 64, 4, 3), (128, 128, 4, 1),
    (128, 128, 4, 2), (128, 128, 4, 3), (128, 64, 8, 2),
)  # fmt: skip
QUICK_FEW = ((64, 128, 4, 3), (128, 128, 4, 2), (128, 128, 4, 3))
MANY_PAIRS = ((256, 64, 8, 1), (128, 64, 4, 2), (128, 64, 8, 1), (128, 128, 8, 1), (256, 32, 8, 1), (64, 64, 4, 3))
QUICK_MANY = ((256, 64, 8, 1), (128, 64, 4, 2))


def tiles(base: GroupedTiles, call: GroupedCall, caps: Capabilities, quick: bool) -> Iterator[GroupedTiles]:
    """Tiles far apart, besides the default ``base``."""
    if not caps.arch.startswith("sm_"):
        return  # the default and its neighbours
    if call.dtype == torch.float32:
        yield from (replace(base, block_n=n, num_stages=stages) for n in (32, 64, 128) for stages in (2, 3))
        return
    few = call.block <= 32
    sizes = (QUICK_FEW if few else QUICK_MANY) if quick else FEW_PAIRS if few else MANY_PAIRS
    for block_n, block_k, num_warps, per_sm in sizes:
        deepest = STAGES_BYTES // per_sm // ((call.block + block_n) * block_k * call.dtype.itemsize)
        for stages in sorted({min(3, deepest), min(5, deepest)} - {0, 1}):
            yield replace(
                base,
                block_n=block_n,
                block_k=block_k,
                transposed=few,
                num_warps=num_warps,
                per_sm=per_sm,
                num_stages=stages,
            )


def check_grouped(op: str, given: GroupedArguments, gated: bool) -> GroupedArguments:
    """``given``. ValueError unless rows, weights, schedule and scales fit each other."""
    x, weight, schedule, gather, scales = given
    if not isinstance(schedule, Schedule):
        raise ValueError(f"{op}: schedule={quoted(schedule)} is not a Schedule; weft.ops.moe_schedule makes one")
    check_flag(op, "gather", gather)
    if scales is not None:
        check_like(op, "scales", scales, None, (torch.float32,))
    check_like(op, "x", x, None, FLOATS if scales is None else (E4M3,))
    check_like(op, "weight", weight, x.device, (x.dtype,) if scales is None else FLOATS)
    check_shape(op, "x", x, ("T" if gather else "pairs", "K"))
    check_shape(op, "weight", weight, (schedule.counts.shape[0], "2 N" if gated else "N", x.shape[1]))
    check_like(op, "schedule.pairs", schedule.pairs, x.device, (torch.int32,))
    if scales is not None:
        if not gather:
            raise ValueError(f"{op}: scales with gather=False; only rows of tokens are multiplied as they are loaded")
        check_like(op, "scales", scales, x.device, (torch.float32,))
        check_shape(op, "scales", scales, (x.shape[0], scales_of(x.shape[1])))
    if 0 in weight.shape:
        raise ValueError(f"{op}: weight has shape {tuple(weight.shape)}; it must have at least one row and column")
    if gated and weight.shape[1] % 2:
        raise ValueError(f"{op}: weight has {weight.shape[1]} rows, an odd number; pass gate's N rows, then up's N")
    if x.shape[1] * x.element_size() % 16:
        raise ValueError(
            f"{op}: K={x.shape[1]} of {x.dtype} is {x.shape[1] * x.element_size()} bytes, no multiple of 16; pad x and weight"
        )
    tokens = schedule.pairs.shape[1]
    wanted = tokens if gather else tokens * schedule.choices
    if x.shape[0] != wanted:
        raise ValueError(
            f"{op}: x has {x.shape[0]} rows; with gather={gather} a schedule of {tokens} tokens with {schedule.choices} "
            f"choices each takes {wanted}"
        )
    return given


# Parts of a schedule that depend on the rank's experts, for ``Op.differs``.
OWN_SCHEDULE = {"pairs": (0,), "counts": (0,), "tiles": (0,), "tile_count": (), "block": (), "first": ()}


class GroupedOp(MoeOp):
    """sizes of a case: T, k, experts in all, N, K. Without a field ``gather`` rows are gathered.

    gated   weight has gate's rows and up's, of which a result takes one each
    public  the function that users call
    """

    designs = {"tiles": GroupedTiles}
    sizes = ("T", "k", "experts", "N", "K")
    options = ("gather",)
    dtypes = FLOATS
    collective = False
    saves = ("x", "weight", "pairs", "counts", "tiles", "tile_count")
    gated: ClassVar[bool]
    public: ClassVar[Callable[..., torch.Tensor]]

    def call_of(
        self, sizes: Sequence[Any], dtype: torch.dtype, machine: Machine, design: str = AUTO, gather: bool | None = None
    ) -> GroupedCall:
        """``gather``: None: as the op does by default."""
        T, k, experts, N, K = check_sizes(self.name, self.sizes, sizes)
        return GroupedCall(
            block_for(T * k, experts), T * k, N, K, dtype, self.gated if gather is None else gather, design
        )

    def call_of_case(self, case: Case, machine: Machine) -> GroupedCall:
        return self.call_of(case.sizes, case.dtype, machine, case.design, gather=case.field("gather") is not False)

    def rule(self, call: GroupedCall, machine: Machine) -> tuple[str, str]:
        return "tiles", f"tiles of {call.block} pairs, rows {'gathered by token' if call.gather else 'in order'}"

    def default(self, name: str, call: GroupedCall, machine: Machine) -> GroupedTiles:
        return grouped_tiles_for(call, machine.caps, gated=self.gated)

    def table_key(self, call: GroupedCall, machine: Machine) -> tuple[str, tuple[int, ...], int]:
        name = f"{self.name}+gather" if call.gather and "gather" in self.variants else self.name
        return name, (call.pairs, call.block, call.N, call.K), 1

    def tuned(self, call: GroupedCall, machine: Machine) -> Planned | None:
        planned = super().tuned(call, machine)
        # Tiles of other rows take another shape.
        return planned if planned is None or planned.row.shape[1] == call.block else None

    def space(self, call: GroupedCall, machine: Machine, quick: bool = False) -> Iterator[GroupedTiles]:
        return tiles(self.by_rule(call, machine), call, machine.caps, quick)

    def around(self, design: GroupedTiles, machine: Machine, quick: bool = False) -> Iterator[GroupedTiles]:
        if not quick:
            yield from around(design)

    def run(self, design: GroupedTiles, team: None, given: GroupedArguments) -> torch.Tensor:
        """The op of checked arguments."""
        self.check_design(design)
        if given.scales is not None:
            check_e4m3(self.name, capabilities_of(given.x.device))
        return grouped.run(design, given, gated=self.gated)

    def forward(self, given: GroupedArguments) -> torch.Tensor:
        x, weight, schedule, gather, _ = given
        N = weight.shape[1] // (2 if self.gated else 1)
        call = GroupedCall(schedule.block, schedule.all_pairs, N, x.shape[1], weight.dtype, gather)
        return self.run(self.plan(call, machine_on(x.device)).design, None, given)

    def fake(self, given: GroupedArguments) -> torch.Tensor:
        N = given.weight.shape[1] // (2 if self.gated else 1)
        return given.weight.new_empty((given.schedule.all_pairs, N))

    def keeps(self, ctx: Any, given: Given, output: torch.Tensor) -> dict[str, Any]:
        return {**super().keeps(ctx, given, output), "scaled": given.scales is not None}

    def backward(self, given: Given, dy: torch.Tensor) -> dict[str, torch.Tensor]:
        if given.scaled:
            raise RuntimeError(f"weft.ops.{self.name} has no backward for fp8 rows; pass rows of the weight's dtype")
        x, weight, schedule = given.x, given.weight, Schedule(*(getattr(given, name) for name in Schedule._fields))
        dy, gradients = dy.to(x.dtype), {}
        if self.gated:
            # Of gate and up before silu, which are computed once more instead of kept.
            gate, up = self.product(GroupedArguments(x, weight, schedule, True, None)).float().chunk(2, dim=-1)
            grad, share = dy.float(), torch.sigmoid(gate)
            of_gate = grad * up * share * (1 + gate * (1 - share))
            dy = torch.cat((of_gate, grad * gate * share), dim=-1).to(x.dtype)
        if "x" in given.wanted:
            back = GroupedArguments(dy, weight, schedule, False, None)
            if given.gather:
                # 0 for pairs of other ranks' experts.
                of_pairs = x.new_zeros((schedule.all_pairs, x.shape[1]))
                self.product(back, turned=True, out=of_pairs)
                gradients["x"] = of_pairs.view(-1, schedule.choices, x.shape[1]).float().sum(1).to(x.dtype)
            else:
                gradients["x"] = self.product(back, turned=True, each_pair=True)
        if "weight" in given.wanted:
            gradients["weight"] = grouped.weight_grad(dy, x, schedule, gather=given.gather)
        return gradients

    def product(self, given: GroupedArguments, **options: Any) -> torch.Tensor:
        """``grouped.run`` without a gate, by the plan of the op that has none."""
        x, weight, schedule, gather, _ = given
        rows, columns = weight.shape[1:]
        N, K = (columns, rows) if options.get("turned") else (rows, columns)
        gather = gather or options.get("each_pair", False)
        call = GroupedCall(schedule.block, schedule.all_pairs, N, K, x.dtype, gather)
        return grouped.run(GROUPED_MATMUL.plan(call, machine_on(x.device)).design, given, **options)

    # --- judging -----------------------------------------------------------------------------------------------------

    def inputs(self, case: Case, rank: int, draw: Draw) -> Inputs:
        """ids, the rows, this rank's experts' weights, and scales of fp8 rows."""
        T, k, total, N, K = case.sizes
        rows = T if case.field("gather") is not False else T * k
        shape = experts_of(case, total, rank).count, 2 * N if self.gated else N, K
        ids, x = draw_ids(common(draw), T, k, total), draw.own("x", (rows, K))
        weight = draw.own("weight", shape, K**-0.5)
        if not case.field("fp8"):
            return ids, x, weight
        x, scales = by_torch(x)
        return ids, x, weight, scales

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> torch.Tensor:
        """The computed rows: in the order of the pairs where they are gathered; else all, 0 for other pairs."""
        ids, x, weight, *scales = by_rank[rank]
        x = read_back(x, *scales, weight.dtype) if scales else x
        T, k, total, N, _ = case.sizes
        experts = experts_of(case, total, rank)
        flat, gather = ids.flatten() - experts.first, case.field("gather") is not False
        by_expert = [(flat == e).nonzero().flatten() for e in range(experts.count)]
        count = sum(map(len, by_expert))
        out = torch.zeros((count if gather else T * k, N), dtype=torch.float64, device=x.device)
        place = 0
        for e, pairs in enumerate(by_expert):
            order = torch.arange(place, place + len(pairs), device=x.device)
            rows = x[pairs // k if gather else order].double() @ weight[e].double().T
            if self.gated:
                gate, up = rows.chunk(2, dim=-1)
                rows = torch.nn.functional.silu(gate) * up
            out[order if gather else pairs] = rows
            place += len(pairs)
        return out

    def accuracy(self, case: Case) -> Accuracy:
        terms = case.sizes[4]
        return Accuracy(terms=gated_terms(terms) if self.gated else terms)

    def arguments(self, case: Case, team: Team | None, ids: torch.Tensor, *tensors: torch.Tensor) -> tuple[Any, ...]:
        """x, the weights, the schedule, and scales of fp8 rows."""
        experts = experts_of(case, case.sizes[2], 0 if team is None else team.rank)
        x, weight, *scales = tensors
        return x, weight, moe_schedule(ids, experts, block=case.field("block")), *scales

    def results(
        self,
        case: Case,
        team: Team | None,
        x: torch.Tensor,
        weight: torch.Tensor,
        schedule: Schedule,
        scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        gather = case.field("gather") is not False
        if isinstance(case.design, str):
            return self.public(x, weight, schedule, scales=scales, **({} if self.gated else {"gather": gather}))
        return self.run(case.design, None, GroupedArguments(x, weight, schedule, gather, scales))

    def defined(
        self, case: Case, team: Team | None, out: torch.Tensor, ids: torch.Tensor, *tensors: torch.Tensor
    ) -> torch.Tensor:
        """The computed rows, as ``reference`` has them."""
        chosen = experts_of(case, case.sizes[2], 0 if team is None else team.rank).chosen(ids).flatten()
        if case.field("gather") is not False:
            return out[: int(chosen.sum())].clone()
        return torch.where(chosen[:, None], out, 0)

    def figures(
        self, x: torch.Tensor, weight: torch.Tensor, schedule: Schedule, *scales: torch.Tensor
    ) -> dict[str, float]:
        """Pairs, active experts, and the share of the rows of tiles that are pairs."""
        pairs, tile_rows = int(schedule.counts.sum()), int(schedule.tile_count) * schedule.block
        active = int((schedule.counts > 0).sum())
        return {"pairs": pairs, "active experts": active, "tile fill": pairs / tile_rows if tile_rows else 0.0}

    def cases(self) -> Iterator[Case]:
        case = functools.partial(self.case, 1)
        kinds = ({},) if self.gated else ({}, {"gather": False})
        for kind in kinds:
            for dtype in (FP16, BF16, FP32):
                yield case(dtype, 5, 2, 8, 48, 64, **kind)
                yield case(dtype, 20, 4, 6, 72, 88, local=(2, 3), **kind)  # ragged N and K, other ranks' experts
            for block in BLOCKS:
                yield case(BF16, block + 1, 1, 2, 40, 72, block=block, skew="one expert", **kind)
            for skew in ("last expert", "none", "some", "recorded"):
                yield case(BF16, 19, 2, 5, 32, 64, skew=skew, **kind)
            yield case(BF16, 0, 2, 8, 32, 64, **kind)
            for design in (
                GroupedTiles(block_n=32, block_k=32, columns=32, num_warps=4, num_stages=2),
                GroupedTiles(block_n=64, block_k=16, transposed=True, per_sm=2, columns=64, num_warps=4),
            ):
                yield case(BF16, 37, 3, 4, 80, 48, design=design, **kind)
        for dtype in (FP16, BF16, FP32):
            yield case(dtype, 20, 4, 6, 72, 144, local=(2, 3), fp8=True)
        for block in (16, 128):
            yield case(BF16, block + 1, 1, 2, 40, 272, block=block, skew="one expert", fp8=True)
        design = GroupedTiles(block_n=32, block_k=32, columns=32, num_warps=4, num_stages=2)
        yield case(BF16, 37, 3, 4, 80, 304, design=design, fp8=True)

    def large_cases(self) -> Iterator[Case]:
        layers = [(T, 8, 128, 768, 2048) for T in (1, 128, 1000)]
        for sizes in (*layers, (600, 2, 8, 14336, 4096)):
            for skew in (None, "one expert"):
                for fp8 in (False, True):
                    yield self.case(1, BF16, *sizes, local=(sizes[2] // 2, sizes[2] // 2), skew=skew, fp8=fp8)

    def case_sizes(self, shape: MoeShape) -> tuple[int, ...]:
        return shape.tokens, shape.k, shape.experts, *self.columns(shape)

    def columns(self, shape: MoeShape) -> tuple[int, int]:
        """(N, K) of each expert's GEMM in a layer of a shape."""
        return (shape.features, shape.hidden) if self.gated else (shape.hidden, shape.features)

    def flops(self, sizes: Sequence[int]) -> int:
        shape = MoeShape(*sizes)
        N, K = self.columns(shape)
        return int(2 * shape.pairs * N * K * (2 if self.gated else 1))

    def memory_bytes(self, sizes: Sequence[int], dtype: torch.dtype) -> int:
        """Only experts that are chosen are read."""
        shape = MoeShape(*sizes)
        N, K = self.columns(shape)
        rows = shape.tokens if self.gated else shape.pairs
        return int((shape.active * N * K * (2 if self.gated else 1) + rows * K + shape.pairs * N) * dtype.itemsize)


def grouped_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    schedule: Schedule,
    *,
    gather: bool = False,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """x's rows @ weight[e].T for the pairs of each expert e -> [T * k, N].

    x         [T * k, K]: row i is of the i-th pair of the schedule, as ``grouped_matmul_silu_mul`` gives them; with ``gather``
              [T, K]: a row for each token. fp16, bf16 or fp32; a row of K elements has a multiple of 16 bytes
    weight    [experts, N, K] of x's dtype; with ``scales`` fp16, bf16 or fp32
    schedule  of ``moe_schedule``, for T tokens
    gather    False: row t * k + j of the result is that of token t's choice j. True: row i is that of the i-th pair
    scales    fp32 [T, ceil(K / 128)] of fp8 rows x, as ``moe_dispatch`` gives them, with ``gather``: row times scale,
              rounded to the weight's dtype, is multiplied

    Rows of pairs that are not in the schedule are not written. Computed in fp32, rounded once; the same bits from run to run.
    Gradients of x and weight, without scales. ValueError for shapes, dtypes or devices that do not fit.
    """
    given = GroupedArguments(x, weight, schedule, gather, scales)
    return GROUPED_MATMUL.dispatch(check_grouped("grouped_matmul", given, gated=False))


class GroupedMatmul(GroupedOp):
    name, alias = "grouped_matmul", "grouped-gemm"
    gated = False
    public = staticmethod(grouped_matmul)
    variants = ("gather",)

    def case_of(self, shape: Sequence[int], dtype: torch.dtype, world_size: int, **fields: Any) -> Case:
        return super().case_of(shape, dtype, world_size, **{"gather": False, **fields})


GROUPED_MATMUL = GroupedMatmul()
register(GROUPED_MATMUL)


def grouped_matmul_silu_mul(
    x: torch.Tensor, weight: torch.Tensor, schedule: Schedule, *, scales: torch.Tensor | None = None
) -> torch.Tensor:
    """h[i] = silu(x[t] @ gate.T) * (x[t] @ up.T) -> [T * k, N], for the i-th pair, of token t.

    x         [T, K], fp16, bf16 or fp32; a row of K elements has a multiple of 16 bytes
    weight    [experts, 2 N, K] of x's dtype, or with ``scales`` fp16, bf16 or fp32: of each expert of the schedule gate's N
              rows, then up's
    schedule  of ``moe_schedule``, for T tokens
    scales    fp32 [T, ceil(K / 128)] of fp8 rows x, as ``moe_dispatch`` gives them: row times scale, rounded to the weight's
              dtype, is multiplied

    Rows from the number of pairs on are not written. Computed in fp32, rounded once; the same bits from run to run.
    Gradients of x and weight, without scales. ValueError for shapes, dtypes or devices that do not fit.
    """
    given = GroupedArguments(x, weight, schedule, True, scales)
    return GROUPED_MATMUL_SILU_MUL.dispatch(check_grouped("grouped_matmul_silu_mul", given, gated=True))


class GroupedMatmulSiluMul(GroupedOp):
    name, alias = "grouped_matmul_silu_mul", "grouped-gemm-silu"
    gated = True
    public = staticmethod(grouped_matmul_silu_mul)


GROUPED_MATMUL_SILU_MUL = GroupedMatmulSiluMul()
register(GROUPED_MATMUL_SILU_MUL)
