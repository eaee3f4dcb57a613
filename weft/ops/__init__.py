"""Ops of models: collectives, GEMMs that overlap with them, attention, norms, sampling."""

import sys

from weft.kernels.deferred_norm import DeferredNorm
from weft.ops.attention.decode_attention import decode_attention
from weft.ops.attention.decode_metadata import decode_metadata
from weft.ops.attention.gathered_prefill_attention import gathered_prefill_attention
from weft.ops.attention.merge_attention import merge_attention
from weft.ops.attention.mla_decode_attention import mla_decode_attention
from weft.ops.attention.mla_norm_rope import mla_norm_rope
from weft.ops.attention.paged_attention import paged_attention
from weft.ops.attention.paged_prefill_attention import paged_prefill_attention
from weft.ops.attention.qk_norm_rope import qk_norm_rope
from weft.ops.attention.sequence_ranges import SequenceRanges
from weft.ops.attention.sharded_decode_attention import sharded_decode_attention
from weft.ops.attention.zigzag import ZigzagRanges, ZigzagShards
from weft.ops.collectives.all_gather import all_gather
from weft.ops.collectives.all_reduce import all_reduce
from weft.ops.collectives.all_reduce_rms_norm import all_reduce_rms_norm
from weft.ops.collectives.all_to_all import all_to_all
from weft.ops.collectives.barrier import barrier
from weft.ops.collectives.heads import heads_to_sequence, sequence_to_heads
from weft.ops.collectives.reduce_scatter import reduce_scatter
from weft.ops.elementwise.add_rms_norm import add_rms_norm
from weft.ops.elementwise.sigmoid_mul import sigmoid_mul
from weft.ops.elementwise.silu_mul import silu_mul
from weft.ops.explain import Explanation, explain
from weft.ops.gemm.add_adapters import add_adapters
from weft.ops.gemm.algorithm_search import warm_up
from weft.ops.gemm.matmul import matmul
from weft.ops.gemm.matmul_parts import matmul_parts
from weft.ops.gemm.matmul_silu_mul import matmul_silu_mul
from weft.ops.linear_attention.causal_conv1d import causal_conv1d
from weft.ops.linear_attention.delta_rule import Gates
from weft.ops.linear_attention.gated_delta_net_step import DeltaSlots, DeltaTokens, gated_delta_net_step
from weft.ops.linear_attention.gated_delta_rule import gated_delta_rule
from weft.ops.linear_attention.rms_norm_gated import rms_norm_gated
from weft.ops.linear_attention.sequence_chunks import SequenceChunks
from weft.ops.moe.all_gather_grouped_matmul_silu_mul import all_gather_grouped_matmul_silu_mul
from weft.ops.moe.grouped_matmul import grouped_matmul, grouped_matmul_silu_mul
from weft.ops.moe.grouped_matmul_all_reduce_rms_norm import grouped_matmul_all_reduce_rms_norm
from weft.ops.moe.grouped_matmul_reduce_scatter import grouped_matmul_reduce_scatter
from weft.ops.moe.matmul_route_schedule import matmul_route_schedule
from weft.ops.moe.moe_combine import moe_combine
from weft.ops.moe.moe_dispatch import moe_dispatch
from weft.ops.moe.moe_schedule import moe_schedule
from weft.ops.moe.moe_sum import moe_sum
from weft.ops.moe.route import route
from weft.ops.moe.routing import Dispatched, Experts, Routed, Routing, Schedule
from weft.ops.overlap import all_gather_matmul_backward as _backward  # noqa: F401  defines the op
from weft.ops.overlap.all_gather_matmul import all_gather_matmul
from weft.ops.overlap.matmul_all_reduce import matmul_all_reduce
from weft.ops.overlap.matmul_reduce_scatter import matmul_reduce_scatter
from weft.ops.vocab.accept_drafts import accept_drafts
from weft.ops.vocab.adjust_logits import LogitChanges, adjust_logits
from weft.ops.vocab.draft_rows import DraftRows, draft_rows
from weft.ops.vocab.ngram_drafts import ngram_drafts
from weft.ops.vocab.note_tokens import note_tokens
from weft.ops.vocab.sample_argmax import join_argmax, sample_argmax
from weft.ops.vocab.top_p_mass import top_p_mass
from weft.ops.vocab.vocab_embedding import vocab_embedding

__all__ = [
    "DeferredNorm", "DeltaSlots", "DeltaTokens", "Dispatched", "DraftRows", "Experts", "Explanation", "Gates", "LogitChanges",
    "Routed", "Routing", "Schedule", "SequenceChunks", "SequenceRanges", "ZigzagRanges", "ZigzagShards", "accept_drafts",
    "add_adapters", "add_rms_norm", "adjust_logits", "all_gather", "all_gather_grouped_matmul_silu_mul", "all_gather_matmul",
    "all_reduce", "all_reduce_rms_norm", "all_to_all", "barrier", "causal_conv1d", "decode_attention", "decode_metadata",
    "draft_rows", "explain", "gated_delta_net_step", "gated_delta_rule", "gathered_prefill_attention", "grouped_matmul",
    "grouped_matmul_all_reduce_rms_norm", "grouped_matmul_reduce_scatter", "grouped_matmul_silu_mul", "heads_to_sequence",
    "join_argmax", "matmul", "matmul_all_reduce", "matmul_parts", "matmul_reduce_scatter", "matmul_route_schedule",
    "matmul_silu_mul", "merge_attention", "mla_decode_attention", "mla_norm_rope", "moe_combine", "moe_dispatch",
    "moe_schedule", "moe_sum", "ngram_drafts", "note_tokens", "paged_attention", "paged_prefill_attention", "qk_norm_rope",
    "reduce_scatter", "rms_norm_gated", "route", "sample_argmax", "sequence_to_heads", "sharded_decode_attention",
    "sigmoid_mul", "silu_mul", "top_p_mass", "vocab_embedding", "warm_up",
]  # fmt: skip

# Former names, which stay importable.
FactoredNorm = DeferredNorm
PrefillSpans = SequenceRanges
best_words = sample_argmax
decode_places = decode_metadata
embed_rows = vocab_embedding
join_words = join_argmax
likelihood_above = top_p_mass

_GONE = {
    "causal_conv1d_update": "gated_delta_net_step, which computes the delta rule and its norm too",
    "recurrent_gated_delta_rule": "gated_delta_net_step, which computes the convolution and the norm too",
}


def __getattr__(name: str) -> object:
    if name in _GONE:
        # Of an AttributeError `from weft.ops import NAME` would make an ImportError that names no remedy.
        imported = sys._getframe(1).f_code.co_name == "_handle_fromlist"
        kind = ImportError if imported else AttributeError
        raise kind(f"weft.ops.{name} is gone; call weft.ops.{_GONE[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
