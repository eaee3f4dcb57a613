"""Cases of moe_dispatch and moe_combine, and random choices of experts, skewed as real ones are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from weft.ops.case import BF16, FP16, FP32, Case, Draw


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
        for skew in ("one expert", "last expert", "some", "none"):
            yield case(w, BF16, (17, 2, 12, 40), (17, 16, 2)[:w], skew=skew)
        yield case(w, BF16, (3, 1, 6, 24), (0, 0, 0)[:w])
        yield case(w, BF16, (3, 1, 6, 25), (0, 3, 0)[:w])
