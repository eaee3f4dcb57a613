"""Every op's cases against its plain-torch reference, on virtual ranks: several calls in a row on one team."""

import dataclasses
import math

import pytest

import weft
from tests.ops.checking import check_replicated, run_cases
from weft.ops.op import registered

WORLD_SIZES = (1, 2, 3, 4, 8)
# One case in so many is run on each number of ranks, on two and three ranks not the same ones; of attention on one rank, which
# has many shapes of heads, one in four. At most MOST in all: then one in an odd number, since a shape's designs follow one
# another. Four ranks take the code of three, so few cases; eight are left to the sweep.
ONE_IN = {1: 2, 2: 2, 3: 2, 4: 3}
MOST = {1: 2, 2: 3, 3: 2, 4: 1}
FIRST = {1: 0, 2: 0, 3: 1, 4: 0}
ATTENTION = ("decode_attention", "paged_attention", "paged_prefill_attention")


def sample(op, world_size, cases):
    one_in, most = 4 if (world_size, op.name in ATTENTION) == (1, True) else ONE_IN[world_size], MOST[world_size]
    if len(cases) > most * one_in:
        one_in = math.ceil(len(cases) / most) | 1
    return cases[FIRST[world_size] :: one_in] or cases[:1]


def tables():
    """A sample of the cases, each in two calls.

    Calls of one rank that keep nothing from one to the next are made once. Under the marker ``sweep`` are all, in three calls.
    """
    for op in registered():
        for world_size in WORLD_SIZES:
            cases = [case for case in op.cases() if case.world_size == world_size]
            calls, name = 1 if world_size == 1 and not op.mutates else 2, f"{op.name}-W{world_size}"
            few = sample(op, world_size, cases) if world_size in MOST else []
            if few:
                yield pytest.param(few, world_size, calls, id=name)
            if cases:
                yield pytest.param(cases, world_size, 3, id=f"{name}-sweep", marks=pytest.mark.sweep)


@pytest.mark.parametrize(("cases", "world_size", "calls"), list(tables()))
def test_every_case(cases, world_size, calls):
    check_replicated(weft.simulate(run_cases, world_size, seed=world_size, args=(cases, calls)))


def fields_of(design):
    """(design, field, value) of a design and of the dataclasses within it."""
    for field in dataclasses.fields(design):
        value = getattr(design, field.name)
        if dataclasses.is_dataclass(value):
            yield from fields_of(value)
        else:
            yield type(design), field.name, value


@pytest.mark.parametrize("op", list(registered()), ids=lambda op: op.name)
def test_cases_name_every_design_and_move_every_field(op):
    """Every design that a caller can ask for is a case's, and every field of a design given by object has two values."""
    cases = list(op.cases())
    given = [case.design for case in cases]
    designs = {design if isinstance(design, str) else kind_of(op, design) for design in given} - {"auto"}
    if cases and op.designs:
        assert designs == set(op.algorithms) - {"auto"}
    values = {}
    for design in given:
        if not isinstance(design, str):
            for kind, name, value in fields_of(design):
                values.setdefault((kind, name), {default_of(kind, name)}).add(value)
    assert {key for key, found in values.items() if len(found) == 1} == set()


def kind_of(op, design):
    return next(name for name, kind in op.designs.items() if kind is type(design))


def default_of(kind, name):
    return next(field.default for field in dataclasses.fields(kind) if field.name == name)
