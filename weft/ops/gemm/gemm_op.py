"""Base of the GEMM ops: their calls, and the checks of their operands."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from weft.kernels.four_bit import FourBit, int4, mxfp4
from weft.kernels.fp8 import COLUMNS, Fp8, by_torch, quantized_weight
from weft.kernels.slices import SLICES
from weft.ops.case import Accuracy, Case, Draw, Inputs
from weft.ops.op import Op
from weft.ops.registration import FLOATS, check_divides, check_is_tensor
from weft.plan.planned import AUTO, Machine

# ``Op.bits`` of a rank's GEMM whose sums the design orders, and of one beside a collective.
GEMM_BITS = "depend on M, a rank's N and K, and the design"
OVERLAPPED_BITS = "depend on M, a rank's N and K, W and the design"


class GemmCall(NamedTuple):
    """Inputs of a GEMM's plan.

    M              rows of the whole GEMM, of all ranks together
    N, K           sizes of one rank's GEMM
    aligned        rows of both operands begin on 16 bytes, so that tensor descriptors can read them
    local_first    the rows of ranks me, me + 1, … (mod W) come in this order
    deferred_norm  the RMS scale of a's rows is applied to the result (weft.kernels.deferred_norm)
    partials       the next kernel adds split-K partials up (matmul_parts)
    design         name of a design, or "auto"
    dense          operands have dense rows; cuBLAS also reads other layouts as they are, weft's kernels read a copy
    block_fp8, channel_fp8  the weight is fp8 (weft.kernels.fp8): with scales for blocks of it, or for whole rows or all of it.
                   ``aligned`` then means that cuBLAS takes the shapes of both
    four_bit       format of a weight in 4 bits (weft.kernels.four_bit), "mxfp4" or "int4"; "": another weight
    fp8_rows       the result is put in fp8, with a scale for 128 columns of a row
    invariant      bits depend neither on M nor on the ranks (weft.ops.gemm.sliced)
    fp8_wire       sums travel in fp8 (weft.ops.collectives.fp8_wire)
    """

    M: int
    N: int
    K: int
    dtype: torch.dtype
    aligned: bool = True
    local_first: bool = False
    deferred_norm: bool = False
    partials: bool = False
    design: str = AUTO
    dense: bool = True
    block_fp8: bool = False
    channel_fp8: bool = False
    four_bit: str = ""
    fp8_rows: bool = False
    invariant: bool = False
    fp8_wire: bool = False

    @property
    def fp8(self) -> bool:
        return self.block_fp8 or self.channel_fp8

    @property
    def quantized(self) -> bool:
        """True unless the weight has the dtype of the rows."""
        return self.fp8 or self.four_bit != ""


# Projections whose weights ranks hold by rows (each has its share of N), and by columns (of K).
COLUMN_PARALLEL, ROW_PARALLEL = ("qkv", "gate-up"), ("o", "down")
# Fields of calls with fp8 weights.
FP8 = ("block_fp8", "channel_fp8")
# Weights of cases in 4 bits, by the field of the call; True, as a variant of the op: the first.
MXFP4 = "mxfp4"
FOUR_BIT = {True: mxfp4, MXFP4: mxfp4, "int4": functools.partial(int4, symmetric=False)}


class GemmOp(Op):
    """An op that is a GEMM of each rank.

    rows_sharded  M is divided among the ranks
    gathers       operand a has a rank's share of the rows
    sums          results are summed over the ranks
    replicated    all ranks get the same result
    gated         b is [2 N, K], gate's rows and up's, of which a result takes one each
    projections   of a decoder layer that it computes
    operands      names of the operands in cases
    """

    sizes = ("M", "N", "K")
    form = "gemm"
    dtypes = FLOATS
    rows_sharded: ClassVar[bool] = False
    gathers: ClassVar[bool] = False
    sums: ClassVar[bool] = False
    replicated: ClassVar[bool] = False
    gated: ClassVar[bool] = False
    projections: ClassVar[tuple[str, ...]] = ()
    operands: ClassVar[tuple[str, str]] = ("a", "b")

    def call_of(
        self, sizes: Sequence[int], dtype: torch.dtype, machine: Machine, design: str = AUTO, **fields: bool
    ) -> GemmCall:
        M, N, K = self.checked_sizes(sizes)
        if self.rows_sharded:
            check_divides(self.name, "M", M, machine.world_size)
        fp8 = bool(fields.get("block_fp8") or fields.get("channel_fp8"))
        columns = 64 if fields.get("block_fp8") else 16 if fp8 else 16 // dtype.itemsize
        aligned = K % columns == 0 and (not fp8 or N * (2 if self.gated else 1) % 16 == 0)
        given = fields | {"four_bit": MXFP4} if fields.get("four_bit") is True else fields
        return GemmCall(M, N, K, dtype, aligned, design=design, **given)

    def inputs(self, case: Case, rank: int, draw: Draw) -> Inputs:
        """a, and b or the tensors of a quantized b."""
        (M, N, K), (a, b) = case.sizes, self.operands
        rows = M // case.world_size if self.gathers else M
        # b is scaled so that results have the variance of a for any K.
        x, weight = draw.own(a, (rows, K)), draw.own(b, (2 * N if self.gated else N, K), K**-0.5)
        return x, *in_form(case, weight)

    def accuracy(self, case: Case) -> Accuracy:
        summed = case.world_size if self.sums else 1
        if summed == 1 and fp8_scheme(case):
            # The tensor cores add fp8 terms in an accumulator of some 14 bits.
            return Accuracy(terms=case.sizes[2], partials=1, levels=1, replicated=self.replicated)
        # Invariant sums round what may travel between ranks, also inside of one.
        slices = SLICES if self.sums and case.field("invariant") else summed
        return Accuracy(terms=case.sizes[2] * summed, partials=slices - 1, replicated=self.replicated)

    def design_of(self, case: Case, machine: Machine) -> Any:
        """The design of ``case``: the one it holds, or the plan's on ``machine`` where it only names one."""
        if not isinstance(case.design, str):
            return case.design
        # No plan depends on the activation.
        fields = {name: value for name, value in case.fields if name != "activation"}
        call = self.call_of(case.sizes, case.dtype, machine, case.design, **fields)
        return self.plan(call, machine).design

    def flops(self, sizes: Sequence[int]) -> int:
        M, N, K = sizes
        return 2 * M * N * K * (2 if self.gated else 1)

    def memory_bytes(self, sizes: Sequence[int], dtype: torch.dtype) -> int:
        M, N, K = sizes
        return (M * K + N * K * (2 if self.gated else 1) + M * N) * dtype.itemsize

    def moved_bytes(self, sizes: Sequence[int], dtype: torch.dtype) -> int:
        M, N, K = sizes
        return M * (K if self.gathers else N if self.sums else 0) * dtype.itemsize

    def variant(self, call: GemmCall) -> str:
        """The op's name, with the names in ``variants`` that the call has: matmul+partials."""
        return "+".join([self.name, *(name for name in self.variants if getattr(call, name))])

    def table_key(self, call: GemmCall, machine: Machine) -> tuple[str, tuple[int, ...], int]:
        return self.name, (call.M, call.N, call.K), machine.world_size


def check_operands(op: str, a: torch.Tensor, b: torch.Tensor, device: torch.device | None, name: str = "a") -> None:
    """ValueError unless a[., K] and b[N, K] are matrices of one supported dtype on ``device`` (None: a's)."""
    try:
        fits = a.dtype in FLOATS and a.dtype == b.dtype and a.device == b.device and a.device == (device or a.device)
        fits = fits and a.layout is b.layout is torch.strided
        fits = fits and a.dim() == 2 == b.dim() and 0 not in a.shape and 0 not in b.shape and a.shape[1] == b.shape[1]
    except (AttributeError, TypeError):
        fits = False
    if not fits:
        _refuse_operands(op, a, b, device, name)


def _refuse_operands(op: str, a: torch.Tensor, b: torch.Tensor, device: torch.device | None, name: str) -> None:
    for label, x in ((name, a), ("b", b)):
        check_is_tensor(op, label, x)
        if x.dim() != 2 or 0 in x.shape:
            raise ValueError(
                f"{op}: {label} has shape {tuple(x.shape)}; pass a matrix with at least one row and column"
            )
        if x.device != (device := device or x.device):
            raise ValueError(f"{op}: {label} is on {x.device}, not on {device}; move it with {label}.to('{device}')")
    if a.dtype != b.dtype or a.dtype not in FLOATS:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
        raise ValueError(f"{op}: {name}.dtype={a.dtype} and b.dtype={b.dtype} must be the same one of {allowed}")
    raise ValueError(
        f"{op}: {name} has K={a.shape[1]} columns and b has {b.shape[1]}; b is [N, K], a row for each output column"
    )


def fp8_scheme(case: Case) -> str:
    """Scheme of the weight's scales in an fp8 case (``quantized_weight``); "" in other cases."""
    return "block" if case.field("block_fp8") else "channel" if case.field("channel_fp8") else ""


def in_form(case: Case, weight: torch.Tensor) -> Inputs:
    """``weight`` in the form of the case, as its tensors (``named``)."""
    if form := case.field("four_bit"):
        return tuple(one for one in FOUR_BIT[form](weight) if isinstance(one, torch.Tensor))
    scheme = fp8_scheme(case)
    return quantized_weight(weight, scheme)[:2] if scheme else (weight,)


def named(case: Case, tensors: Inputs) -> tuple[torch.Tensor, torch.Tensor | Fp8 | FourBit, Inputs]:
    """(a, b, the other tensors) of a case's tensors."""
    if fp8_scheme(case):
        return tensors[0], Fp8(*tensors[1:3]), tuple(tensors[3:])
    if form := case.field("four_bit"):
        (a, data, scales), rest = tensors[:3], tensors[3:]
        zeros, rest = (rest[0], rest[1:]) if form == "int4" else (None, rest)
        return a, FourBit(data, scales, a.shape[1], zeros), tuple(rest)
    return tensors[0], tensors[1], tuple(tensors[2:])


def product(a: torch.Tensor, b: torch.Tensor | Fp8 | FourBit) -> torch.Tensor:
    """Compute a[M, K] @ b[N, K].T in fp64, the reference of every GEMM; rounds ``a`` as an fp8 b asks for."""
    if isinstance(b, Fp8):
        rows = Fp8(*by_torch(a, COLUMNS.value if b.is_grouped else a.shape[1]))
        a, b = rows.dequantized(torch.float64), b.dequantized(torch.float64)
    if isinstance(b, FourBit):
        b = b.dequantized(a.dtype)
    return a.double() @ b.double().T


def rotated(x: torch.Tensor, first: int, world_size: int) -> torch.Tensor:
    """Row blocks of ``x``, one per rank, from block ``first`` on (mod W)."""
    blocks = x.chunk(world_size)
    return torch.cat([*blocks[first:], *blocks[:first]])
