"""The calls of ops.json: ops that communicate, and `matmul`, with every design that can be asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import weft
from tests.ops import matmul_cases  # noqa: F401  (adds the matrix products to OPERATIONS)
from tests.ops.cases import OPERATIONS, Case, inputs_of

TABLE = Path(__file__).with_name("ops.json")
CALLS = 2


def as_tuple(value: Any) -> Any:
    return tuple(as_tuple(member) for member in value) if isinstance(value, list) else value


def case_of(row: dict[str, Any]) -> Case:
    row = {name: as_tuple(value) for name, value in row.items()}
    return Case(**row | {"dtype": getattr(torch, row["dtype"])})


def call(team: Any, case: Case) -> list[torch.Tensor]:
    operation = OPERATIONS[case.op]
    return [operation.run(case, team, *inputs_of(case, team.rank, call)) for call in range(CALLS)]


def cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    for row in json.loads(TABLE.read_text()):
        case = case_of(row)
        yield f"ops/{case}", lambda case=case: weft.simulate(call, case.world_size, args=(case,))
