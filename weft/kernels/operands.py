"""Matrix operands of kernels: their layouts, and the row scales that a GEMM applies.

Rows are dense. Tensor descriptors read them where they begin on 16 bytes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor


class RowScales(NamedTuple):
    """Scales of a matrix's rows, also a kernel's argument: 1 / sqrt(sum(squares[m]) + eps) for row m.

    squares  fp32 [rows, parts]
    """

    squares: torch.Tensor
    eps: float


class ScaledMatrix(NamedTuple):
    """A GEMM operand: a matrix, and the scales of its rows that the GEMM applies to its fp32 sums, if any."""

    data: torch.Tensor
    scales: RowScales | None = None


def has_dense_rows(x: torch.Tensor) -> bool:
    """True if the rows of ``x`` are dense and do not overlap, as in a slice of a matrix."""
    (rows, columns), (step, within) = x.shape, x.stride()
    return (columns == 1 or within == 1) and (rows == 1 or step >= columns)


def rows_contiguous(x: torch.Tensor) -> torch.Tensor:
    """``x`` if it has dense rows; else a dense copy."""
    return x if has_dense_rows(x) else x.contiguous()


def row_stride(x: torch.Tensor) -> int:
    """Elements from row to row; for a single row, a stride that any descriptor takes."""
    rows, columns = x.shape
    return x.stride(0) if rows > 1 else -(-columns // 16) * 16


def can_describe(*matrices: torch.Tensor) -> bool:
    """True if tensor descriptors can read all ``matrices``: dense rows, each of which begins on 16 bytes."""
    return all(
        x.data_ptr() % 16 == 0 and row_stride(x) * x.element_size() % 16 == 0 and has_dense_rows(x) for x in matrices
    )


def descriptor_or_self(x: torch.Tensor, block_rows: int, block_k: int, descriptors: bool) -> Any:
    """Kernel argument for the matrix ``x``: a descriptor of [block_rows, block_k] blocks, or ``x`` itself."""
    if not descriptors:
        return x
    return TensorDescriptor(x, list(x.shape), [row_stride(x), 1], [block_rows, block_k])
