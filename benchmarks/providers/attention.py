"""Baselines of attention over ranks: torch and NCCL, one GPU, and the local work alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from weft.bench.harness.provider import Prepared, Provider
from weft.bench.ops.buffers import group_of
from weft.bench.ops.problem import OpProblem
from weft.kernels.block_cyclic import local_lengths
from weft.ops.attention import cases
from weft.ops.attention.paged_attention import paged_attention
from weft.runtime.arithmetic import cdiv

from .tiles import merge_over_ranks


def tickets_of(problem: OpProblem) -> torch.Tensor:
    """Arrival counters for the problem's calls, as an engine has them."""
    q, keys, *_ = problem.sets[0]
    return torch.zeros(len(q) * keys.shape[1], dtype=torch.int32, device=q.device)


def local(problem: OpProblem) -> Prepared:
    """paged_attention of all heads to this rank's tokens; the rest of the op's time is the exchange."""
    group_of(problem)
    tickets = tickets_of(problem)
    mine = [local_lengths(lengths, problem.team.rank, problem.team.size, keys.shape[2])
            for _, keys, _, _, lengths in problem.sets]  # fmt: skip

    def run(number: int) -> torch.Tensor:
        q, keys, values, pages, _ = problem.sets[number]
        return paged_attention(q, keys, values, pages, mine[number], tickets=tickets)

    def compare(out: torch.Tensor) -> tuple[Any, Any]:
        q, keys, values, pages, _ = problem.sets[0]
        return out, cases.attended_by_head(q, [keys], [values], [pages], mine[0].tolist())

    return Prepared(run=run, compare=compare)


def one_gpu(problem: OpProblem) -> Prepared:
    """paged_attention of all heads to the whole cache, on every rank by itself."""
    group_of(problem)
    tickets = tickets_of(problem)
    places = [whole_cache(problem, number) for number in range(len(problem.sets))]

    def run(number: int) -> torch.Tensor:
        q, *_, lengths = problem.sets[number]
        return paged_attention(q, *places[number], lengths, tickets=tickets)

    def compare(out: torch.Tensor) -> tuple[Any, Any]:
        own, rank = out.shape[1] // problem.team.size, problem.team.rank
        return out[:, rank * own : (rank + 1) * own].contiguous(), problem.answer()

    return Prepared(run=run, compare=compare)


def whole_cache(problem: OpProblem, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(keys, values, pages) of a set on one GPU: the ranks' pages one rank after the other."""
    by_rank = [problem.inputs(rank, number) for rank in range(problem.team.size)]
    first = torch.tensor([0, *(len(keys) for _, keys, *_ in by_rank[:-1])]).cumsum(0).tolist()
    tables = [pages + start for (_, _, _, pages, _), start in zip(by_rank, first, strict=True)]
    pages = torch.stack(tables, dim=2).flatten(1).contiguous()
    return torch.cat([keys for _, keys, *_ in by_rank]), torch.cat([values for _, _, values, *_ in by_rank]), pages


def by_flash(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """torch's flash attention: (out, natural log of the sum of weights)."""
    return torch.ops.aten._scaled_dot_product_flash_attention(q, keys, values)[:2]


def by_flex() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(partial(flex_attention, return_lse=True), dynamic=False)


def merge(parts: torch.Tensor) -> torch.Tensor:
    """Attention of parts [W, ..., D + 1] whose last column is the log of the sum of weights."""
    weights = parts[..., -1:].softmax(0)
    return (weights * parts[..., :-1]).sum(0)


def local_parts(problem: OpProblem, flex: bool = False) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    """Attention to this rank's tokens of a set by torch, and the logs of the sums of weights [B, heads].

    Query heads of a KV head are the rows of one attention; keys and values are contiguous, not in pages.
    """
    group_of(problem)
    team = problem.team
    (B, heads, D), (_, kv_heads, page, _) = problem.sets[0][0].shape, problem.sets[0][1].shape
    attend = by_flex() if flex else by_flash
    held = []
    for _, keys, values, pages, lengths in problem.sets:
        count = int(local_lengths(lengths, team.rank, team.size, page)[0])
        table = pages[:, : cdiv(count, page)].long()
        held.append([x[table].transpose(1, 2).flatten(2, 3)[:, :, :count].contiguous() for x in (keys, values)])

    def parts(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        q = problem.sets[number][0]
        out, log_sums = attend(q.view(B, kv_heads, heads // kv_heads, D), *held[number])
        return out.view(B, heads, D), log_sums.view(B, heads)

    return parts


def gathered(problem: OpProblem, flex: bool = False) -> Prepared:
    """``local_parts``, all-gather of the parts by NCCL, merge of own heads."""
    group, team, parts = group_of(problem), problem.team, local_parts(problem, flex)
    (B, heads, D), join = problem.sets[0][0].shape, torch.compile(merge, dynamic=False)
    own, every = heads // team.size, torch.empty((team.size * B, heads, D + 1), device=team.device)

    def run(number: int) -> torch.Tensor:
        out, log_sums = parts(number)
        part = torch.cat((out.float(), log_sums[..., None]), dim=-1)
        dist.all_gather_into_tensor(every, part, group=group)
        mine = every.view(team.size, B, heads, D + 1)[:, :, team.rank * own : (team.rank + 1) * own]
        return join(mine).to(out.dtype)

    return Prepared(run=run)


def on_tiles(problem: OpProblem) -> Prepared:
    """``gathered`` with weft.tiles in place of the all-gather and the merge."""
    parts = local_parts(problem)
    return Prepared(run=lambda number: merge_over_ranks(*parts(number), problem.team))


def _provider(
    name: str, make: Callable[[OpProblem], Prepared], role: str = "other", on_request: bool = False
) -> Provider:
    return Provider(name=name, ops=("sharded-decode-attention",), role=role, make=make, on_request=on_request)


PROVIDERS = (
    _provider("weft.local", local, "ceiling"),
    _provider("weft.one_gpu", one_gpu),
    _provider("sdpa+nccl", gathered),
    _provider("flex+nccl", partial(gathered, flex=True), on_request=True),
    _provider("sdpa+tiles", on_tiles, on_request=True),
)
