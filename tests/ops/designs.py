"""Designs from the flat fields that the case tables (tests/ops/cases.py, tests/golden/ops.json) give them by."""

from __future__ import annotations

import dataclasses
from typing import Any

from weft.ops.gemm.tile import Tile
from weft.ops.op import find_op
from weft.plan.planned import machine
from weft.runtime import capabilities
from weft.transport.plans import PushPlan

# The tables' names of designs and fields, where the code's are others.
NAMES = {"segments": "pipelined", "library": "sequential"}
FIELDS = {"streams": "lanes", "local_pieces": "own_pieces"}


def gemm_design(op: str, fields: dict[str, Any], shape: tuple[int, int, int], dtype: Any, world_size: int) -> Any:
    """The design of GEMM op ``op``: "fused" unless ``fields`` names another; fields that are not its own are left out."""
    found = find_op(op)
    name = NAMES.get(fields.get("design", "fused"), fields.get("design", "fused"))
    if world_size == 1 or op == "matmul":
        found, name = find_op("matmul"), "persistent" if name == "fused" else "cublas"
    if name == "sequential":
        here = machine(capabilities.simulated(world_size, 8), world_size)
        return found.default(name, found.call_of(shape, dtype, here), here)
    kind, given = found.designs[name], {}
    for field in dataclasses.fields(kind):
        if field.name == "tile":
            given["tile"] = Tile(**{f.name: fields[f.name] for f in dataclasses.fields(Tile) if f.name in fields})
        elif (listed := FIELDS.get(field.name, field.name)) in fields:
            given[field.name] = fields[listed]
    # What the fields meant by leaving these out.
    if name == "pipelined":
        given = {"streams": 2, "chunks": 1} | given
    design = kind(**given)
    return design


def collective_design(op: str, algorithm: str, fields: dict[str, Any]) -> Any:
    """The design of a collective: one that pushes with the fields of a PushPlan, or "copy_engine" with its own."""
    name = algorithm if algorithm != "auto" else "push"
    kind = find_op(op).designs[name]
    return kind(**fields) if name == "copy_engine" else kind(push=PushPlan(**fields))
