"""Cases of the ops that neither ops.json nor local.py has, on one and two ranks, as the ops themselves name them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import weft
from tests.golden import local, ops
from tests.ops.checking import call_op, inputs_of
from weft import ops as weft_ops
from weft.ops.op import registered


def called(names: Iterable[str]) -> set[str]:
    """Functions of weft.ops that golden cases call, by the cases' names.

    These stay when an op is renamed, so that digests of older trees compare.
    """
    found = {name.split("/")[1].split("-")[0].split("+")[0] for name in names}
    return {getattr(getattr(weft_ops, name, None), "__name__", name) for name in found}


def cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    listed = called(name for group in (ops, local) for name, _ in group.cases())
    for op in registered():
        if op.name not in listed:
            for case in op.cases():
                if case.world_size <= 2:
                    yield f"moe/{case}", lambda case=case: weft.simulate(result, case.world_size, args=(case,))


def result(team: Any, case: Any) -> Any:
    return call_op(case, team, inputs_of(case, team.rank))
