"""How often a trained router chose each expert on real text, for cases and benchmarks."""

from __future__ import annotations

import torch

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
    start + 1, … hit k of them.

    shares  fp64 [experts], k in all; order: [T, experts], random numbers; start: [T], random in [0, 1)
    """
    permuted = order.argsort(dim=1)
    ends = shares.to(order.device)[permuted].cumsum(1)
    ends[:, -1] = k
    hit = start.double()[:, None] + torch.arange(k, device=order.device)
    at = torch.searchsorted(ends, hit, right=True).clamp(max=len(shares) - 1)
    return permuted.gather(1, at).int()
