"""Random choices of experts for cases, with the skews that real routing has."""

from __future__ import annotations

import torch

from weft.ops.case import Draw


def draw_ids(draw: Draw, T: int, k: int, experts: int) -> torch.Tensor:
    """int32 [T, k], a token's ids all different. The case's field ``skew``:

    None           all sets of experts alike
    "one expert"   all tokens choose expert 1, the other choices are random
    "last expert"  all tokens choose the last expert and those before it
    "none"         all ids are -1
    "some"         half of the tokens have chosen none, as padding has
    """
    skew, device = draw.case.field("skew"), draw.device
    order = draw.own("order", (T, experts), dtype=torch.float32)
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
