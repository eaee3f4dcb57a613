"""The library's GEMM: cuBLAS, by the algorithm that was measured to be the fastest at the very shape, if one was, else as
torch calls it.

Of bf16, from 256 rows on, the best that cuBLAS has takes 2.9 % less at full clocks than what it chooses, and 4.6 % at those of
a GPU that has no rest (medians over the 37 of 48 products of Qwen3-32B that have a row, at most 12 and 14 %:
benchmarks/lab/h200-cublas.json; 2.0 and 4.6 % over 34 of 58 of Llama-3-70B and symm-mem-recipes, at most 20 and 17:
h200-cublas-other-shapes.json beside it; of the 15 that join the rows of two or three of four ranks 7 have one, at most 12:
h200-cublas-spans.json). A whole prefill at the power limit gains less: what takes less time at a clock draws
more power. Of 128 rows cuBLAS's choice is the best. A row stands for its own M alone: what is left over in the last round of
tiles decides, and the algorithms of M=2048 cost M=1800 6 to 11 % (h200-cublas-ragged.json).
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
    if a.device.type == "cpu":
        product = (a.float() @ b.float().T).to(a.dtype)
        return product if out is None else out.add_(product) if add else out.copy_(product)
    found = row_for(a.shape[0], *b.shape, a.dtype, capabilities_of(a.device))
    if found is not None:
        into = new_product(a, b) if out is None else out
        if cublaslt.matmul(a, b, into, found.row.as_config(Algorithm), add=add):
            return into
    if out is None:
        return a @ b.T
    return torch.addmm(out, a, b.T, out=out) if add else torch.mm(a, b.T, out=out)


def by(algorithm: Algorithm, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a[M, K] @ b[N, K].T. ValueError where ``algorithm`` does not exist here."""
    out = new_product(a, b)
    if not cublaslt.matmul(a, b, out, algorithm):
        raise ValueError(f"{algorithm} is none of this GPU's, of this cuBLAS's or of these operands'")
    return out


def new_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.new_empty((a.shape[0], b.shape[0]))


def row_for(M: int, N: int, K: int, dtype: torch.dtype, caps: object) -> tuned.Found | None:
    """The row that names the algorithm of a product, if there is one of this very shape."""
    found = tuned.find("matmul", (M, N, K), dtype, 1, caps)
    return found if found is not None and found.row.is_algorithm else None
