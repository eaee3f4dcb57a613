"""Grouped GEMMs: each expert's weight times the rows of its pairs, in one persistent kernel.

Tiles are ragged: at most ``Schedule.block`` pairs of one expert by a block of columns. Nothing is padded in memory. The weight
is read through a tensor descriptor of experts and rows, so no coordinate grows with experts * N * K. Rows of x are gathered by
token as they are loaded, or lie in the order of the pairs. Gathered rows may be fp8 with scales (``weft.kernels.fp8``) beside
weights of 16 bits: they are multiplied as they are loaded and rounded to the weight's dtype.

A weight in 4 bits (weft.kernels.four_bit) is read in 4 bits with few pairs, where the time goes into reading weights: tiles of
``FourBitTiles`` convert it as the small-M kernel does. With more pairs a kernel writes it in 16 bits before the GEMM.

With fp8 weights rows are fp8 too (weft.kernels.fp8_tile): e4m3 times e4m3, each step along K multiplied by its scales in fp32
and added to the sums before. Gate and up are two products then, since their scales differ. h may be written in fp8: it is
rounded to 16 bits, then quantized, 128 columns of a tile under one scale.

    grouped_matmul_silu_mul   h[i] = silu(x[t] @ gate.T) * (x[t] @ up.T)      pair i of the schedule is pair p, of token t
    grouped_matmul            y[p] = h[i] @ weight.T

with biases added to these products, and another activation than silu, in fp32 before the results are rounded.

A gated tile reads a block of gate's rows and the same of up's as one operand, so one product gives both halves of its columns.
With few pairs a tile is computed transposed: the weight's rows fill the tensor instruction, which has at least 64 rows. The
first operand of that instruction must come from shared memory as it was loaded, so there gate and up are two products.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from weft.kernels.four_bit import BLOCK, FourBit
from weft.kernels.four_bit_tile import OF_WORD, Grid, dequantized, grid_of, words_of
from weft.kernels.fp8 import COLUMNS, Fp8, Fp8Rows, RowFormat, empty_rows, rows_argument, spread
from weft.kernels.fp8_tile import Fp8Scales, scales_of_gemm
from weft.kernels.operands import can_describe
from weft.ops.gemm.fp8_operands import columns_of, quantized_for
from weft.ops.knobs import design_type, either, flipped, halved, knob, one_of, powers, stepped
from weft.ops.local import capabilities_of
from weft.ops.moe.grouped.kernel import Arriving, Biases, Form, grouped_matmul_kernel
from weft.ops.moe.routing import ClampedSwiGLU, Schedule
from weft.plan.planned import AUTO
from weft.runtime.arithmetic import cdiv
from weft.runtime.capabilities import launch_options
from weft.runtime.launching import Launch, launch_on
from weft.runtime.recording import traced_view

if TYPE_CHECKING:
    from weft.runtime.team.channel import ChannelView
    from weft.runtime.team.view import TeamView


@design_type
class GroupedTiles:
    """Persistent programs, each over every programs-th tile.

    block_n     rows of the weight in a tile, gate's and up's together: a power of two of at least 16
    transposed  products are computed as weight @ x.T, for tiles of few pairs
    per_sm      programs of an SM
    columns     of the result, about, by which all tiles of pairs go before the next ones are begun
    """

    block_n: int = knob(256, powers(16), halved(32, 256))
    block_k: int = knob(64, powers(16), halved(high=256))
    transposed: bool = knob(False, near=flipped)
    per_sm: int = knob(1, near=stepped())
    columns: int = knob(1024, near=halved(128))
    num_warps: int = knob(8, near=halved(2, 8))
    num_stages: int = knob(3, near=stepped())


@design_type
class FourBitTiles:
    """``GroupedTiles`` of a weight that is read in 4 bits, in steps of 128 or 256 columns."""

    block_n: int = knob(64, powers(16), halved(32, 256))
    block_k: int = knob(2 * BLOCK, one_of(BLOCK, 2 * BLOCK), either(BLOCK, 2 * BLOCK))
    transposed: bool = knob(True, near=flipped)
    per_sm: int = knob(3, near=stepped())
    columns: int = knob(1024, near=halved(128))
    num_warps: int = knob(4, near=halved(2, 8))
    num_stages: int = knob(3, near=stepped(2))


@design_type
class FixedTiles:
    """``GroupedTiles`` of the same bits for all fields but ``block_k``, and for all numbers of pairs.

    The weight's rows are the 64-row side of the tensor instructions, and K is added up in one order of steps.
    block_k  by the dtype of the weight alone
    """

    block_n: int = knob(64, powers(64), halved(64, 256))
    block_k: int = 64
    per_sm: int = knob(2, near=stepped())
    columns: int = knob(1024, near=halved(128))
    num_warps: int = knob(4, near=halved(4, 8))
    num_stages: int = knob(4, near=stepped(2))

    transposed: ClassVar[bool] = True


Tiles = GroupedTiles | FourBitTiles | FixedTiles


class GroupedCall(NamedTuple):
    """Sizes that the plan of a grouped GEMM depends on.

    block   pairs of a tile
    pairs   of all tiles at most
    dtype   of the weight; of fp8 operands that of the result
    gather  a row for each token, else rows in the order of the pairs
    block_fp8, channel_fp8  operands are fp8: scales for blocks of the weight, or for whole rows or all of it
    four_bit                the weight is in 4 bits
    invariant               a row's bits do not depend on the pairs (``FixedTiles``)
    written                 the result is put in fp8, 128 columns of a tile under a scale
    """

    block: int
    pairs: int
    N: int
    K: int
    dtype: torch.dtype
    gather: bool
    design: str = AUTO
    block_fp8: bool = False
    channel_fp8: bool = False
    four_bit: bool = False
    invariant: bool = False
    written: bool = False

    @property
    def fp8(self) -> bool:
        return self.block_fp8 or self.channel_fp8


class Coming(NamedTuple):
    """Rows of tokens that copy engines bring into x while a grouped GEMM runs. in_place: of ``Form``."""

    rows: Arriving | None = None
    landed: ChannelView | None = None
    team: TeamView | None = None
    in_place: bool = False


NOTHING_COMES = Coming()


class GroupedArguments(NamedTuple):
    """Arguments of a grouped GEMM.

    gather         x has a row for each token
    scales         of fp8 rows
    weight_scales, input_scale
                   of an fp8 weight (``Fp8``); None: the weight is of 16 or 32 bits
    bias           [experts, rows of a weight], added to the rows' results; None: there is none
    alpha, limit   of ``ClampedSwiGLU`` in place of silu(gate) * up; limit 0: silu
    columns, zeros  with ``weight_scales``, of a weight in 4 bits (``FourBit``); 0 and None: of another weight
    invariant      as of ``GroupedCall``
    """

    x: torch.Tensor
    weight: torch.Tensor
    schedule: Schedule
    gather: bool
    scales: torch.Tensor | None
    weight_scales: torch.Tensor | None = None
    input_scale: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    alpha: float = 0.0
    limit: float = 0.0
    columns: int = 0
    zeros: torch.Tensor | None = None
    invariant: bool = False

    @classmethod
    def of(
        cls,
        x: torch.Tensor | Fp8,
        weight: torch.Tensor | Fp8 | FourBit,
        schedule: Schedule,
        gather: bool,
        scales: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        swiglu: ClampedSwiGLU | None = None,
    ) -> GroupedArguments:
        """Arguments whose rows and weight may have scales."""
        rows, scales = x[:2] if isinstance(x, Fp8) else (x, scales)
        epilogue = bias, *(swiglu or (0.0, 0.0))
        if isinstance(weight, FourBit):
            data, of_weight, columns, zeros = weight
            return cls(rows, data, schedule, gather, scales, of_weight, None, *epilogue, columns, zeros)
        data, *of_weight = weight if isinstance(weight, Fp8) else (weight, None, None)
        return cls(rows, data, schedule, gather, scales, *of_weight, *epilogue)

    @property
    def matrix(self) -> torch.Tensor | Fp8 | FourBit:
        """The weight, with its scales if it has any."""
        if self.weight_scales is None:
            return self.weight
        if self.columns:
            return FourBit(self.weight, self.weight_scales, self.columns, self.zeros)
        return Fp8(self.weight, self.weight_scales, self.input_scale)

    def with_fp8_rows(self) -> GroupedArguments:
        """The same, with rows quantized if the weight is in fp8."""
        matrix = self.matrix
        if not isinstance(matrix, Fp8) or self.scales is not None:
            return self
        x, scales, _ = quantized_for(matrix, self.x, capabilities_of(self.x.device))
        return self._replace(x=x, scales=scales)

    def of_columns(self, first: int, count: int) -> GroupedArguments:
        """The GEMM of ``count`` columns of the result from ``first`` on, where a scale begins."""
        scales, weight = self.weight_scales, self.weight[:, first : first + count]
        if scales is not None and scales.shape[1] > 1:
            rows = spread(scales.shape[1], self.weight.shape[1])
            scales = scales[:, first // rows : cdiv(first + count, rows)]
        bias = None if self.bias is None else self.bias[:, first : first + count]
        return self._replace(weight=weight, weight_scales=scales, bias=bias)

    @property
    def scaled_rows(self) -> int:
        """Rows of the weight that have a scale together at most, of blocks; else 1."""
        count = 1 if self.weight_scales is None else self.weight_scales.shape[1]
        return 1 if count == 1 else spread(count, self.weight.shape[1])

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the result."""
        if self.weight_scales is None:
            return self.weight.dtype
        return self.x.dtype if self.scales is None else torch.bfloat16

    def call(self, gated: bool) -> GroupedCall:
        """Sizes of the call that has these arguments."""
        matrix = self.matrix
        _, rows, K = matrix.shape
        in_blocks = isinstance(matrix, Fp8) and matrix.is_grouped
        forms = in_blocks, isinstance(matrix, Fp8) and not in_blocks, isinstance(matrix, FourBit)
        sizes = self.schedule.block, self.schedule.all_pairs, rows // (2 if gated else 1), K
        return GroupedCall(*sizes, self.dtype, self.gather, AUTO, *forms, self.invariant)


class Operands(NamedTuple):
    """Operands of a grouped GEMM as ``grouped_matmul_kernel`` takes them.

    scales  of fp8 rows beside a weight of 16 bits
    """

    x: torch.Tensor
    weight: torch.Tensor
    scales: torch.Tensor | None = None
    fp8: Fp8Scales | None = None
    four_bit: Grid | None = None


def operands_of(design: Tiles, given: GroupedArguments, gated: bool) -> Operands:
    """Dense operands: rows in fp8 beside an fp8 weight; 4 bits in 16 unless the design reads them."""
    matrix = given.matrix
    if isinstance(matrix, FourBit) and isinstance(design, GroupedTiles):
        matrix = dequantized(matrix, given.dtype, capabilities_of(given.x.device))
        given = given._replace(weight=matrix, weight_scales=None, columns=0, zeros=None)
    x, weight, _, _, scales = given.with_fp8_rows()[:5]
    x = x if x.is_contiguous() else x.contiguous()
    if not can_describe_experts(weight):
        weight = weight.clone(memory_format=torch.contiguous_format)
    if isinstance(matrix, FourBit):
        return Operands(x, words_of(matrix._replace(data=weight)), four_bit=grid_of(matrix))
    if isinstance(matrix, Fp8):
        return Operands(x, weight, fp8=scales_of_gemm(scales, matrix, design.block_n // (2 if gated else 1), gated))
    return Operands(x, weight, None if scales is None else scales.contiguous())


class Results(NamedTuple):
    """Contents of ``out`` of a GEMM.

    written  of fp8 rows; None: they are not in fp8
    parts    more than 1: products of equal parts of K, ``out`` [parts, pairs, N]
    """

    written: Fp8Rows | None = None
    parts: int = 1


PLAIN_ROWS = Results()


def run(
    design: Tiles,
    given: GroupedArguments,
    *,
    gated: bool = False,
    turned: bool = False,
    each_pair: bool = False,
    coming: Coming = NOTHING_COMES,
    out: torch.Tensor | None = None,
    into: Results = PLAIN_ROWS,
) -> torch.Tensor:
    """Rows of checked arguments, in ``out`` or a new tensor; see ``grouped_matmul_kernel``.

    each_pair  x has a row for each pair, and rows of the result are in the order of the schedule
    into       contents of ``out``
    """
    schedule, matrix, caps = given.schedule, given.matrix, capabilities_of(given.x.device)
    written, parts = into
    _, rows, columns = matrix.shape
    halves = 2 if gated else 1
    N, K = (columns, rows) if turned else (rows // halves, columns)
    out = given.x.new_empty((schedule.all_pairs, N), dtype=given.dtype) if out is None else out
    if schedule.all_pairs == 0:
        return out
    design = fitted(design, matrix, given.scales)
    block_k, width = design.block_k, design.block_n // halves
    if written is not None and width % COLUMNS.value:
        raise ValueError(
            f"block_n={design.block_n} has {width} results, no multiple of the {COLUMNS.value} under a scale of fp8 rows"
        )
    x, weight, scales, fp8, four_bit = operands_of(design, given, gated)
    gather = 1 if each_pair else schedule.choices if given.gather else 0
    described, apart = not gather and can_describe(x), gated and (design.transposed or fp8 is not None)
    swiglu = given.alpha, given.limit
    even, fixed = K % block_k == 0, isinstance(design, FixedTiles)
    form = Form(gated, gather, schedule.block, even, described, turned, apart, coming.in_place, *swiglu, fixed, parts)
    across, team = cdiv(N, width), coming.team or traced_view()
    launch_for(x.device, design, form, team)(
        min(schedule.tiles.shape[0] * across * parts, caps.sms * design.per_sm),
        rows_descriptor(design, x, form),
        scales,
        fp8,
        four_bit,
        coming.rows,
        weight_descriptor(design, weight, form),
        None if given.bias is None else Biases(given.bias, given.bias.stride(0)),
        out,
        written,
        schedule,
        N,
        K,
        max(1, min(across, design.columns // width)),
        coming.landed,
        team,
        schedule.all_pairs * N,
    )
    return out


def launch_for(device: torch.device, design: Tiles, form: Form, team: TeamView | None) -> Launch:
    """Launch of ``grouped_matmul_kernel`` by a design."""
    # A launch tells arguments apart by dtypes and alignment, not by the compile-time constants of a team.
    of_team = team and tuple(one.value for one in team if isinstance(one, tl.constexpr))
    return launch_on(
        device,
        grouped_matmul_kernel,
        (design, form, of_team),
        lambda: {
            "FORM": form,
            "BLOCK_N": design.block_n,
            "BLOCK_K": design.block_k,
            "TRANSPOSED": design.transposed,
            "num_warps": design.num_warps,
            "num_stages": design.num_stages,
            **({"enable_fp_fusion": False} if form.fixed else {}),
            **launch_options(capabilities_of(device)),
        },
    )


def run_gated(
    design: GroupedTiles, given: GroupedArguments, format: RowFormat | None, coming: Coming = NOTHING_COMES
) -> tuple[torch.Tensor, torch.Tensor]:
    """(h, its scales) of a gated GEMM, in fp8 of a form; None: in 16 or 32 bits, with scales [0]."""
    if format is None:
        return run(design, given, gated=True, coming=coming), given.x.new_empty(0, dtype=torch.float32)
    h, scales = empty_rows(given.x, given.schedule.all_pairs, given.weight.shape[1] // 2, format)
    written = rows_argument(scales, format, given.dtype, COLUMNS.value)
    return run(design, given, gated=True, coming=coming, out=h, into=Results(written)), scales


def fitted(design: Tiles, weight: torch.Tensor | Fp8 | FourBit, scales: torch.Tensor | None) -> Tiles:
    """``design`` with steps under one scale of ``weight``, or of fp8 rows that have ``scales``."""
    if not isinstance(weight, Fp8) and scales is None:
        return design
    most = columns_of(weight) if isinstance(weight, Fp8) and weight.is_grouped else COLUMNS.value
    return replace(design, block_k=most) if design.block_k > most else design


def rows_descriptor(design: Tiles, x: torch.Tensor, form: Form) -> TensorDescriptor | torch.Tensor:
    """Descriptor of rows ``x`` as the kernel takes it; ``x`` unless ``form.described``."""
    return TensorDescriptor(x, list(x.shape), [x.shape[1], 1], [form.block, design.block_k]) if form.described else x


def weight_descriptor(design: Tiles, weight: torch.Tensor, form: Form) -> TensorDescriptor:
    """Descriptor of ``weight`` [experts, rows, columns], or words of 4 bits, as the kernel takes it."""
    experts, rows, columns = weight.shape
    apart, block_n = weight.stride(0) if experts > 1 else rows * columns, design.block_n
    block_k = design.block_k // (OF_WORD.value if isinstance(design, FourBitTiles) else 1)
    if form.gated:
        N, both = rows // 2, 1 if form.apart else 2
        return TensorDescriptor(
            weight, [experts, 2, N, columns], [apart, N * columns, columns, 1], [1, both, block_n // 2, block_k]
        )
    block = [1, block_k, block_n] if form.turned else [1, block_n, block_k]
    return TensorDescriptor(weight, [experts, rows, columns], [apart, columns, 1], block)


def can_describe_experts(weight: torch.Tensor) -> bool:
    """True if a tensor descriptor can read ``weight`` [experts, N, K]: each dense, on 16 bytes."""
    on_lines = weight.data_ptr() % 16 == 0 and weight.shape[2] * weight.itemsize % 16 == 0
    return on_lines and weight[0].is_contiguous() and weight.stride(0) * weight.itemsize % 16 == 0
