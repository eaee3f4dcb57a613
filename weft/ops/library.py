"""The library's GEMM: cuBLAS, by the algorithm that was measured to be the fastest at the very shape, if one was, else as
torch calls it.

Of bf16, from 256 rows on, the best that cuBLAS has takes 2.4 % less at full clocks than what it chooses, and 3.7 % at the
power limit, where a long prefill runs (medians over 44 of 48 products of Qwen3-32B, at most 12 and 14 %:
benchmarks/lab/h200-cublas.json). Of 128 rows its choice is the best. A row stands for its own M alone: what is left over in
the last round of tiles decides, and the algorithms of M=2048 cost M=1800 6 to 11 % (h200-cublas-ragged.json).
"""

from __future__ import annotations

import torch

from weft.ops import tuned
from weft.ops.local import capabilities_of
from weft.runtime import cublaslt
from weft.runtime.cublaslt import Algorithm


def matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None, *, add: bool = False) -> torch.Tensor:
    """``out`` (None: a new one) = a[M, K] @ b[N, K].T, fp32 sums, rounded; then, if ``add``, plus what ``out`` holds, rounded
    again, as cuBLAS does it."""
    # Detached: this runs inside a custom op, where autograd would refuse out=.
    a, b = a.detach(), b.detach()
    if out is None:
        out = a.new_empty((a.shape[0], b.shape[0]))
    if a.device.type == "cpu":
        product = (a.float() @ b.float().T).to(a.dtype)
        return out.add_(product) if add else out.copy_(product)
    found = row_for(a.shape[0], *b.shape, a.dtype, capabilities_of(a.device))
    if found is not None and cublaslt.matmul(a, b, out, found.row.as_config(Algorithm), add=add):
        return out
    return torch.addmm(out, a, b.T, out=out) if add else torch.mm(a, b.T, out=out)


def by(algorithm: Algorithm, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a[M, K] @ b[N, K].T. ValueError where ``algorithm`` does not exist here."""
    out = a.new_empty((a.shape[0], b.shape[0]))
    if not cublaslt.matmul(a, b, out, algorithm):
        raise ValueError(f"{algorithm} is none of this GPU's, of this cuBLAS's or of these operands'")
    return out


def row_for(M: int, N: int, K: int, dtype: torch.dtype, caps: object) -> tuned.Found | None:
    """The row that names the algorithm of a product, if there is one of this very shape."""
    found = tuned.find("matmul", (M, N, K), dtype, 1, caps)
    return found if found is not None and found.row.is_algorithm else None
