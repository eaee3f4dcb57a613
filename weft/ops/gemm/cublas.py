"""Products by cuBLAS, with the algorithm that ``weft tune gemm`` found fastest at the very shape, or else torch.mm's choice.

From 256 rows on the tuned algorithm takes about 3 % less time on H200; of 128 rows cuBLAS's own choice is the best. A row holds
for its own M alone, because the last round of tiles decides (docs/decisions.md, "Overlapped GEMMs").
"""

from __future__ import annotations

import torch

from weft.ops.local import capabilities_of
from weft.plan import table as tuned
from weft.plan.memo import remembered
from weft.runtime import cublaslt
from weft.runtime.capabilities import Capabilities
from weft.runtime.cublaslt import Algorithm


def matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None, *, add: bool = False) -> torch.Tensor:
    """``out`` (None: a new one) = a[M, K] @ b[N, K].T, fp32 sums, rounded; then, if ``add``, plus what ``out`` holds, rounded
    again, as cuBLAS does it. On virtual ranks the sums are fp64."""
    # Detached: this runs inside a custom op, where autograd would refuse out=.
    a, b = a.detach(), b.detach()
    if a.device.type == "cpu":
        # In fp64: CPU libraries add in an order that depends on where operands lie, which fp32 sums would show.
        product = (a.double() @ b.double().T).to(a.dtype)
        return product if out is None else out.add_(product) if add else out.copy_(product)
    algorithm = algorithm_for(a.shape[0], *b.shape, a.dtype, capabilities_of(a.device))
    if algorithm is not None:
        into = new_product(a, b) if out is None else out
        if cublaslt.matmul(a, b, into, algorithm, add=add):
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


@remembered
def algorithm_for(M: int, N: int, K: int, dtype: torch.dtype, caps: Capabilities) -> Algorithm | None:
    """What a row names; None: cuBLAS's own choice."""
    found = row_for(M, N, K, dtype, caps)
    return None if found is None else found.row.as_config(Algorithm)


def row_for(M: int, N: int, K: int, dtype: torch.dtype, caps: Capabilities) -> tuned.Found | None:
    """The row that names the algorithm of a product, if there is one of this very shape."""
    found = tuned.find("matmul", (M, N, K), dtype, 1, caps)
    return found if found is not None and found.row.is_algorithm else None
