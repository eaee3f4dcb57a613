"""silu_mul: the activation between the two GEMMs of a gated MLP, where no GEMM computes it itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.kernels.activations import ACTIVATIONS, activated
from weft.kernels.deferred_norm import DeferredNorm, check_scales, rms_scale
from weft.kernels.fp8 import Fp8, Fp8Rows, RowFormat, check_e4m3, empty_rows, fp8_of, rows_argument, store_rows
from weft.kernels.operands import rows_contiguous
from weft.ops.case import BF16, FP16, FP32, Accuracy, Case, Draw, Inputs, agreed, format_of
from weft.ops.local import capabilities_of, check_like, check_rounds
from weft.ops.op import INVARIANT, Op, define, register
from weft.ops.registration import FLOATS, check_choice
from weft.runtime.arithmetic import cdiv, next_power_of_2
from weft.runtime.capabilities import launch_options
from weft.runtime.launching import launch_on
from weft.runtime.team.team import Team

# Elements of a program's tile: 8 a thread of 4 warps, so that bf16 is loaded 16 bytes at a time.
TILE = 1024
MAX_ROWS = 4
# Tile for scales of groups from this many elements of a result on. There instructions limit, not memory (4,096 rows of 12,800
# take 87 us of one H200, their bytes 62, benchmarks/lab/h200-fp8-rows.json): 61 for an element, with this tile 44, since two
# divisions serve twice as many. No GPU has run it.
MANY, TILE_OF_MANY = 1 << 22, 2048
# Elements of a row that one program can hold, to find one scale for a token.
MAX_TOKEN = 32768
GELU = {"activation": "gelu_tanh"}


@triton.jit
def silu_mul_kernel(
    gate_up,
    stride,
    squares,
    eps,
    out,
    M,
    N,
    fp8,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SQUARES: tl.constexpr,
    ACTIVATION: tl.constexpr = "silu",
):
    """out[M, N] = activated(gate_up[:, :N]) * gate_up[:, N:]        grid: (tiles,), along N first

    gate_up  [M, 2 N], rows ``stride`` apart. Computed in fp32, rounded once
    squares  fp32 [M, SQUARES], a deferred RMS scale: row m of gate_up times 1 / sqrt(sum(squares[m]) + eps). SQUARES 0: none
    fp8      ``Fp8Rows``: out is then in fp8; else None
    """
    across = tl.cdiv(N, BLOCK)
    rows = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    at = gate_up + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    wl.follow_previous_kernel()
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + N, mask=inside, other=0.0).to(tl.float32)
    if SQUARES > 0:
        scale = rms_scale(squares, rows, rows < M, eps, SQUARES)[:, None]
        gate *= scale
        up *= scale
    result = (activated(gate, ACTIVATION) * up).to(gate_up.dtype.element_ty)
    at, first = rows.to(tl.int64)[:, None] * N + columns[None, :], tl.program_id(0) % across * BLOCK
    store_rows(result, out, at, inside, fp8, rows, rows < M, first, N)


def silu_mul(
    gate_up: torch.Tensor | DeferredNorm, *, fp8: RowFormat | None = None, activation: str = "silu"
) -> torch.Tensor | Fp8:
    """silu(gate) * up -> [M, N], contiguous, in the dtype of ``gate_up``; computed in fp32, rounded once.

    gate_up  [M, 2 N]: gate, then up; fp16, bf16 or fp32. Rows may be strided; any other layout is copied first. Or a
             ``DeferredNorm``, whose RMS scale is applied here
    fp8      the result is put in fp8 so, after it is rounded to 16 bits; ``row_format`` of a weight in fp8
    activation  of the gate: "silu", or in place of it "gelu_tanh", GELU by a hyperbolic tangent

    A row's bits depend on the row alone; of one or two rows with a deferred scale on M too. No backward. ValueError for another
    shape or dtype.
    """
    norm = gate_up if isinstance(gate_up, DeferredNorm) else None
    gate_up = norm.scaled if norm else gate_up
    check_like("silu_mul", "gate_up", gate_up, None, FLOATS)
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 != 0:
        raise ValueError(
            f"silu_mul: gate_up has shape {tuple(gate_up.shape)}; it must be [M, 2 N], the gate's N columns before up's"
        )
    check_rounds("silu_mul", fp8, "gate_up", gate_up)
    check_choice("silu_mul", "activation", activation, ACTIVATIONS)
    check_token("silu_mul", gate_up.shape[1] // 2, fp8)
    if norm is not None:
        check_scales("silu_mul", norm.operand, gate_up)
    given = gate_up, *((None, 0.0) if norm is None else (norm.squares, norm.eps))
    if fp8 is None:
        return SILU_MUL.dispatch(*given, activation)
    return fp8_of(*SILU_MUL_FP8.dispatch(*given, fp8, activation), fp8)


def check_token(op: str, N: int, fp8: RowFormat | None) -> None:
    """ValueError where ``fp8`` has one scale for more columns than a program can hold."""
    if fp8 is not None and fp8.kind == "token" and N > MAX_TOKEN:
        raise ValueError(f"{op}: N={N} > {MAX_TOKEN} with a scale for each token; leave fp8 out")


def tile_of(M: int, N: int, format: RowFormat | None = None) -> tuple[int, int]:
    """Rows and columns of a program of an elementwise op with a result [M, N], in a ``format`` of fp8."""
    if format is not None and format.kind == "token":
        return 1, next_power_of_2(N)
    rows = min(MAX_ROWS, next_power_of_2(M))
    by_groups = format is not None and format.kind == "group" and M * N >= MANY
    return rows, (TILE_OF_MANY if by_groups else TILE) // rows


class SiluMul(Op):
    name, alias = "silu_mul", "silu-mul"
    bits = f"{INVARIANT}, but for one or two rows with a deferred RMS scale, which depend on M"
    no_plan = "one kernel; a program takes one number of elements, of as many rows as there are"

    def inputs(self, case: Case, rank: int, draw: Draw) -> Inputs:
        gate_up, parts = draw.own("gate_up", case.sizes, 3.0), case.field("squares")
        if parts is None:
            return (gate_up,)
        return gate_up, 1 + draw.own("squares", (case.sizes[0], parts), 5.0, FP32).square()

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> torch.Tensor:
        gate_up, *squares = (x.double() for x in by_rank[rank])
        for parts in squares:
            gate_up = gate_up * (parts.sum(-1, keepdim=True) + case.eps).rsqrt()
        gate, up = gate_up.chunk(2, dim=1)
        if case.field("activation") == "gelu_tanh":
            return torch.nn.functional.gelu(gate, approximate="tanh") * up
        return gate * torch.sigmoid(gate) * up

    def accuracy(self, case: Case) -> Accuracy:
        # Scale, exponential and product are rounded one after the other.
        return Accuracy(terms=4 if case.field("squares") is None else 64)

    def call(self, case: Case, team: Team, gate_up: torch.Tensor, squares: torch.Tensor | None = None) -> torch.Tensor:
        x = gate_up if squares is None else DeferredNorm(gate_up, squares, case.eps)
        activation = case.field("activation") or "silu"
        out = silu_mul(x, activation=activation)
        format = format_of(case, out)
        return agreed(out, silu_mul(x, fp8=format, activation=activation), format) if format else out

    def cases(self) -> Iterator[Case]:
        for dtype in (FP16, BF16, FP32):
            for M, N in ((1, 1), (1, 1024), (2, 513), (3, 300), (130, 257), (0, 8), (5, 0)):
                yield self.case(1, dtype, (M, 2 * N))
            for layout in ("transposed", "strided"):
                yield self.case(1, dtype, (3, 600), layout=layout)
            for M, N, parts in ((1, 1, 1), (5, 513, 20), (130, 257, 3), (0, 8, 2)):
                for layout in ("contiguous", "strided"):
                    yield self.case(1, dtype, (M, 2 * N), layout=layout, squares=parts)
        for M, N, fields in (
            (7, 520, {"fp8_rows": "group"}),
            (1, 1300, {"fp8_rows": "group"}),
            (5, 40, {"fp8_rows": "token", "squares": 3}),
            (2, 1300, {"fp8_rows": "token"}),
            (3, 520, {"fp8_rows": "static"}),
            (3, 520, {"fp8_rows": "group", **GELU}),
            (5, 40, {"fp8_rows": "token", "squares": 3, **GELU}),
        ):
            yield self.case(1, BF16, (M, 2 * N), **fields)
        for dtype in (FP16, BF16, FP32):
            for M, N, fields in ((3, 300, GELU), (5, 513, {"squares": 20, **GELU})):
                yield self.case(1, dtype, (M, 2 * N), **fields)

    def forward(
        self, gate_up: torch.Tensor, squares: torch.Tensor | None, eps: float, activation: str = "silu"
    ) -> torch.Tensor:
        out = self.fake(gate_up, squares, eps)
        _launch(gate_up, squares, eps, out, None, tile_of(*out.shape), activation)
        return out

    def fake(self, gate_up, squares, eps, activation="silu"):
        return gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))


class SiluMulFp8(Op):
    """SiluMul with rows in fp8: a torch op by itself, since it has two results."""

    name = alias = "silu_mul_fp8"

    def forward(
        self,
        gate_up: torch.Tensor,
        squares: torch.Tensor | None,
        eps: float,
        format: RowFormat,
        activation: str = "silu",
    ) -> tuple[torch.Tensor, torch.Tensor]:
        check_e4m3("silu_mul", capabilities_of(gate_up.device))
        out, scales = self.fake(gate_up, squares, eps, format)
        tile = tile_of(*out.shape, format)
        fp8 = rows_argument(scales, format, gate_up.dtype, tile[1])
        _launch(gate_up, squares, eps, out, fp8, tile, activation)
        return out, scales

    def fake(self, gate_up, squares, eps, format, activation="silu"):
        return empty_rows(gate_up, gate_up.shape[0], gate_up.shape[1] // 2, format)


def _launch(
    gate_up: torch.Tensor,
    squares: torch.Tensor | None,
    eps: float,
    out: torch.Tensor,
    fp8: Fp8Rows | None,
    tile: tuple[int, int],
    activation: str,
) -> None:
    """Write silu_mul of checked arguments into ``out``. tile: rows and columns of a program's."""
    if out.numel() == 0:
        return
    (M, N), (rows, block) = out.shape, tile
    gate_up, caps, parts = rows_contiguous(gate_up), capabilities_of(out.device), 0
    if squares is not None:
        squares, parts = squares.contiguous(), squares.shape[1]

    def constants() -> dict[str, Any]:
        warps = max(4, min(16, rows * block // 512))
        sizes = {"ROWS": rows, "BLOCK": block, "SQUARES": parts, "ACTIVATION": activation}
        return {**sizes, "num_warps": warps, **launch_options(caps)}

    launch = launch_on(out.device, silu_mul_kernel, (rows, block, parts, activation), constants)
    squares = gate_up if squares is None else squares
    launch(cdiv(N, block) * cdiv(M, rows), gate_up, gate_up.stride(0), squares, eps, out, M, N, fp8)


SILU_MUL = register(SiluMul())
SILU_MUL_FP8 = define(SiluMulFp8())
