"""Cases of the ops of experts and of long prompts and caches, on one and two ranks, as the ops themselves name them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import weft
from tests.ops.checking import call_op, inputs_of
from weft.ops.op import registered

# Ops of tokens or of a cache that all ranks share.
OVER_RANKS = (
    "gathered_prefill_attention",
    "heads_to_sequence",
    "merge_attention",
    "sequence_to_heads",
    "sharded_decode_attention",
)


def cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    for op in registered():
        if type(op).__module__.startswith("weft.ops.moe.") or op.name in OVER_RANKS:
            for case in op.cases():
                if case.world_size <= 2:
                    yield f"moe/{case}", lambda case=case: weft.simulate(result, case.world_size, args=(case,))


def result(team: Any, case: Any) -> Any:
    return call_op(case, team, inputs_of(case, team.rank))
