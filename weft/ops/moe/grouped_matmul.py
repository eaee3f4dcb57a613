"""grouped_matmul and grouped_matmul_silu_mul: each expert's weight times the rows of its pairs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from weft.kernels.four_bit import FourBit
from weft.kernels.fp8 import Fp8, RowFormat, check_e4m3, empty_rows, fp8_of
from weft.ops.case import BF16, FP16, FP32, Accuracy, Case, Draw, Inputs, agreed, gated_terms
from weft.ops.gemm.sliced import step_of
from weft.ops.layout import Given
from weft.ops.local import capabilities_of, machine_on
from weft.ops.moe.choices import common, draw_ids, experts_of
from weft.ops.moe.grouped import gemms
from weft.ops.moe.grouped.cases import (
    exact_activation,
    exact_rows,
    exact_weight,
    expert_of,
    fp8_accuracy,
    fp8_forms,
    quantized_rows_of,
    swiglu_of,
    with_matrix,
    with_scales,
)
from weft.ops.moe.grouped.check import check_grouped, check_swiglu, check_written
from weft.ops.moe.grouped.gemms import FixedTiles, FourBitTiles, GroupedArguments, GroupedCall, GroupedTiles, Tiles
from weft.ops.moe.grouped.gradients import weight_grad
from weft.ops.moe.grouped.rule import (
    FEW_PAIRS,
    fixed_tiles_for,
    four_bit_tiles,
    four_bit_tiles_for,
    grouped_tiles_for,
    holds_scales,
    tiles,
)
from weft.ops.moe.moe_op import MoeOp, MoeShape
from weft.ops.moe.moe_schedule import BLOCKS, block_for, moe_schedule
from weft.ops.moe.routing import ClampedSwiGLU, Schedule
from weft.ops.op import INVARIANT, Op, define, register
from weft.ops.registration import FLOATS
from weft.plan.planned import AUTO, Machine, Planned

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


# Parts of a schedule that depend on the rank's experts, for ``Op.differs``.
OWN_SCHEDULE = {"pairs": (0,), "counts": (0,), "tiles": (0,), "tile_count": (), "block": (), "first": ()}
# Parts of rows and weights of second GEMMs that depend on the rank's share of the features.
OWN_FEATURES = {"x": (1,), "weight": (0, 2), "scales": (1,), "weight_scales": (0, 1, 2)}


TILES_BITS = "depend on T, k, the experts and the design"
BITS = {"tiles": TILES_BITS, "four_bit": TILES_BITS, "fixed_tiles": INVARIANT}


class GroupedOp(MoeOp):
    """sizes of a case: T, k, experts in all, N, K. Without a field ``gather`` rows are gathered.

    gated   weight has gate's rows and up's, of which a result takes one each
    public  the function that users call
    """

    designs = {"tiles": GroupedTiles, "four_bit": FourBitTiles, "fixed_tiles": FixedTiles}
    internal = ("fixed_tiles",)
    sizes = ("T", "k", "experts", "N", "K")
    options = ("gather", "block_fp8", "channel_fp8", "four_bit", "invariant")
    dtypes = FLOATS
    collective = False
    saves = ("x", "weight", "pairs", "counts", "tiles", "tile_count")
    pinned = slice(1, 2)  # tiles of other numbers of pairs take another shape
    gated: ClassVar[bool]
    public: ClassVar[Callable[..., torch.Tensor]]

    def call_of(
        self,
        sizes: Sequence[Any],
        dtype: torch.dtype,
        machine: Machine,
        design: str = AUTO,
        gather: bool | None = None,
        **forms: bool,
    ) -> GroupedCall:
        """``gather``: None: as the op does by default. forms: block_fp8, channel_fp8 or four_bit."""
        T, k, experts, N, K = self.checked_sizes(sizes)
        gather = self.gated if gather is None else gather
        return GroupedCall(block_for(T * k, experts), T * k, N, K, dtype, gather, design, **forms)

    def call_of_case(self, case: Case, machine: Machine) -> GroupedCall:
        gather = case.field("gather") is not False
        forms = {**fp8_forms(case), **{name: bool(case.field(name)) for name in ("four_bit", "invariant")}}
        return self.call_of(case.sizes, case.dtype, machine, case.design, gather=gather, **forms)

    def choose(self, call: GroupedCall, machine: Machine) -> Planned:
        if not call.invariant or call.design not in (AUTO, "fixed_tiles"):
            return super().choose(call, machine)
        return Planned("fixed_tiles", fixed_tiles_for(self.name, call, machine.caps, gated=self.gated), "invariant")

    def rule(self, call: GroupedCall, machine: Machine) -> tuple[str, str]:
        if call.four_bit and call.block <= FEW_PAIRS:
            return "four_bit", f"tiles of {call.block} <= {FEW_PAIRS} pairs: the weight is read in 4 bits"
        rows = "gathered by token" if call.gather else "in order"
        steps = ", scales of fp8 for each step of 128 columns" if call.block_fp8 else ""
        converted = "; a kernel converts the weight to 16 bits before" if call.four_bit else ""
        return "tiles", f"tiles of {call.block} pairs, rows {rows}{steps}{converted}"

    def offers(self, design: str, variants: Sequence[str]) -> bool:
        return design != "four_bit" or "four_bit" in variants

    def default(self, name: str, call: GroupedCall, machine: Machine) -> Tiles:
        if name == "four_bit":
            return four_bit_tiles_for(call, machine.caps, gated=self.gated)
        if call.four_bit:  # the GEMM of the converted weight
            return self.plan(call._replace(four_bit=False), machine).design
        return grouped_tiles_for(call, machine.caps, gated=self.gated)

    def table_key(self, call: GroupedCall, machine: Machine) -> tuple[str, tuple[int, ...], int]:
        return self.row_name(call), (call.pairs, call.block, call.N, call.K), 1

    def tuned(self, call: GroupedCall, machine: Machine) -> Planned | None:
        planned = super().tuned(call, machine)
        return planned if planned is None or not call.written or holds_scales(planned.design) else None

    def space(self, call: GroupedCall, machine: Machine, quick: bool = False) -> Iterator[Tiles]:
        if call.invariant:
            return iter(())
        base = self.by_rule(call, machine)
        if isinstance(base, FourBitTiles):
            return four_bit_tiles(base, self.gated)
        return tiles(base, call, machine.caps, quick, self.gated)

    def run(self, design: Tiles, team: None, given: GroupedArguments) -> torch.Tensor:
        """The op of checked arguments."""
        self.check_design(design)
        if given.scales is not None or isinstance(given.matrix, Fp8):
            check_e4m3(self.name, capabilities_of(given.x.device))
        return gemms.run(design, given, gated=self.gated)

    def forward(self, given: GroupedArguments) -> torch.Tensor:
        return self.run(self.plan(given.call(self.gated), machine_on(given.x.device)).design, None, given)

    def fake(self, given: GroupedArguments) -> torch.Tensor:
        N = given.weight.shape[1] // (2 if self.gated else 1)
        return given.weight.new_empty((given.schedule.all_pairs, N), dtype=given.dtype)

    def keeps(self, ctx: Any, given: Given, output: torch.Tensor) -> dict[str, Any]:
        scaled = given.scales is not None or given.weight_scales is not None
        return {**super().keeps(ctx, given, output), "scaled": scaled}

    def backward(self, given: Given, dy: torch.Tensor) -> dict[str, torch.Tensor]:
        if given.scaled:
            raise RuntimeError(
                f"weft.ops.{self.name} has no backward for fp8 rows or weights in fp8 or 4 bits; pass both of 16 or 32 bits"
            )
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
            gradients["weight"] = weight_grad(dy, x, schedule, gather=given.gather)
        return gradients

    def product(self, given: GroupedArguments, **options: Any) -> torch.Tensor:
        """``gemms.run`` without a gate, by the plan of the op that has none."""
        x, weight, schedule, gather = given[:4]
        rows, columns = weight.shape[1:]
        N, K = (columns, rows) if options.get("turned") else (rows, columns)
        gather = gather or options.get("each_pair", False)
        call = GroupedCall(schedule.block, schedule.all_pairs, N, K, x.dtype, gather)
        return gemms.run(GROUPED_MATMUL.plan(call, machine_on(x.device)).design, given, **options)

    # --- judging -----------------------------------------------------------------------------------------------------

    def inputs(self, case: Case, rank: int, draw: Draw) -> Inputs:
        """ids, rows, weights, scales of fp8 rows, biases, and scales and zeros of weights."""
        T, k, total, N, K = case.sizes
        rows = T if case.field("gather") is not False else T * k
        shape = experts_of(case, total, rank).count, 2 * N if self.gated else N, K
        ids, x = draw_ids(common(draw), T, k, total), draw.own("x", (rows, K))
        weight = draw.own("weight", shape, K**-0.5)
        tensors: Inputs = ids, x, weight
        if case.field("fp8"):
            rows, scales, _ = quantized_rows_of(case, x)
            tensors = ids, rows, weight, scales
        if case.field("bias"):
            tensors = *tensors, draw.own("bias", shape[:2])
        return with_scales(case, tensors, 2)

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> torch.Tensor:
        """The computed rows: in the order of the pairs where they are gathered; else all, 0 for other pairs."""
        ids, x, weight, *scales = with_matrix(case, by_rank[rank], 2)
        bias = scales.pop().double() if case.field("bias") else None
        kind, x = x.dtype, exact_rows(case, x, weight, *scales)
        T, k, total, N, _ = case.sizes
        experts = experts_of(case, total, rank)
        flat, gather = ids.flatten() - experts.first, case.field("gather") is not False
        by_expert = [(flat == e).nonzero().flatten() for e in range(experts.count)]
        count = sum(map(len, by_expert))
        out = torch.zeros((count if gather else T * k, N), dtype=torch.float64, device=x.device)
        place = 0
        for e, pairs in enumerate(by_expert):
            order = torch.arange(place, place + len(pairs), device=x.device)
            # One by one: all experts in fp64 may take more memory than a GPU has.
            rows = x[pairs // k if gather else order] @ exact_weight(expert_of(weight, e), kind).T
            rows = rows if bias is None else rows + bias[e]
            if self.gated:
                rows = exact_activation(case, rows)
            out[order if gather else pairs] = rows
            place += len(pairs)
        return out

    def accuracy(self, case: Case) -> Accuracy:
        terms = gated_terms(case.sizes[4]) if self.gated else case.sizes[4]
        return fp8_accuracy(case, terms)

    def arguments(self, case: Case, team: Team | None, *tensors: torch.Tensor) -> tuple[Any, ...]:
        """x, the weights, the schedule, and if there are any, scales of fp8 rows and biases."""
        experts = experts_of(case, case.sizes[2], 0 if team is None else team.rank)
        ids, x, weight, *scales = with_matrix(case, tensors, 2)
        schedule = moe_schedule(ids, experts, block=case.field("block"))
        if not case.field("bias"):
            return x, weight, schedule, *scales
        *scales, bias = scales
        return x, weight, schedule, *(scales or (None,)), bias

    def results(
        self,
        case: Case,
        team: Team | None,
        x: torch.Tensor,
        weight: torch.Tensor | Fp8 | FourBit,
        schedule: Schedule,
        scales: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        gather, swiglu = case.field("gather") is not False, swiglu_of(case)
        if isinstance(case.design, str):
            options = {"scales": scales, "bias": bias, **({"swiglu": swiglu} if self.gated else {"gather": gather})}
            out = self.public(x, weight, schedule, **options)
            if not case.field("written"):
                return out
            format = RowFormat("group")
            return agreed(out, self.public(x, weight, schedule, **options, fp8=format), format)
        return self.run(case.design, None, GroupedArguments.of(x, weight, schedule, gather, scales, bias, swiglu))

    def defined(
        self, case: Case, team: Team | None, out: torch.Tensor, ids: torch.Tensor, *tensors: torch.Tensor
    ) -> torch.Tensor:
        """The computed rows, as ``reference`` has them."""
        chosen = experts_of(case, case.sizes[2], 0 if team is None else team.rank).chosen(ids).flatten()
        if case.field("gather") is not False:
            return out[: int(chosen.sum())].clone()
        return torch.where(chosen[:, None], out, 0)

    def figures(
        self, x: torch.Tensor, weight: torch.Tensor | Fp8 | FourBit, schedule: Schedule, *scales: torch.Tensor
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
        small = GroupedTiles(block_n=32, block_k=32, columns=32, num_warps=4, num_stages=2)
        yield case(BF16, 37, 3, 4, 80, 304, design=small, fp8=True)
        for kind in kinds:
            yield from self.fp8_cases(small, **kind)
            yield from self.epilogue_cases(small, **kind)
            yield from self.four_bit_cases(**kind)

    def fp8_cases(self, small: GroupedTiles, **kind: bool) -> Iterator[Case]:
        """Cases of fp8 weights: scales of blocks and of rows, ragged sizes, tiles of few and of many pairs."""
        case = functools.partial(self.case, 1)
        for form in ("block_fp8", "channel_fp8"):
            yield case(BF16, 20, 4, 6, 72, 144, local=(2, 3), **{form: True}, **kind)
            yield case(FP16, 5, 2, 8, 200, 272, **{form: True}, **kind)
            yield case(BF16, 37, 3, 4, 80, 304, design=small, **{form: True}, **kind)
        for block in (32, 128):
            yield case(BF16, block + 1, 1, 2, 200, 272, block=block, skew="one expert", block_fp8=True, **kind)
        yield case(BF16, 21, 2, 4, 136, 400, block=16, fp8=True, block_fp8=True, **kind)
        yield case(BF16, 9, 2, 4, 48, 272, fp8=True, channel_fp8=True, **kind)
        yield case(BF16, 0, 2, 8, 32, 64, block_fp8=True, **kind)
        if self.gated:
            # A row's last scale is of 64 columns, as where a rank's edge cuts a group.
            for block in (16, 128):
                yield case(BF16, block + 1, 1, 2, 192, 256, block=block, block_fp8=True, written=True)

    def epilogue_cases(self, small: GroupedTiles, **kind: bool) -> Iterator[Case]:
        """Cases of biases and of a clamped SwiGLU, in both forms of a tile, with ragged sizes and in fp8."""
        case = functools.partial(self.case, 1)
        every = (
            ({"bias": True}, {"clamped": True}, {"bias": True, "clamped": True}) if self.gated else ({"bias": True},)
        )
        for fields in every:
            yield case(BF16, 20, 4, 6, 72, 88, local=(2, 3), **fields, **kind)
        for form in ({"fp8": True}, {"block_fp8": True}) if kind.get("gather") is not False else ({"block_fp8": True},):
            yield case(BF16, 20, 4, 6, 72, 144, local=(2, 3), **form, **every[-1], **kind)
        for design in (small, replace(small, transposed=True)):
            yield case(FP32, 37, 3, 4, 80, 48, design=design, **every[-1], **kind)
        yield case(BF16, 0, 2, 8, 32, 64, **every[-1], **kind)

    def four_bit_cases(self, **kind: bool) -> Iterator[Case]:
        """Cases of weights in 4 bits: ragged sizes, tiles of few pairs, and of many, by 16 bits."""
        case = functools.partial(self.case, 1)
        yield case(BF16, 5, 2, 4, 72, 144, four_bit="mxfp4", **kind)
        yield case(FP16, 20, 3, 6, 72, 272, local=(2, 3), four_bit="int4", **kind)
        yield case(BF16, 70, 4, 4, 40, 136, four_bit="int4", **kind)
        yield case(BF16, 9, 2, 4, 72, 144, local=(1, 3), bias=True, clamped=self.gated, four_bit="mxfp4", **kind)
        few = {"block_k": 128, "per_sm": 2, "columns": 32, "num_warps": 8, "num_stages": 2}
        small = FourBitTiles(block_n=32, transposed=False, **few)
        yield case(BF16, 37, 3, 4, 80, 304, design=small, four_bit="mxfp4", block=16, **kind)
        yield case(BF16, 0, 2, 8, 32, 64, four_bit="mxfp4", **kind)

    def large_cases(self) -> Iterator[Case]:
        layers = [(T, 8, 128, 768, 2048) for T in (1, 128, 1000)]
        for sizes in (*layers, (600, 2, 8, 14336, 4096)):
            for skew in (None, "one expert"):
                for forms in ({}, {"fp8": True}, {"block_fp8": True}, {"channel_fp8": True}):
                    yield self.case(1, BF16, *sizes, local=(sizes[2] // 2, sizes[2] // 2), skew=skew, **forms)
        for dtype, form in ((BF16, "mxfp4"), (FP16, "int4")):
            yield self.case(1, dtype, 128, 8, 128, 768, 2048, local=(64, 64), four_bit=form)

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
    x: torch.Tensor | Fp8,
    weight: torch.Tensor | Fp8 | FourBit,
    schedule: Schedule,
    *,
    gather: bool = False,
    scales: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    invariant: bool = False,
) -> torch.Tensor:
    """x's rows @ weight[e].T + bias[e] for the pairs of each expert e -> [T * k, N].

    x         [T * k, K]: row i is of the i-th pair of the schedule, as ``grouped_matmul_silu_mul`` gives them; with ``gather``
              [T, K]: a row for each token. fp16, bf16 or fp32; a row of K elements has a multiple of 16 bytes
    weight    [experts, N, K] of x's dtype; with ``scales`` fp16, bf16 or fp32. Or ``Fp8``, with scales [experts, n, k] as of
              ``matmul``: x is of 16 bits, and quantized as they ask for, or ``Fp8`` with such scales; K a multiple of 16.
              Or ``FourBit``, with scales [experts, N, groups], x of 16 bits
    schedule  of ``moe_schedule``, for T tokens
    gather    False: row t * k + j of the result is that of token t's choice j. True: row i is that of the i-th pair
    scales    fp32 [T, ceil(K / 128)] of fp8 rows x, as ``moe_dispatch`` gives them, with ``gather``: row times scale,
              rounded to the weight's dtype, is multiplied
    bias      [experts, N] of the result's dtype; None: there is none. Without gradients
    invariant a row's bits do not depend on the pairs: fp16 or bf16, or an fp8 weight in blocks of 128 columns

    Rows of pairs that are not in the schedule are not written. Computed in fp32, rounded once; the same bits from run to run.
    Of fp8 rows and weights bf16; fp32 sums of 128 terms are multiplied by their scales, and added. Gradients of x and weight,
    without scales. ValueError for shapes, dtypes or devices that do not fit.
    """
    given = GroupedArguments.of(x, weight, schedule, gather, scales, bias)._replace(invariant=invariant)
    return GROUPED_MATMUL.dispatch(check_grouped("grouped_matmul", given, gated=False))


class GroupedMatmul(GroupedOp):
    name, alias = "grouped_matmul", "grouped-gemm"
    bits = BITS
    gated = False
    public = staticmethod(grouped_matmul)
    variants = ("gather", "block_fp8", "channel_fp8", "four_bit", "invariant")

    def case_of(self, shape: Sequence[int], dtype: torch.dtype, world_size: int, **fields: Any) -> Case:
        return super().case_of(shape, dtype, world_size, **{"gather": False, **fields})


GROUPED_MATMUL = register(GroupedMatmul())


def products_of_slices(
    x: torch.Tensor | Fp8, weight: torch.Tensor | Fp8, schedule: Schedule, count: int, total: int
) -> torch.Tensor:
    """Invariant ``grouped_matmul`` for each of ``count`` equal slices of K: [count, T * k, N].

    count, total  slices of this rank and of all ranks. ValueError where they do not divide K
    """
    given = GroupedArguments.of(x, weight, schedule, False)._replace(invariant=True)
    given = check_grouped("grouped_matmul", given, gated=False)
    call = given.call(False)
    design = GROUPED_MATMUL.plan(call, machine_on(given.x.device)).design
    design = replace(design, block_k=step_of("grouped_matmul", call.K, count, total, call.fp8))
    out = given.weight.new_empty((count, call.pairs, call.N), dtype=given.dtype)
    return gemms.run(design, given, out=out, into=gemms.Results(parts=count))


def grouped_matmul_silu_mul(
    x: torch.Tensor | Fp8,
    weight: torch.Tensor | Fp8 | FourBit,
    schedule: Schedule,
    *,
    scales: torch.Tensor | None = None,
    fp8: RowFormat | None = None,
    bias: torch.Tensor | None = None,
    swiglu: ClampedSwiGLU | None = None,
    invariant: bool = False,
) -> torch.Tensor | Fp8:
    """h[i] = silu(x[t] @ gate.T) * (x[t] @ up.T) -> [T * k, N], for the i-th pair, of token t.

    x         [T, K], fp16, bf16 or fp32; a row of K elements has a multiple of 16 bytes
    weight    [experts, 2 N, K] of x's dtype, or with ``scales`` fp16, bf16 or fp32: of each expert of the schedule gate's N
              rows, then up's. Or ``Fp8``, as of ``grouped_matmul``
    schedule  of ``moe_schedule``, for T tokens
    scales    fp32 [T, ceil(K / 128)] of fp8 rows x, as ``moe_dispatch`` gives them: row times scale, rounded to the weight's
              dtype, is multiplied
    fp8       with an fp8 weight and fp8 or bf16 rows: the result is put in fp8 so, after it is rounded to bf16; ``row_format``
              of the next weight, not by tokens
    bias      [experts, 2 N] of h's dtype, added to the products with gate and up; None: there is none. Without gradients
    swiglu    ``ClampedSwiGLU`` in place of silu(gate) * up; None: that. Without gradients
    invariant as of ``grouped_matmul``

    Rows from the number of pairs on are not written. Computed in fp32, rounded once; the same bits from run to run.
    Gradients of x and weight, without scales. ValueError for shapes, dtypes or devices that do not fit.
    """
    op = "grouped_matmul_silu_mul"
    check_swiglu(op, swiglu)
    given = GroupedArguments.of(x, weight, schedule, True, scales, bias, swiglu)._replace(invariant=invariant)
    given = check_grouped(op, given, gated=True)
    if fp8 is None:
        return GROUPED_MATMUL_SILU_MUL.dispatch(given)
    check_written(op, given.x, given.matrix, fp8)
    return fp8_of(*GROUPED_MATMUL_SILU_MUL_FP8.dispatch(given, fp8), fp8)


class GroupedMatmulSiluMul(GroupedOp):
    name, alias = "grouped_matmul_silu_mul", "grouped-gemm-silu"
    bits = BITS
    gated = True
    public = staticmethod(grouped_matmul_silu_mul)
    variants = ("block_fp8", "channel_fp8", "four_bit", "invariant")


GROUPED_MATMUL_SILU_MUL = register(GroupedMatmulSiluMul())


class GroupedMatmulSiluMulFp8(Op):
    """GroupedMatmulSiluMul with rows in fp8: a torch op by itself, since it has two results."""

    name = alias = "grouped_matmul_silu_mul_fp8"
    collective = False

    def forward(self, given: GroupedArguments, format: RowFormat) -> tuple[torch.Tensor, torch.Tensor]:
        device, op = given.x.device, GROUPED_MATMUL_SILU_MUL
        check_e4m3(op.name, capabilities_of(device))
        call = given.call(True)._replace(written=True)
        return gemms.run_gated(op.plan(call, machine_on(device)).design, given, format)

    def fake(self, given: GroupedArguments, format: RowFormat) -> tuple[torch.Tensor, torch.Tensor]:
        return empty_rows(given.x, given.schedule.all_pairs, given.weight.shape[1] // 2, format)


GROUPED_MATMUL_SILU_MUL_FP8 = define(GroupedMatmulSiluMulFp8())
