"""The calls of ops.json: ops that communicate, and `matmul`, with every design that can be asked for.

A frozen copy of the meaning of the table's rows: their names, their inputs bit for bit, and the designs that their flat fields
stand for. Later changes of ops' own cases do not reach it.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import weft
from weft import ops
from weft.ops.collectives.all_reduce import ALL_REDUCE
from weft.ops.gemm.matmul import MATMUL
from weft.ops.gemm.tile import Tile
from weft.ops.op import find_op
from weft.plan.planned import machine
from weft.runtime import capabilities
from weft.transport.plans import PushPlan

TABLE = Path(__file__).with_name("ops.json")
CALLS = 2
NORM_EPS = 1e-6
# The table's names of designs and fields, where the code's are others.
DESIGNS = {"segments": "pipelined", "library": "sequential"}
FIELDS = {"streams": "lanes", "local_pieces": "own_pieces"}

Inputs = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A row of the table. op: an op's name, with "+own_first" for the order of arrival, or a variant's former name."""

    op: str
    world_size: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    algorithm: str = "auto"
    data: str = "random"
    layout: str = "contiguous"
    config: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        parts = [
            self.op,
            f"W{self.world_size}",
            str(self.dtype).removeprefix("torch."),
            "x".join(map(str, self.shape)) or "0d",
        ]
        parts += [
            word for word in (self.algorithm, self.data, self.layout) if word not in ("auto", "random", "contiguous")
        ]
        return "-".join(parts + [f"{name}={value}" for name, value in self.config])


def as_tuple(value: Any) -> Any:
    return tuple(as_tuple(member) for member in value) if isinstance(value, list) else value


def case_of(row: dict[str, Any]) -> Case:
    row = {name: as_tuple(value) for name, value in row.items()}
    return Case(**row | {"dtype": getattr(torch, row["dtype"])})


def cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    for row in json.loads(TABLE.read_text()):
        case = case_of(row)
        yield f"ops/{case}", lambda case=case: weft.simulate(call, case.world_size, args=(case,))


def call(team: Any, case: Case) -> list[torch.Tensor]:
    return [run(case, team, *inputs_of(case, team.rank, number)) for number in range(CALLS)]


# --- inputs ----------------------------------------------------------------------------------------------------------


def inputs_of(case: Case, rank: int, number: int) -> Inputs:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{case} {rank} {number}".encode()))
    return tuple(lay_out(x, case.layout) for x in tensors(case, generator))


def tensors(case: Case, generator: torch.Generator) -> Iterator[torch.Tensor]:
    name = case.op.partition("+")[0]
    if "matmul" in name:
        M, N, K = case.shape
        yield values(case, (M // case.world_size if name == "all_gather_matmul" else M, K), generator)
        yield values(case, (N, K), generator)
        return
    if name.endswith("_of_parts"):
        # The norm's other tensors were drawn behind a sum of the same generator, which nothing else reads.
        values(case, case.shape, generator)
        yield torch.randn((3, *case.shape), generator=generator)
    else:
        yield values(case, case.shape, generator)
    if "norm" in name or name.endswith("_of_parts"):
        same = torch.Generator().manual_seed(zlib.crc32(f"{case}".encode()))
        yield values(case, case.shape, same)
        yield 1 + values(case, case.shape[-1:], same) / 8


def values(case: Case, shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """A tensor of ``case.dtype``, as ``case.data`` says."""
    if not case.dtype.is_floating_point:
        return torch.randint(-100, 100, tuple(shape), generator=generator).to(case.dtype)
    x = torch.randn(tuple(shape), generator=generator)
    if case.data == "subnormal":
        return (x.double() * torch.finfo(case.dtype).smallest_normal / 8).to(case.dtype)
    x = x.to(case.dtype)
    if case.data == "special":
        flat, odd = x.view(-1), [-0.0, torch.nan, torch.inf, -torch.inf, torch.finfo(case.dtype).max, -0.0]
        flat[: flat.numel() // 2] = -0.0
        at = torch.randperm(flat.numel(), generator=generator)[: len(odd)]
        flat[at] = torch.tensor(odd[: len(at)], dtype=x.dtype)
    return x


def lay_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values in another layout."""
    if layout == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "offset":
        room = torch.empty(x.numel() + 1, dtype=x.dtype)
        room[1:] = x.reshape(-1)
        return room[1:].view(x.shape)
    return x


# --- calls -----------------------------------------------------------------------------------------------------------


def run(case: Case, team: Any, *inputs: torch.Tensor) -> torch.Tensor:
    name, _, order = case.op.partition("+")
    if name == "all_reduce_of_parts":
        return ALL_REDUCE.run_of_partials(inputs[0], case.dtype, team)
    if "norm" in name:
        factored = {"all_reduce_rms_norm": (False,), "all_reduce_factored_norm": (True,)}.get(name, (False, True))
        return torch.stack([result for one in factored for result in norm(case, team, inputs, one)])
    if "matmul" not in name:
        if case.config:
            return find_op(name).run(collective_design(case), team, *inputs)
        return getattr(ops, name)(*inputs, team, case.algorithm)
    if not case.config:
        of_team = () if name == "matmul" else (team,)
        return getattr(ops, name)(*inputs, *of_team, **({order: True} if order else {}))
    design = gemm_design(name, case)
    if name == "matmul" or team.size == 1:
        return MATMUL.run(design, None, *inputs)
    op = find_op(name)
    return op.run(design, team, *inputs, bool(order)) if op.rows_sharded else op.run(design, team, *inputs)


def norm(case: Case, team: Any, inputs: Inputs, factored: bool) -> tuple[torch.Tensor, torch.Tensor]:
    normed, hidden = ops.all_reduce_rms_norm(*inputs, NORM_EPS, team, case.algorithm, factored=factored)
    return (normed.normed() if factored else normed), hidden


def collective_design(case: Case) -> Any:
    """The design of a collective: one that pushes with the fields of a PushPlan, or "copy_engine" with its own."""
    name, fields = case.algorithm if case.algorithm != "auto" else "push", dict(case.config)
    kind = find_op(case.op).designs[name]
    return kind(**fields) if name == "copy_engine" else kind(push=PushPlan(**fields))


def gemm_design(name: str, case: Case) -> Any:
    """The design of a GEMM op: "fused" unless the row names another; fields that are not its own are left out."""
    fields, op = dict(case.config), find_op(name)
    listed = fields.get("design", "fused")
    design = DESIGNS.get(listed, listed)
    if case.world_size == 1 or name == "matmul":
        op, design = MATMUL, "persistent" if design == "fused" else "cublas"
    if design == "sequential":
        here = machine(capabilities.simulated(case.world_size), case.world_size)
        return op.default(design, op.call_of(case.shape, case.dtype, here), here)
    # What a row means by leaving these out.
    given: dict[str, Any] = {"streams": 2, "chunks": 1} if design == "pipelined" else {}
    kind = op.designs[design]
    for field in dataclasses.fields(kind):
        if field.name == "tile":
            given["tile"] = Tile(**{f.name: fields[f.name] for f in dataclasses.fields(Tile) if f.name in fields})
        elif (old := FIELDS.get(field.name, field.name)) in fields:
            given[field.name] = fields[old]
    return kind(**given)
