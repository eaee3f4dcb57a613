"""``AttentionOp``: attention over a paged cache by a plan, from a row of ``weft tune`` or by a rule.

In tables and benchmarks its shapes are (pairs, tokens, head_dim): pairs of a sequence and a KV head, tokens of each sequence.
They are run as sequences of one KV head, shared by GROUP query heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft.arguments import check_int
from weft.kernels.fp8 import COLUMNS, RowFormat
from weft.kernels.paged_cache import Sequences
from weft.ops.case import Case
from weft.ops.local import check_like
from weft.ops.op import Op
from weft.ops.registration import FLOATS, check_scalar
from weft.plan.planned import Machine, Planned

GROUP, PAGE = 8, 64
PAGE_SIZES = (16, 32, 64, 128, 256)
MAX_GROUP = 64


def writes_heads(group: int, head_dim: int, format: RowFormat) -> bool:
    """True if programs that attend for ``group`` query heads of a KV head can write rows in fp8.

    Scales for tokens, and for groups that lie in heads of two KV heads, would be of several programs.
    """
    return format.kind != "token" and group * head_dim % COLUMNS.value == 0


class AttentionOp(Op):
    """An op whose calls have ``pairs``, ``tokens``, ``head_dim`` and ``dtype``."""

    form = "attention"
    dtypes = FLOATS
    collective = False

    def table_key(self, call: Any, machine: Machine) -> tuple[str, tuple[int, ...], int]:
        return self.name, (call.pairs, call.tokens, call.head_dim), 1

    def tuned(self, call: Any, machine: Machine) -> Planned | None:
        planned = super().tuned(call, machine)
        # The steps of a row for smaller heads need not fit into shared memory.
        return planned if planned is None or planned.row.shape[2] == call.head_dim else None

    def no_row(self, call: Any, machine: Machine) -> str:
        return "" if getattr(call, "invariant", False) else super().no_row(call, machine)

    def case_of(self, shape: Sequence[int], dtype: torch.dtype, world_size: int, **fields: Any) -> Case:
        pairs, tokens, head_dim = shape
        fields = self.sequences_of(pairs, tokens) | fields
        return self.case(world_size, dtype, (GROUP, 1, head_dim, PAGE), **fields)

    def sequences_of(self, pairs: int, tokens: int) -> dict[str, Any]:
        """Fields of a case of ``pairs`` sequences with ``tokens`` tokens each."""
        raise NotImplementedError

    def memory_bytes(self, sizes: Sequence[int], dtype: torch.dtype) -> int:
        """Bytes of keys and values."""
        pairs, tokens, head_dim = sizes
        return 2 * pairs * tokens * head_dim * dtype.itemsize


def check_sequences(
    op: str, sequences: Sequences, rows: int, device: torch.device, *, queries: int = 1, columns: str = "max_pages"
) -> None:
    """ValueError unless pages and lengths are of ``rows`` rows of q, ``queries`` of each sequence.

    columns  name of the page table's
    """
    if type(queries) is not int or queries != 1:
        check_int(f"{op}: queries", queries, 1)
    if rows % queries:
        raise ValueError(
            f"{op}: q has {rows} rows, which queries={queries} does not divide; pass all new tokens of a sequence"
        )
    for name, x, shape in zip(Sequences._fields, sequences, ((rows // queries, columns), (rows,)), strict=True):
        check_like(op, name, x, device, (torch.int32,), shape)


def check_scale(op: str, scale: float | None) -> None:
    """ValueError unless ``scale`` is None or a positive number."""
    if scale is not None:
        check_scalar(op, "scale", scale)
        if scale <= 0:
            raise ValueError(f"{op}: scale={scale} is not positive; scores are compared before it is applied")


def check_scores(
    op: str,
    q_heads: int,
    device: torch.device,
    window: int | None,
    scale: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> None:
    """ValueError unless these make weights of scores: of ``q_heads`` query heads on ``device``.

    window  None or a positive integer, or a symbolic one of torch.compile
    """
    if window is not None and not isinstance(window, torch.SymInt):
        check_int(f"{op}: window", window, 1, remedy="pass 1 or more tokens, or None for no window")
    for name, value in (("scale", scale), ("softcap", softcap)):
        if value is not None:
            check_scalar(op, name, value)
    if softcap is not None and softcap <= 0:
        raise ValueError(f"{op}: softcap={softcap} is not positive; pass None for scores without a cap")
    if softcap is not None and scale is not None and scale <= 0:
        raise ValueError(f"{op}: scale={scale} is not positive, with softcap={softcap}; pass a positive scale")
    if sinks is not None:
        check_like(op, "sinks", sinks, device, FLOATS, (q_heads,))
        if not sinks.is_contiguous():
            raise ValueError(f"{op}: sinks has strides {sinks.stride()}; pass a contiguous row")


def hiding(window: int | None, keys: torch.Tensor, pages: torch.Tensor, ranks: int = 1) -> int | None:
    """``window``, or None where it holds all that ``pages`` [B, max_pages] of ``ranks`` have room for."""
    return None if window is None or window >= ranks * pages.shape[1] * keys.shape[2] else window


def check_heads(op: str, q_heads: int, keys: torch.Tensor) -> None:
    """ValueError unless KV heads share ``q_heads`` evenly and kernels can read pages of this size."""
    heads, page = keys.shape[1:3]
    if page not in PAGE_SIZES:
        raise ValueError(
            f"{op}: keys has shape {tuple(keys.shape)}; page_size={page} is not one of {', '.join(map(str, PAGE_SIZES))}"
        )
    if q_heads % heads != 0 or not 1 <= q_heads // heads <= MAX_GROUP:
        raise ValueError(
            f"{op}: q has {q_heads} heads and keys {heads}; each KV head must have the same number of query heads, 1 to "
            f"{MAX_GROUP}"
        )
