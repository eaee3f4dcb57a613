"""``weft.ops.explain``: the plan of a call on this machine, with its reason. Nothing is computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.arguments import check_bool, check_instance, check_optional, is_integer, quoted
from weft.ops.op import Op, bits_without_plan, find_op, why_no_plan
from weft.ops.registration import ITEM_SIZES, check_choice
from weft.plan.planned import Planned, machine
from weft.plan.table import Row, name_of
from weft.runtime import capabilities
from weft.runtime.capabilities import Capabilities
from weft.runtime.team.shape import check_node_size


@dataclass(frozen=True, slots=True)
class NoPlan:
    """Design of an op without a plan."""


@dataclass(frozen=True, slots=True, repr=False)
class Explanation:
    """Plan of one call; str() and repr() are its text.

    The text has the call, the design with its fields and the plans within it, the reason, and what the result's bits depend on;
    of an op without a plan one line.

    op       the op's name
    call     the call as text
    planned  weft.plan.planned.Planned
    """

    op: str
    call: str
    planned: Planned

    @property
    def algorithm(self) -> str:
        """The design's name."""
        return self.planned.name

    @property
    def plan(self) -> Any:
        """The design, a dataclass."""
        return self.planned.design

    @property
    def row(self) -> Row | None:
        """Row of ``weft tune`` that the plan came from; None: a rule."""
        return self.planned.row

    @property
    def reason(self) -> str:
        return self.planned.reason

    @property
    def bits(self) -> str:
        """Dependences of the bits of a row's result (``Op.bits``); "" of a function without a result."""
        return (
            bits_without_plan(self.op) if isinstance(self.plan, NoPlan) else find_op(self.op).bits_of(self.planned.name)
        )

    def __repr__(self) -> str:
        if isinstance(self.plan, NoPlan):
            return f"{self.call} has no plan: {self.reason}{self.bits and f'; its bits {self.bits}'}"
        return "\n".join((self.call, *_lines(self.planned, "gets"), f"  bits  {self.bits}"))


def explain(
    op: str,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    world_size: int | None = None,
    caps: Capabilities | None = None,
    *,
    algorithm: str = "auto",
    own_first: bool = False,
    node_size: int | None = None,
    **sizes: int,
) -> Explanation:
    """Plan of a call of ``op`` with its reason; ``print`` shows it.

    op          name of an op in weft.ops, or its alias on the command line; with variants of its calls as ``weft tune`` names
                them: matmul+partials, ag-gemm+block_fp8
    shape       of a collective's input at each rank; of all_reduce_rms_norm's x
    world_size  number of ranks, at least 1; None: the number of GPUs here
    caps        ``team.caps``; None: capabilities of this machine
    algorithm   the design to ask for
    own_first   as in all_gather_matmul
    node_size   ranks of a node; None: all
    sizes       by the names that the op lists (``Op.sizes``): M, N, K of a GEMM are rows of the whole GEMM, N and K of one
                rank's

        print(weft.ops.explain("ag_gemm", M=4096, N=12800, K=5120, world_size=4))
        print(weft.ops.explain("all_reduce", (16, 5120), world_size=4))
        print(weft.ops.explain("sample_argmax", batch=8, vocab=37984))

    An op without a plan takes no sizes. ValueError for an unknown op, or sizes or a dtype that do not fit it.
    """
    given: dict[str, Any] = {"shape": shape, "M": None, "N": None, "K": None, **sizes}
    op, *variants = op.split("+") if isinstance(op, str) else [op]
    if why := why_no_plan(op):
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"explain: {op} has no plan that {name}={quoted(value)} could change; leave it out")
        return Explanation(op, op, Planned("kernel", NoPlan(), why))
    asked = find_op(op)
    _check_variants(asked, op, variants)
    world_size = max(1, torch.cuda.device_count()) if world_size is None else world_size
    _check_team(world_size, caps)
    _check_dtype(asked, dtype)
    check_choice(asked.name, "algorithm", algorithm, asked.algorithms)
    _check_sizes(asked, given)
    nodes = world_size // (check_node_size(node_size, world_size) or world_size)
    here = machine(caps or _here(world_size), world_size, nodes=nodes)
    fields = _fields(asked, own_first) | dict.fromkeys(variants, True)
    call = asked.call_of([given[name] for name in asked.sizes], dtype, here, algorithm, **fields)
    if nodes > 1 and not asked.spans_nodes:
        raise ValueError(
            f"explain: {asked.name} works within a node; leave node_size out and pass world_size={node_size}"
        )
    given_as = " ".join(f"{name}={given[name]}" for name in asked.sizes) if shape is None else f"of {tuple(shape)}"
    split = f", {nodes} nodes" if nodes > 1 else ""
    where = f"{name_of(dtype)}, world_size={world_size}{split}, {here.caps.device_name}"
    name = "+".join([asked.name, *variants])
    return Explanation(asked.name, f"{name} {given_as} {where}", asked.plan(call, here))


def _check_variants(asked: Op, op: str, variants: Sequence[str]) -> None:
    if unknown := [variant for variant in variants if variant not in asked.variants]:
        known, word = ", ".join(asked.variants) or "none", "+".join((op, *variants))
        raise ValueError(f"explain: op {quoted(word)}: {asked.name} has the variants {known}, not {quoted(unknown[0])}")


def _check_team(world_size: int, caps: Capabilities | None) -> None:
    if not is_integer(world_size) or world_size < 1:
        raise ValueError(f"explain: world_size={quoted(world_size)} is not positive; pass 1 or more")
    check_optional(check_instance, "explain: caps", caps, capabilities.Capabilities, "a Capabilities; team.caps is one")


def _check_sizes(op: Op, given: Mapping[str, Any]) -> None:
    if {name for name, value in given.items() if value is not None} != set(op.sizes):
        needed = ", ".join(f"{name}=" for name in op.sizes)
        rest = ", ".join(name for name in given if name not in op.sizes)
        raise ValueError(f"explain: {op.name} needs {needed} and no {rest}")


def _fields(op: Op, own_first: bool) -> dict[str, bool]:
    """Further fields of the op's call."""
    check_bool("explain: own_first", own_first)
    if own_first and "local_first" not in op.options:
        raise ValueError(f"explain: own_first=True does not change the plan of {op.name}; leave it out")
    return {"local_first": True} if own_first else {}


def _lines(planned: Planned, label: str, indent: str = "  ") -> Iterator[str]:
    """Lines for a design, its reason, and below them the plans within it."""
    fields = {field.name: getattr(planned.design, field.name) for field in dataclasses.fields(planned.design)}
    shown = ", ".join(f"{name}={value}" for name, value in _flat(fields))
    yield f"{indent}{label:4}  {planned.name}{': ' if shown else ''}{shown}"
    yield f"{indent}{'row' if planned.row is not None else 'rule':4}  {planned.reason}"
    for name, value in fields.items():
        if isinstance(value, Planned):
            yield from _lines(value, name, indent + "  ")


def _flat(fields: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(name, value) of the fields, without plans and None; a nested dataclass is replaced by its fields."""
    for name, value in fields.items():
        if dataclasses.is_dataclass(value) and not isinstance(value, Planned):
            yield from _flat({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
        elif value is not None and not isinstance(value, Planned):
            yield name, value


def _check_dtype(op: Op, dtype: torch.dtype) -> None:
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"explain: dtype={quoted(dtype)} is no torch.dtype; pass torch.bfloat16")
    if op.dtypes is not None and dtype not in op.dtypes:
        raise ValueError(f"explain: {op.name} is for {', '.join(map(name_of, op.dtypes))}, not {name_of(dtype)}")
    if dtype.itemsize not in ITEM_SIZES:
        raise ValueError(f"explain: {op.name} is for elements of 1, 2, 4 or 8 bytes, not {name_of(dtype)}")


def _here(world_size: int) -> Capabilities:
    """Capabilities of this machine's GPU; without one, of virtual ranks as ``weft.simulate`` makes them."""
    if torch.cuda.is_available():
        return capabilities.probe(torch.cuda.current_device(), [])
    return capabilities.simulated(world_size)
