"""Choices of the cases of MoE ops: random, skewed as real ones are, with their schedule by torch."""

from __future__ import annotations

import torch

from weft.ops.case import Case, Draw
from weft.ops.moe.routing import Experts


def experts_of(case: Case, total: int, rank: int) -> Experts:
    """Experts of ``rank``: as many as the case's field ``held`` says, or its field ``local``, else all.

    local: (first, count)
    """
    if held := case.field("held"):
        return Experts(total, rank * held % total, held)
    return Experts(total, *(case.field("local") or (0, total)))


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
    "last expert"  all tokens choose the last expert and the ones before it
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


def schedule_by_torch(
    ids: torch.Tensor, experts: Experts, block: int, most: int, start: int = 0
) -> tuple[torch.Tensor, ...]:
    """(pairs, counts, tiles [most, 4], tile_count) of ``Schedule`` by torch; -1 where undefined.

    Tokens come in order from ``start`` on. Nothing is read by the host.
    """
    (T, k), device, ids = ids.shape, ids.device, ids.roll(-start, 0)
    token, choice = torch.arange(T, device=device).roll(-start)[:, None], torch.arange(k, device=device)
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


# Shares of 4,471 tokens that chose expert 0, 1, …: layer 0 of OLMoE-1B-7B-0924 on questions of GSM8K and its answers, 8 choices
# each. Counted in moe_routes.jsonl of github.com/KaxitPandya/cerebras-assesment2 (7c3cceb), without the 2,048 of its warm-up.
OLMOE = (
    0.0438, 0.0575, 0.0476, 0.0901, 0.0754, 0.1056, 0.6354, 0.1038,
    0.1369, 0.2639, 0.1183, 0.0957, 0.0441, 0.1138, 0.0904, 0.1382,
    0.0787, 0.0781, 0.1085, 0.1320, 0.1738, 0.0774, 0.1027, 0.1134,
    0.1472, 0.2496, 0.0863, 0.0684, 0.1306, 0.2297, 0.0872, 0.1405,
    0.1472, 0.1255, 0.0637, 0.0769, 0.1219, 0.0828, 0.1024, 0.1331,
    0.1787, 0.2601, 0.1168, 0.1244, 0.0783, 0.1284, 0.1069, 0.0586,
    0.0870, 0.1141, 0.0405, 0.0573, 0.2617, 0.1440, 0.1002, 0.1212,
    0.0707, 0.0501, 0.2789, 0.0774, 0.1018, 0.1335, 0.0716, 0.2199,
)  # fmt: skip


def recorded_shares(experts: int, k: int) -> torch.Tensor:
    """Shares [experts] of the tokens that choose each expert, in fp64: k in all, at most 1 each.

    The recorded ones for 8 choices of 64 experts. For other numbers the curve of OLMOE is stretched over the experts, in its
    order, and scaled.
    """
    recorded = torch.tensor(OLMOE, dtype=torch.float64)
    if (experts, k) == (len(OLMOE), 8):
        return recorded * (k / recorded.sum())
    places = torch.linspace(0, len(OLMOE) - 1, experts, dtype=torch.float64)
    below, part = places.long(), places.frac()
    curve = recorded[below] * (1 - part) + recorded[(below + 1).clamp(max=len(OLMOE) - 1)] * part
    low, high = 0.0, experts / float(curve.min())
    for _ in range(100):
        scale = (low + high) / 2
        low, high = (scale, high) if float((scale * curve).clamp(max=1).sum()) < k else (low, scale)
    return (high * curve).clamp(max=1)


def chosen_by_shares(shares: torch.Tensor, order: torch.Tensor, start: torch.Tensor, k: int) -> torch.Tensor:
    """int32 [T, k] experts of each token, all different: expert e in a share ``shares[e]`` of all tokens.

    Systematic sampling: intervals as long as the shares lie side by side, in an order of the token's own, and the places start,
    start + 1, … hit k experts.

    shares  fp64 [experts], k in all; order: [T, experts], random numbers; start: [T], random in [0, 1)
    """
    permuted = order.argsort(dim=1)
    ends = shares.to(order.device)[permuted].cumsum(1)
    ends[:, -1] = k
    hit = start.double()[:, None] + torch.arange(k, device=order.device)
    at = torch.searchsorted(ends, hit, right=True).clamp(max=len(shares) - 1)
    return permuted.gather(1, at).int()
