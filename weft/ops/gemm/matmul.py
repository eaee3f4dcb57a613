"""matmul: the GEMM of one rank, by cuBLAS, the small-M kernel or a persistent kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.kernels.deferred_norm import DeferredNorm, check_scales, operand_of
from weft.kernels.four_bit import FourBit
from weft.kernels.fp8 import Fp8
from weft.kernels.gemm_tile import Operand, Outgoing, SplitK, gemm_tile, join_partials, leave_partial, store_tile
from weft.kernels.operands import ScaledMatrix, can_describe, has_dense_rows, rows_contiguous
from weft.kernels.tile_schedule import (
    MAX_PARTIALS,
    as_argument,
    from_argument,
    locate,
    look_up,
    make_tiles,
    work_at,
    work_steps,
)
from weft.ops.case import Case
from weft.ops.gemm import cublas, gemm_cases, matmul_deferred_norm, persistent, sliced, small_m
from weft.ops.gemm.cublas import Cublas
from weft.ops.gemm.fp8_operands import by_design, check_fp8
from weft.ops.gemm.gemm_op import COLUMN_PARALLEL, FP8, GEMM_BITS, ROW_PARALLEL, GemmCall, check_operands, named
from weft.ops.gemm.local_gemm import LocalGemm
from weft.ops.gemm.matmul_fp8 import matmul_fp8
from weft.ops.gemm.matmul_quantized import QUANTIZED, matmul_quantized
from weft.ops.gemm.sliced import Sliced
from weft.ops.gemm.small_m_rule import SmallM
from weft.ops.gemm.space import tiles
from weft.ops.gemm.tile import Tile, default_tile, splits_by_default
from weft.ops.knobs import around, design_type, flipped, knob
from weft.ops.layout import Given
from weft.ops.local import capabilities_of
from weft.ops.op import INVARIANT, Op, define, register
from weft.ops.registration import check_flag
from weft.plan.planned import AUTO, Machine, Planned, machine
from weft.runtime.launching import launch_on
from weft.runtime.recording import traced_view

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


@design_type
class Persistent:
    """Persistent GEMM kernel: programs that stay on their SMs and take tiles in turn.

    split  tiles that do not fill a round of programs are split along K (weft.kernels.tile_schedule)
    """

    tile: Tile = knob(near=around)
    split: bool = knob(True, near=flipped)


@triton.jit(do_not_specialize=["M"])
def matmul_kernel(a, b, out, split, M, sizes, tiles, table, block, team=None):
    """out[M, N] = a[M, K] @ b[N, K].T        grid: (programs,)

    sizes  ``Sizes``; split: ``SplitK``; tiles: ``Tiles`` as an argument; block: ``Block``
    tiles  tiles from place ``tiles.whole`` on are split along K
    table  None: the tiles of one panel of M rows; else a ``tile_table``, whose panels may differ in size
    team   in a trace (``traced_view``), else None

    signals, waits  none: the last program to leave a partial of a split tile adds up all its partials (join_partials)
    """
    tiles = from_argument(tiles)
    a, b = Operand(a, sizes.a_stride, M), Operand(b, sizes.b_stride, sizes.N)
    depth = tl.cdiv(sizes.K, block.k)
    for step in range(0, work_steps(tiles, depth)):
        number, first, last = work_at(step, tiles, depth)
        if table is None:
            panel, chunk, tile_row, tile_column = locate(number, tiles)
            row, limit = tile_row * block.m, M
        else:
            owner, row, limit, tile_column = look_up(number, table)
        column = tile_column * block.n
        began = wl.begin_tile(team)
        acc = gemm_tile(a, b, row, column, sizes.K, first, last, Outgoing(out, out, 0), block, False)
        if last - first == depth:
            store_tile(out, acc, row, column, 0, limit, sizes.N)
        elif leave_partial(acc, split, number, tiles, depth, block):
            for at in range(0, block.m, block.join_rows):
                x = join_partials(split, number, at, tiles, depth, block)
                store_tile(out, x, row + at, column, 0, limit, sizes.N)
        wl.end_tile(began, row // block.m, tile_column, team)


def matmul(
    a: torch.Tensor | Fp8 | DeferredNorm, b: torch.Tensor | Fp8 | FourBit, *, invariant: bool = False
) -> torch.Tensor:
    """a[M, K] @ b[N, K].T -> [M, N], fp32 accumulation, in the dtype of both (fp16, bf16, fp32).

    Rows may be strided. cuBLAS reads other layouts as they are, weft's kernels a copy. The same bits from run to run; a row's
    bits may change with the design, which depends on M (``weft.ops.explain``). ``a`` may have a deferred RMS scale: the small-M
    kernel applies it to the fp32 result, other designs to ``a`` before the GEMM; then there is no backward. Where
    ``b.grad_dtype`` is fp32, so is the gradient of b. With an ``Fp8`` weight b, ``a`` is fp16 or bf16, which is quantized as
    b's scales ask for, or ``Fp8`` with such scales, for a bf16 result; with a ``FourBit`` weight b, ``a`` is fp16 or bf16; both
    without a backward.
    invariant  a row's bits do not depend on the other rows, nor on which rows of b a rank holds: b in fp16 or bf16, K a
               multiple of 32, or in fp8 with scales of 128 columns, K a multiple of 256; a without a deferred RMS scale
    ValueError for shapes, dtypes or devices that do not fit.
    """
    x = operand_of(a)
    check_flag("matmul", "invariant", invariant)
    if invariant:
        sliced.check("matmul", x, b)
    if invariant and isinstance(b, Fp8):
        return matmul_fp8("matmul", x, b, invariant=True)
    if isinstance(b, QUANTIZED):
        return matmul_quantized("matmul", x, b)
    check_operands("matmul", x.data, b, None)
    check_scales("matmul", x, b)
    return MATMUL.dispatch(x.data, b, invariant) if x.scales is None else matmul_deferred_norm.product(x, b)


def matmul_column_nodes(a: torch.Tensor | Fp8, b: torch.Tensor | Fp8) -> torch.Tensor:
    """``matmul(a, b, invariant=True)`` [M, N], or its nodes [2, M, N], fp32.

    Nodes, which the reader adds up and rounds, where two programs share a tile. No gradients. ValueError as of that op.
    """
    sliced.check("matmul", ScaledMatrix(a), b)
    if isinstance(b, Fp8):
        check_fp8("matmul", ScaledMatrix(a), b, gated=False)
    else:
        check_operands("matmul", a, b, None)
    call = GemmCall(a.shape[0], *b.shape, a.dtype, block_fp8=isinstance(b, Fp8), invariant=True)
    nodes = sliced.column_nodes("matmul", MATMUL.plan(call, machine(capabilities_of(b.device), 1)).design, a, b)
    return nodes[0] if len(nodes) == 1 else nodes


class Matmul(LocalGemm):
    name, alias = "matmul", "gemm"
    bits = {"cublas": GEMM_BITS, "small_m": GEMM_BITS, "persistent": GEMM_BITS, "sliced": INVARIANT}
    saves = ("a", "b")
    designs = {"cublas": Cublas, "small_m": SmallM, "persistent": Persistent, "sliced": Sliced}
    projections = (*COLUMN_PARALLEL, *ROW_PARALLEL)

    def default(self, name: str, call: GemmCall, machine: Machine) -> Any:
        if name != "persistent":
            return super().default(name, call, machine)
        tile = default_tile(call.M, call.N, call.dtype, machine.caps)
        return Persistent(tile=tile, split=splits_by_default(call.K))

    def offers(self, design: str, variants: Sequence[str]) -> bool:
        return design != "persistent" or not {*FP8, "four_bit"} & {*variants}

    def space(self, call: GemmCall, machine: Machine, quick: bool = False) -> Iterator[Any]:
        yield from super().space(call, machine, quick)
        if call.invariant or call.deferred_norm or call.partials or call.quantized:
            return  # the small-M kernel's and cuBLAS's alone
        base = self.default("persistent", call, machine)
        yield from (base, replace(base, split=not base.split))
        for tile in tiles(base.tile, call.M, call.dtype, machine.caps, quick):
            yield from (Persistent(tile=tile, split=base.split), Persistent(tile=tile, split=not base.split))

    def local_plan(self, call: GemmCall, machine: Machine) -> Planned:
        """Plan of a rank's GEMM within another op."""
        return self.plan(call._replace(local_first=False, design=AUTO), machine)

    def call(self, case: Case, team: Team | None, *tensors: torch.Tensor) -> torch.Tensor:
        if case.design != AUTO:
            return self.run_case(case, tensors)
        a, b, _ = named(case, tensors)
        return matmul(a, b, invariant=bool(case.field("invariant")))

    def cases(self) -> Iterator[Case]:
        return gemm_cases.matmul_cases(self, Persistent)

    def large_cases(self) -> Iterator[Case]:
        yield self.case(1, torch.bfloat16, (4096, 4096, 4096))
        yield from gemm_cases.large_quantized_cases(self)

    def run(
        self, design: Any, team: None, a: torch.Tensor | Fp8, b: torch.Tensor | Fp8, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``matmul`` with checked arguments by ``design``. out: the result; None: a new tensor."""
        self.check_design(design)
        if isinstance(design, Sliced):
            return sliced.product(self.name, design, a, b, out)
        if isinstance(b, Fp8):
            return by_design(design, ScaledMatrix(a), b, out=out)
        if isinstance(design, Cublas):
            return cublas.run(design, a, b, out)
        a, b = rows_contiguous(a), rows_contiguous(b)
        if isinstance(design, SmallM):
            return small_m.run(ScaledMatrix(a), b, design, out=out)
        return _run_persistent(design, a, b, out)

    def forward(self, a: torch.Tensor, b: torch.Tensor, invariant: bool = False) -> torch.Tensor:
        return self.planned(a, b, invariant=invariant)

    def planned(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None, invariant: bool = False
    ) -> torch.Tensor:
        """``run`` of 16- or 32-bit operands by their plan."""
        caps = capabilities_of(a.device)
        dense = has_dense_rows(a) and has_dense_rows(b)
        (M, K), N = a.shape, b.shape[0]
        call = GemmCall(M, N, K, a.dtype, can_describe(a, b), dense=dense, invariant=invariant)
        return self.run(self.plan(call, machine(caps, 1)).design, None, a, b, out)

    def fake(self, a: torch.Tensor, b: torch.Tensor, invariant: bool = False) -> torch.Tensor:
        return a.new_empty((a.shape[0], b.shape[0]))

    def backward(self, given: Given, grad: torch.Tensor) -> dict[str, torch.Tensor]:
        return gradients_of_matmul(given, grad)


def gradients_of_matmul(given: Given, grad: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of a and b, where wanted, if a[M, K] @ b[N, K].T has the gradient ``grad``."""
    gradients = {}
    if "a" in given.wanted:
        gradients["a"] = torch.ops.weft.matmul.default(grad, given.b.t())
    if "b" in given.wanted:
        gradients["b"] = weight_gradient(grad, given.a, given.b)
    return gradients


class WeightGradient(Op):
    """grad[M, N].T @ a[M, K] -> [N, K], fp32 sums, in ``dtype``: that of the operands, or fp32."""

    name = alias = "weight_gradient"
    saves = ("grad", "a")

    def forward(self, grad: torch.Tensor, a: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return weight_gradient_of(grad, a, dtype)

    def fake(self, grad, a, dtype):
        return a.new_empty((grad.shape[1], a.shape[1]), dtype=dtype)

    def backward(self, given: Given, ways: torch.Tensor) -> dict[str, torch.Tensor]:
        ways, matmul = ways.to(given.a.dtype), torch.ops.weft.matmul.default
        return {"grad": matmul(given.a, ways), "a": matmul(given.grad, ways.t())}


def weight_gradient_of(
    grad: torch.Tensor, a: torch.Tensor, dtype: torch.dtype, out: torch.Tensor | None = None
) -> torch.Tensor:
    """``WeightGradient``, without a gradient: ``out``, or a new tensor."""
    if dtype == a.dtype:
        return MATMUL.planned(grad.t(), a.t(), out)
    wide = cublas.widened(grad.t(), a.t(), dtype)
    return wide if out is None else out.copy_(wide)


def weight_gradient(grad: torch.Tensor, a: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Gradient of ``weight``[N, K] where a[M, K] @ weight.T has the gradient grad[M, N].

    In the dtype that ``weight.grad_dtype`` asks for: fp32, or the weight's own.
    """
    return torch.ops.weft.weight_gradient.default(grad, a, gradient_dtype(weight))


def gradient_dtype(weight: torch.Tensor) -> torch.dtype:
    """fp32 where ``weight.grad_dtype`` is, else the weight's dtype. Only leaves have such an attribute."""
    return torch.float32 if weight.is_leaf and weight.grad_dtype == torch.float32 else weight.dtype


def _run_persistent(
    design: Persistent, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    M, N, tile, caps = a.shape[0], b.shape[0], design.tile, capabilities_of(a.device)
    tiles = make_tiles(M, N, panels=1, block_m=tile.block_m, block_n=tile.block_n, group=tile.group)
    if out is None:
        out = torch.empty((M, N), dtype=a.dtype, device=a.device)
    programs = min(caps.sms, tiles.count * (MAX_PARTIALS.value if design.split else 1))
    tiles = persistent.with_split(tiles, programs, design.split)
    operands, descriptors = persistent.operands(a, b, tile)
    launch = launch_on(a.device, matmul_kernel, (tile, descriptors), lambda: tile.options(descriptors, caps.arch))
    launch(
        programs,
        *operands,
        out,
        _split_scratch(a.device, tiles.count - tiles.whole, programs, tile),
        M,
        persistent.sizes_of(a, b),
        as_argument(tiles),
        None,
        tile.block(descriptors),
        traced_view(),
    )
    return out


def _split_scratch(device: torch.device, split: int, programs: int, tile: Tile) -> SplitK:
    """Scratch memory of one call, not shared, since calls may run on several streams at once."""
    elements = tile.block_m * tile.block_n
    partials = torch.empty((programs, elements) if split else (1,), dtype=torch.float32, device=device)
    return SplitK(
        partials, torch.zeros(split, dtype=torch.int32, device=device) if split else partials.view(torch.int32)
    )


MATMUL = register(Matmul())
define(WeightGradient())
