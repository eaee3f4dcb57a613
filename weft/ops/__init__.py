"""What a model calls: collectives and overlapped matrix products, each a ``torch.library`` custom op."""

from weft.kernels.deferred_norm import DeferredNorm
from weft.ops.attention.decode_attention import decode_attention
from weft.ops.attention.decode_places import decode_places
from weft.ops.attention.paged_attention import paged_attention
from weft.ops.attention.paged_prefill_attention import PrefillSpans, paged_prefill_attention
from weft.ops.attention.qk_norm_rope import qk_norm_rope
from weft.ops.collectives.all_gather import all_gather
from weft.ops.collectives.all_reduce import all_reduce
from weft.ops.collectives.all_reduce_rms_norm import all_reduce_rms_norm
from weft.ops.collectives.all_to_all import all_to_all
from weft.ops.collectives.barrier import barrier
from weft.ops.collectives.reduce_scatter import reduce_scatter
from weft.ops.elementwise.add_rms_norm import add_rms_norm
from weft.ops.elementwise.silu_mul import silu_mul
from weft.ops.explain import Explanation, explain
from weft.ops.gemm.matmul import matmul
from weft.ops.gemm.matmul_parts import matmul_parts
from weft.ops.gemm.matmul_silu_mul import matmul_silu_mul
from weft.ops.overlap.all_gather_matmul import all_gather_matmul
from weft.ops.overlap.matmul_all_reduce import matmul_all_reduce
from weft.ops.overlap.matmul_reduce_scatter import matmul_reduce_scatter
from weft.ops.vocab.best_words import best_words, join_words
from weft.ops.vocab.embed_rows import embed_rows
from weft.ops.vocab.likelihood_above import likelihood_above

__all__ = [
    "DeferredNorm", "Explanation", "PrefillSpans", "add_rms_norm", "all_gather", "all_gather_matmul", "all_reduce",
    "all_reduce_rms_norm", "all_to_all", "barrier", "best_words", "decode_attention", "decode_places",
    "embed_rows", "explain", "join_words", "likelihood_above", "matmul", "matmul_all_reduce", "matmul_parts",
    "matmul_reduce_scatter", "matmul_silu_mul", "paged_attention", "paged_prefill_attention", "qk_norm_rope",
    "reduce_scatter", "silu_mul",
]  # fmt: skip

# Former names, which stay importable: docs/renames.md.
FactoredNorm = DeferredNorm
