"""What a model calls: collectives and overlapped matrix products, each a ``torch.library`` custom op."""

from weft.ops.all_gather import all_gather
from weft.ops.all_gather_matmul import all_gather_matmul
from weft.ops.all_reduce import all_reduce
from weft.ops.all_reduce_rms_norm import all_reduce_rms_norm
from weft.ops.all_to_all import all_to_all
from weft.ops.barrier import barrier
from weft.ops.explain import Explanation, explain
from weft.ops.matmul import matmul
from weft.ops.matmul_all_reduce import matmul_all_reduce
from weft.ops.matmul_reduce_scatter import matmul_reduce_scatter
from weft.ops.reduce_scatter import reduce_scatter

__all__ = [
    "Explanation", "all_gather", "all_gather_matmul", "all_reduce", "all_reduce_rms_norm", "all_to_all", "barrier",
    "explain", "matmul", "matmul_all_reduce", "matmul_reduce_scatter", "reduce_scatter",
]  # fmt: skip
