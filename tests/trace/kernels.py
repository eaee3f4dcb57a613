"""Kernels with records, each compiled for sm_90 with a given view, in small tiles."""

import torch
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.compiling import compiled, compiled_exchange
from weft.kernels.gemm_tile import Sizes, SplitK
from weft.kernels.online_softmax import PrefillTile, ScoreRule
from weft.kernels.operands import descriptor_or_self
from weft.kernels.paged_cache import CacheSizes, PagedCache, Sequences
from weft.kernels.split_kv import Partials
from weft.kernels.tile_schedule import as_argument, make_tiles
from weft.ops.attention import head_words, sharded_decode_attention, stripes
from weft.ops.attention.decoding import SplitKV
from weft.ops.attention.head_words import HeadSizes, HeadWords
from weft.ops.attention.sharded_decode_attention import long_tile_of
from weft.ops.collectives import all_gather, all_reduce
from weft.ops.gemm import matmul, small_m
from weft.ops.gemm.small_m_rule import SmallM
from weft.ops.gemm.tile import Tile
from weft.ops.moe.exchange import exchange_op, push
from weft.ops.moe.grouped import gemms as grouped
from weft.ops.moe.routing import Schedule
from weft.runtime.team.channel import ChannelView
from weft.transport.halves import Half

X, FLOATS, HALVES = torch.zeros(64, dtype=torch.int32), torch.zeros(64), torch.zeros((64, 64), dtype=torch.bfloat16)
LANDED = ChannelView(X, X, tl.constexpr(8))
TILE = Tile(block_m=64, block_n=32, block_k=32, group=2, num_warps=4, num_stages=2)


def traced(view):
    """View for an op without a team, which has one in a trace alone."""
    return view if view.trace is not None else None


def of_lamport(view):
    return compiled_exchange(
        all_reduce.ONE_SHOT, HALVES, HALVES, 4096, HALVES, X, view, arch="sm_90", BLOCK=256, ROWS=4, TRANSPORT="lamport",
        sizes=1, num_warps=4,
    )  # fmt: skip


def of_keyed(view):
    return compiled_exchange(
        all_gather.BODY, X, X, 4096, X, X, view, arch="sm_90", BLOCK=256, ROWS=4, TRANSPORT="keyed", num_warps=4
    )  # fmt: skip


def of_dispatch(view):
    mail = push.Mail(HALVES, X, HALVES)
    return of_rows(push.moe_dispatch_kernel, HALVES, X, HALVES, 100, mail, view=view)


def of_combine(view):
    return of_rows(push.moe_combine_kernel, HALVES, X, HALVES, HALVES, 100, push.Partials(HALVES), view=view)


def of_rows(kernel, *arguments, view):
    sizes = exchange_op.Sizes(128, 256, 2, 2, 4, 8, 256)
    flags = Half(LANDED, X, X)
    return compiled(kernel, *arguments, flags, view, arch="sm_90", SIZES=sizes, CHUNKS=16, num_warps=4)


def of_grouped(view, arriving=None, choices=0):
    weight = TensorDescriptor(HALVES, [1, 64, 64], [4096, 64, 1], [1, 32, 32])
    schedule = Schedule(X, X, X, X, 2, 64)
    return compiled(
        grouped.grouped_matmul_kernel, HALVES, None, None, None, arriving, weight, None, HALVES, None, schedule, 64, 64, 2,
        LANDED if arriving else None, view if arriving else traced(view), 0, arch="sm_90",
        FORM=grouped.Form(False, choices, 64, True, False, False, False),
        BLOCK_N=32, BLOCK_K=32, TRANSPOSED=False, num_warps=4, num_stages=2,
    )  # fmt: skip


def of_arriving(view):
    return of_grouped(view, grouped.Arriving(HALVES, 128, 64), 2)


def of_small_m(view):
    design = SmallM(block_m=16, block_n=64, block_k=64, num_warps=4, num_stages=2)
    x, weight = (descriptor_or_self(HALVES, block, 64, True) for block in (16, 64))
    return compiled(
        small_m.small_m_kernel, x, weight, HALVES, HALVES, 16, Sizes(64, 64, 64, 64), 1, 0, small_m.RowScales(FLOATS, 0.0),
        small_m.block_of(design), traced(view), None, None, None, arch="sm_90", SQUARES=0, **small_m.constants(design, False),
    )  # fmt: skip


def of_persistent(view):
    tiles = as_argument(make_tiles(640, 256, panels=1, block_m=64, block_n=32, group=2))
    return compiled(
        matmul.matmul_kernel, HALVES, HALVES, HALVES, SplitK(FLOATS, X), 640, Sizes(256, 512, 512, 512), tiles, None,
        TILE.block(False), traced(view), arch="sm_90", num_warps=4,
    )  # fmt: skip


HEADS = HeadSizes.of(32, 4, 1, 4)
WORDS = HeadWords(FLOATS, FLOATS, X)


def of_sharded(view):
    tile = long_tile_of(SplitKV(block_n=64, num_warps=4, num_stages=2), 8, 64)
    return compiled(
        sharded_decode_attention.sharded_attention_kernel, HALVES, PagedCache(HALVES, HALVES),
        Sequences(X, X), HALVES, Partials(FLOATS, FLOATS, X), 40, ScoreRule(0.1), WORDS, view, arch="sm_90",
        SIZES=CacheSizes(4, 64, 64), TILE=tile, HEADS=HEADS, FUSED=True, num_warps=4, num_stages=2,
    )  # fmt: skip


def of_merge(view):
    return compiled(
        head_words.merge_heads_kernel, HALVES, None, WORDS, view, arch="sm_90", HEADS=HEADS, ROWS=4, D=64, num_warps=4
    )  # fmt: skip


def of_gathered(view):
    cache = PagedCache(HALVES, HALVES)
    return compiled(
        stripes.gathered_prefill_attention_kernel, HALVES, stripes.Stripes(cache, cache, X, 3, 4096, 512), HALVES, FLOATS, X, X,
        LANDED, 0.1, view, arch="sm_90", SIZES=CacheSizes(4, 0, 64), TILE=PrefillTile(8, 64, 64), GATHERED=True, WITH_LSE=False,
        num_warps=4, num_stages=2,
    )  # fmt: skip


MODULES = (
    all_reduce, all_gather, push, exchange_op, grouped, small_m, matmul, head_words,
    sharded_decode_attention, stripes,
)  # fmt: skip
