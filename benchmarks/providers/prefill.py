"""Baselines of attention over sharded prompts: NCCL with torch's kernels, and torch's ring."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from weft.bench.harness.provider import Prepared, Provider, Unavailable
from weft.bench.ops.buffers import group_of
from weft.bench.ops.problem import OpProblem
from weft.kernels.paged_cache import PagedCache
from weft.ops.attention.gathered_plan import GatheredArguments, GatheredCall
from weft.ops.attention.stripes import Stripes, attend
from weft.ops.attention.zigzag import ZigzagRanges
from weft.plan.planned import AUTO, machine_of

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], tuple[torch.Tensor, torch.Tensor]]


def by_heads(x: torch.Tensor) -> torch.Tensor:
    """[T, heads, D] as torch's attention takes it: a view [1, heads, T, D]."""
    return x.transpose(0, 1)[None]


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]


def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)
    return out, lse.view(q.shape[:3])


def joined(a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Attention over the keys of both."""
    share = torch.sigmoid(b[1] - a[1])[..., None]
    return (a[0].float() * (1 - share) + b[0].float() * share).to(a[0].dtype)


def nccl_and_torch(problem: OpProblem, kernel: Attention) -> Prepared:
    """All-gather of keys and values, put in order, then the two stripes of queries.

    A stripe is attended to in two calls, itself and what is before it, whose results are joined: torch's kernels have no mask
    for queries that are the last ones.
    """
    group, team = group_of(problem), problem.team
    [length], W = problem.case.field("lengths"), team.size
    cuts = [number * length // (2 * W) for number in range(2 * W + 1)]
    if length % (2 * W):
        raise Unavailable(f"{length} tokens do not divide into {2 * W} stripes of one length")
    stripes = (team.rank, 2 * W - 1 - team.rank)
    order = [stripe for rank in range(W) for stripe in (rank, 2 * W - 1 - rank)]
    places = [order.index(stripe) for stripe in range(2 * W)]
    join = torch.compile(joined, dynamic=False)

    def run(number: int) -> torch.Tensor:
        q, k, v = problem.sets[number][:3]
        both = torch.stack((k, v))
        gathered = both.new_empty((W, *both.shape))
        dist.all_gather_into_tensor(gathered.flatten(0, 1), both, group=group)
        parts = gathered.transpose(0, 1).unflatten(2, (2, -1)).flatten(1, 2)  # K and V, stripes by rank, tokens
        k, v = (by_heads(torch.cat([parts[which, place] for place in places])) for which in range(2))
        outs = []
        for mine, stripe in zip(q.chunk(2), stripes, strict=True):
            first, end = cuts[stripe], cuts[stripe + 1]
            x = by_heads(mine)
            own = kernel(x, k[:, :, first:end], v[:, :, first:end], True)
            outs.append(join(own, kernel(x, k[:, :, :first], v[:, :, :first], False)) if first else own[0])
        return torch.cat([out[0].transpose(0, 1) for out in outs])

    return Prepared(run=run, roundings=2)


def ring(problem: OpProblem) -> Prepared:
    """torch's context parallelism: its ring attention, with zig-zag shards.

    KV heads are repeated for all query heads. It is entered once; its calls within are what a model's layers make.
    """
    group = group_of(problem)
    try:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor.experimental import context_parallel
    except ImportError:
        raise Unavailable(f"torch {torch.__version__} has no context_parallel") from None
    [length], (q_heads, _, D), W = problem.case.field("lengths"), problem.case.sizes, problem.team.size
    if W == 1 or length % (2 * W):
        raise Unavailable(f"{length} tokens on {W} ranks: it takes 2 or more, and stripes of one length")
    mesh = DeviceMesh.from_group(group, problem.team.device.type)
    # It cuts whole tensors in place, so the shards are written after that.
    whole = [torch.zeros((1, q_heads, length, D), dtype=problem.dtype, device=problem.team.device) for _ in range(3)]
    stack = contextlib.ExitStack()
    stack.enter_context(context_parallel(mesh, buffers=whole, buffer_seq_dims=[2] * 3, no_restore_buffers=set(whole)))

    def prepare(number: int) -> None:
        for x, mine in zip(whole, problem.sets[number], strict=True):
            x.copy_(by_heads(mine).repeat_interleave(q_heads // mine.shape[1], 1))

    def run(number: int) -> torch.Tensor:
        return F.scaled_dot_product_attention(*whole, is_causal=True)[0].transpose(0, 1)

    prepare(0)
    return Prepared(run=run, prepare=prepare, close=stack.close, roundings=2)


def local(problem: OpProblem) -> Prepared:
    """weft's kernel alone, with the work of each rank: its share of the query heads for all tokens."""
    team, (q_heads, kv_heads, D) = problem.team, problem.case.sizes
    group_of(problem)
    [length], W = problem.case.field("lengths"), team.size
    if q_heads % W or (kv_heads % W and W % kv_heads):
        raise Unavailable(f"{q_heads} query heads on {kv_heads} KV heads do not divide into {W} shares")
    held = max(1, kv_heads // W)
    mine = q_heads // W
    tables = ZigzagRanges.make([length], team.rank, W, mine // held, problem.dtype).to(team.device)
    q, k, v = (
        torch.cat([problem.inputs(rank, 0)[at][:, :heads] for rank in range(W)])
        for at, heads in enumerate((mine, held, held))
    )
    call = GatheredCall(length, q_heads, kv_heads, D, problem.dtype)
    blocks, own = problem.op.default("ulysses", call, machine_of(team)).blocks, PagedCache(k, v)
    keys, every = Stripes(own, own, tables.stripes, 1, 0, 1), (tables.every.spans, tables.every.tiles)
    given = GatheredArguments(q, k, v, [], [], tables.every.block_m, D**-0.5, False, team.name, AUTO)

    def run(number: int) -> torch.Tensor:
        return attend(blocks, team, given, keys, every, None)[0]

    def compare(out: torch.Tensor) -> tuple[Any, Any]:
        # The last token, which attends to all keys, is the last one of rank 0.
        last = tables.shards.tokens[0] - 1
        scores = torch.einsum("kgd,nkd->kgn", q[last].double().view(held, -1, D), k.double()) * D**-0.5
        return out[last], torch.einsum("kgn,nkd->kgd", scores.softmax(-1), v.double()).flatten(0, 1)

    return Prepared(run=run, compare=compare)


def _provider(name: str, make: Callable[[OpProblem], Prepared], role: str = "other") -> Provider:
    return Provider(name=name, ops=("gathered-prefill-attention",), role=role, make=make)


PROVIDERS = (
    _provider("nccl+flash", partial(nccl_and_torch, kernel=flash)),
    _provider("nccl+cudnn", partial(nccl_and_torch, kernel=cudnn)),
    _provider("torch.ring", ring),
    _provider("local", local, role="ceiling"),
)
