"""Cases of moe_dispatch and moe_combine, and random choices of experts, skewed as real ones are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from weft.ops.case import BF16, FP16, FP32, Case, Draw
from weft.ops.moe.recorded import chosen_by_shares, recorded_shares
from weft.ops.moe.routing import Experts


def experts_of(case: Case, total: int, rank: int) -> Experts:
    """Experts of ``rank``: as many as the case's field ``held`` says, or those of ``local``, else all.

    local: (first, count)
    """
    if held := case.field("held"):
        return Experts(total, rank * held % total, held)
    return Experts(total, *(case.field("local") or (0, total)))


def shared_experts(case: Case, rank: int) -> Experts:
    """Experts of ``rank`` in a case of an exchange, shared by the ranks of its field ``tp``."""
    tp = case.field("tp") or 1
    return Experts.grouped(case.sizes[2], rank, case.world_size // tp, tp)


def common(draw: Draw) -> Draw:
    """``draw`` for what ranks with a field ``held`` share: the choices of all tokens."""
    return Draw(draw.case, 0, draw.call, draw.device) if draw.case.field("held") else draw


def popularity(experts: int, held: int | None) -> torch.Tensor:
    """Weights [experts] by which tokens choose: 1, 1/2, 1/3, … dealt in turn to ranks of ``held``.

    held: None: all weights are 1
    """
    if held is None:
        return torch.ones(experts)
    order = torch.arange(experts).view(held, experts // held).T.flatten()
    return 1.0 / (1 + order)


def draw_ids(draw: Draw, T: int, k: int, experts: int) -> torch.Tensor:
    """int32 [T, k], a token's ids all different. The case's field ``skew``:

    None           all sets of experts alike
    "one expert"   all tokens choose expert 1, the other choices are random
    "last expert"  all tokens choose the last expert and those before it
    "none"         all ids are -1
    "some"         half of the tokens have chosen none, as padding has
    "zipf"         experts are chosen by ``popularity``
    "recorded"     experts are chosen as often as ``recorded_shares`` says
    """
    skew, device = draw.case.field("skew"), draw.device
    order = draw.own("order", (T, experts), dtype=torch.float32)
    if skew == "recorded":
        start = torch.special.ndtr(draw.own("start", (T,), dtype=torch.float32)).clamp(max=1 - 1e-7)
        return chosen_by_shares(recorded_shares(experts, k), order, start, k).contiguous()
    if skew == "zipf":
        # The k largest of log(weight) + Gumbel noise are k draws without replacement.
        noise = torch.special.ndtr(order).clamp(1e-7, 1 - 1e-7).log().neg().log().neg()
        order = noise + popularity(experts, draw.case.field("held")).log().to(device)
    if skew == "one expert":
        order[:, 1] = torch.inf
    if skew == "last expert":
        order = torch.arange(experts, device=device).float().expand(T, experts)
    ids = order.topk(k, dim=-1).indices.int()
    if skew == "none":
        ids.fill_(-1)
    if skew == "some":
        ids[::2] = -1
    return ids.contiguous()


def schedule_by_torch(ids: torch.Tensor, experts: Experts, block: int, most: int) -> tuple[torch.Tensor, ...]:
    """(pairs, counts, tiles [most, 4], tile_count) of ``Schedule`` by torch; -1 where undefined.

    Nothing is read by the host.
    """
    (T, k), device = ids.shape, ids.device
    token, choice = torch.arange(T, device=device)[:, None], torch.arange(k, device=device)
    known = torch.where((ids >= 0) & (ids < experts.total), ids, experts.total).long()
    asked = ids.new_full((T, experts.total + 1), -1).scatter(1, known, (token * k + choice).int())
    asked = asked[:, experts.first : experts.first + experts.count].T
    counts = (asked >= 0).sum(1)
    # Pairs of an expert first, in their order.
    order = (asked < 0).int().argsort(dim=1, stable=True)
    needed, before = (counts + block - 1) // block, counts.cumsum(0) - counts
    ends, number = needed.cumsum(0), torch.arange(most, device=device)
    expert = torch.searchsorted(ends, number, right=True).clamp(max=experts.count - 1)
    at = (number - (ends - needed)[expert]) * block
    tiles = (expert, expert * T + at, before[expert] + at, (counts[expert] - at).clamp(max=block))
    tiles = torch.stack(tiles, 1).int().masked_fill((number >= ends[-1])[:, None], -1)
    return asked.gather(1, order), counts.int(), tiles, ends[-1:].int()


def fp8_case(
    w: int,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    tokens: tuple[int, ...],
    design: Any,
    data: str = "random",
) -> Case:
    """Case of rows of ``dtype`` that are sent in fp8."""
    fields = (("tokens", tokens), ("fp8", True))
    return Case(op="moe_dispatch", world_size=w, dtype=dtype, sizes=sizes, design=design, data=data, fields=fields)


def exchange_cases(op: str) -> Iterator[dict[str, Any]]:
    """Fields of cases of moe_dispatch and moe_combine."""

    def case(
        w: int, dtype: torch.dtype, sizes: tuple[int, ...], tokens: tuple[int, ...], **fields: Any
    ) -> dict[str, Any]:
        named = (("tokens", tokens), *fields.items())
        return {"op": op, "world_size": w, "dtype": dtype, "sizes": sizes, "fields": named}

    yield case(1, BF16, (9, 2, 8, 40), (9,))
    for w in (2, 3, 4, 8):
        yield case(w, BF16, (20, 3, 24, 136), (20, 0, 13, 1, 7, 20, 20, 3)[:w])
    for w in (2, 3):
        for dtype in (FP16, FP32):
            yield case(w, dtype, (5, 8, 12, 48), (5, 3, 5)[:w])
        for skew in ("one expert", "last expert", "some", "none", "recorded"):
            yield case(w, BF16, (17, 2, 12, 40), (17, 16, 2)[:w], skew=skew)
        yield case(w, BF16, (3, 1, 6, 24), (0, 0, 0)[:w])
        yield case(w, BF16, (3, 1, 6, 25), (0, 3, 0)[:w])
    for w, tp in ((2, 2), (4, 2), (8, 2), (8, 4)):
        yield case(w, BF16, (4, 2, 8, 24), (4, 0, 3, 1, 2, 4, 1, 0)[:w], tp=tp)
