"""Cases of ops: the sizes and data of one call, its inputs, and the tolerance of its result.

One table for each op (``Op.cases``) drives the simulator's tests, the GPU suite, ``weft check`` and the check before a
benchmark; one function of dtype and reduction length (``tolerance``) bounds the distance of a result from the reference.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch

from weft.kernels.deferred_norm import DeferredNorm
from weft.kernels.fp8 import COLUMNS, Fp8, RowFormat, RowsBeside, by_static_scale, by_torch
from weft.plan.planned import AUTO

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
FP32_EPS = torch.finfo(torch.float32).eps
Inputs = tuple[torch.Tensor, ...]
Rows = TypeVar("Rows", torch.Tensor, DeferredNorm)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call of an op on every rank.

    op      name of the op
    sizes   (M, N, K) of a GEMM: rows of the whole GEMM, N and K of one rank's; else the shape of the first tensor at each rank,
            or sizes that the op's ``inputs`` names
    design  a design's name, "auto", or a design
    data    "random", "special" (with -0.0, NaN, infinities and the dtype's largest) or "subnormal"
    layout  "contiguous", "transposed" (not contiguous), "strided" (rows of a wider tensor) or "offset" (contiguous, not 16-byte
            aligned)
    fields  (name, value) of the op's further arguments, such as ("local_first", True)
    eps     of the norms of all cases
    """

    eps: ClassVar[float] = 1e-6

    op: str
    world_size: int
    dtype: torch.dtype
    sizes: tuple[int, ...]
    design: Any = AUTO
    data: str = "random"
    layout: str = "contiguous"
    fields: tuple[tuple[str, Any], ...] = ()

    def field(self, name: str) -> Any:
        """The value of a further argument; None where the case leaves it out."""
        return dict(self.fields).get(name)

    def exact_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm of rows in fp64."""
        x = x.double()
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * weight.double()

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.sizes)) or "0d"
        parts = [self.op, f"W{self.world_size}", str(self.dtype).removeprefix("torch."), sizes]
        parts += [word for word in (self.data, self.layout) if word not in ("random", "contiguous")]
        parts += [f"{name}={value}" for name, value in self.fields]
        return "-".join([*parts, *([] if self.design == AUTO else [design_name(self.design)])])


def design_name(design: object) -> str:
    """A design as part of a case's name: its class, and the fields that are not default."""
    if not is_dataclass(design):
        return str(design)
    shown = []
    for field in fields(design):
        value = getattr(design, field.name)
        if value != field.default:
            shown.append(design_name(value) if is_dataclass(value) else f"{field.name}={value}")
    return f"{type(design).__name__}({','.join(shown)})"


def agreed(plain: Rows, rows: Fp8 | RowsBeside | DeferredNorm, format: RowFormat) -> Rows:
    """``plain`` [M, K], with NaN where a row differs in any bit from that of ``rows``, Fp8 or RowsBeside.

    A ``DeferredNorm`` is compared by its rows.
    """
    if isinstance(plain, DeferredNorm):
        return replace(rows, scaled=agreed(plain.scaled, rows.scaled, format))
    if isinstance(rows, RowsBeside):
        rows, beside = rows
        plain = plain.masked_fill(~(beside == plain).all(1)[:, None], torch.nan)
    wanted = (
        by_static_scale(plain, format.static_scale)
        if format.static_scale is not None
        else Fp8(*by_torch(plain, COLUMNS.value if format.kind == "group" else plain.shape[1]))
    )
    same = (rows.data.view(torch.uint8) == wanted.data.view(torch.uint8)).all(1)
    return plain.masked_fill(~(same & (rows.scales == wanted.scales).all(1))[:, None], torch.nan)


def format_of(case: Case, like: torch.Tensor) -> RowFormat | None:
    """Format that a case's field ``fp8_rows`` names, on the device of ``like``, or None. True: "group".

    With the field ``beside`` rows of 16 bits are written too.
    """
    kind = case.field("fp8_rows")
    if not kind:
        return None
    scale = like.new_full((1, 1), 0.0131, dtype=FP32) if kind == "static" else None
    return RowFormat("group" if kind is True else kind, scale, bool(case.field("beside")))


def norm_dtype(case: Case) -> torch.dtype:
    """Dtype of a norm's weight: the case's, or fp32 by its field ``wide_norm``."""
    return FP32 if case.field("wide_norm") else case.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """How exact the result of a case is.

    terms       terms of each sum, in fp32
    partials    partial sums that are rounded to the dtype before they are added up
    levels      times that a summand is rounded so, one after another, if there are partials
    roundings   to the dtype, one after another, the result's included, as of ``error_bound``
    exact       bits arrive as they were sent; no arithmetic
    replicated  all ranks get the same bits
    by_row      rows are sums of different lengths: each is judged by its own RMS, not by the whole result's
    """

    terms: int = 1
    partials: int = 0
    levels: int = 3
    roundings: int = 1
    by_row: bool = False
    exact: bool = False
    replicated: bool = False


def tolerance(dtype: torch.dtype, terms: int, partials: int = 0, levels: int = 3) -> tuple[float, float]:
    """Tolerance of a sum of ``terms`` fp32 terms, relative to (the element, the reference's RMS).

    The rounding to ``dtype`` errs by half a unit in the last place; twice that is allowed. The error of the fp32 sum grows like
    a random walk; six standard deviations are allowed. ``partials``: partial sums that are rounded to ``dtype`` before they are
    added up, each as large as the whole over the root of their number. NCCL's ring rounds W - 1 times, and cuBLAS may add
    split-K partials in 16 bits, so ``levels`` roundings are allowed for any number of partials. A missing term still shows: 64
    of K = 5120 are 0.11 of the RMS, three roundings in bf16 0.02.
    """
    eps = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
    return eps, 6 * FP32_EPS * math.sqrt(max(terms, 1)) + (levels * eps if partials else 0.0)


def gated_terms(terms: int) -> int:
    """``terms`` of an ``Accuracy`` of silu(gate) * up, which are sums of ``terms`` terms each.

    One of the two multiplies the other's error, by up to four times its RMS in normal draws, and the error grows with the root
    of the terms.
    """
    return 16 * terms


def error_bound(
    expected: torch.Tensor,
    dtype: torch.dtype,
    terms: int,
    partials: int = 0,
    by_row: bool = False,
    roundings: int = 1,
    levels: int = 3,
) -> torch.Tensor:
    """Largest error of each element of a result in ``dtype``, by ``tolerance``.

    expected  the reference, in fp32 or wider; where it is NaN the bound is NaN, and its RMS is that of the other elements
    by_row    the RMS is that of the element's row, not of the whole
    roundings  to ``dtype``, one after another, the result's included; ``tolerance`` allows two
    levels     of roundings of partial sums, as of ``Accuracy``
    """
    squares = expected.square()
    rms = (squares.nanmean(-1, keepdim=True) if by_row else squares.nanmean()).sqrt().nan_to_num(0.0)
    relative, absolute = tolerance(dtype, terms, partials, levels)
    # The type's smallest step, where rounding is no longer relative.
    return max(1, roundings / 2) * relative * expected.abs() + (
        absolute * rms + relative * torch.finfo(dtype).smallest_normal
    )


@dataclass(frozen=True, slots=True)
class Draw:
    """Random input tensors of one rank and call of a case.

    They depend on the case, the name, the rank and the call only, so every process draws the same.

    call    number of the call among several of the case
    device  of the tensors
    """

    case: Case
    rank: int
    call: int = 0
    device: torch.device | str = "cpu"

    def own(
        self, name: str, shape: Sequence[int], scale: float = 1.0, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Tensor of ``dtype`` (None: ``case.dtype``) with data by ``case.data``, different on each rank.

        Random data is multiplied by ``scale``.
        """
        return self._values(f"{name} of {self.rank}", shape, scale, dtype or self.case.dtype)

    def shared(
        self, name: str, shape: Sequence[int], scale: float = 1.0, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Tensor as of ``own``, but equal on all ranks."""
        return self._values(name, shape, scale, dtype or self.case.dtype)

    def _values(self, name: str, shape: Sequence[int], scale: float, dtype: torch.dtype) -> torch.Tensor:
        case = self.case
        seed = zlib.crc32(f"{case} {name} {self.call}".encode())
        where = {"generator": torch.Generator(self.device).manual_seed(seed), "device": self.device}
        if not dtype.is_floating_point:
            return torch.randint(-100, 100, tuple(shape), **where).to(dtype)
        x = torch.randn(tuple(shape), **where)
        if case.data == "subnormal":
            return (x.double() * torch.finfo(dtype).smallest_normal / 8).to(dtype)
        # In place: of 384 experts the product apart would take 45 GB.
        x = (x.mul_(scale) if scale != 1.0 else x).to(dtype)
        if case.data == "special":
            flat, odd = x.view(-1), [-0.0, torch.nan, torch.inf, -torch.inf, torch.finfo(dtype).max, -0.0]
            flat[: flat.numel() // 2] = -0.0
            at = torch.randperm(flat.numel(), **where)[: len(odd)]
            flat[at] = torch.tensor(odd[: len(at)], dtype=x.dtype, device=x.device)
        return x


def lay_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """Values of ``x`` in another layout (``Case.layout``)."""
    if layout == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "strided":
        return torch.cat((x, x), dim=-1)[..., : x.shape[-1]]
    if layout == "offset":
        room = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
        room[1:] = x.reshape(-1)
        return room[1:].view(x.shape)
    return x


def sum_of(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of all ranks' tensors in fp64."""
    total = parts[0].double()
    for part in parts[1:]:
        total = total + part
    return total


def part_of(x: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """Part ``rank`` of ``x`` along dimension 0."""
    rows = x.shape[0] // world_size
    return x[rank * rows : (rank + 1) * rows]
