"""What ranks must pass alike to a collective op: derived from its schema, compared at every call of virtual ranks."""

import re
from unittest import mock

import pytest
import torch

import weft
from tests.ops.checking import call_op, inputs_of
from weft import ops
from weft.errors import ArgumentMismatch, CallMismatch
from weft.ops import Experts, Routing
from weft.ops.op import registered

COLLECTIVE = [op for op in registered() if any(a.name == "team" for a in op.torch_op._schema.arguments)]


def calls_of(op):
    """Arguments of the op's smallest case of two ranks, by name: those of each rank."""
    cases = [c for c in op.cases() if c.world_size == 2 and isinstance(c.design, str) and c.data == "random"]
    case = min((c for c in cases if not c.field("nodes")), key=lambda c: torch.Size(c.sizes).numel() or 1 << 60)
    given = {}

    def noted(*arguments):
        named = op.layout.named(arguments)
        given[int(named["team"].rsplit("rank")[-1])] = named
        return op.from_torch(*named.values())

    with mock.patch.object(type(op), "dispatch", staticmethod(noted)):
        weft.simulate(lambda team: call_op(case, team, inputs_of(case, team.rank)), 2)
    return [given[rank] for rank in range(2)]


def others(value):
    """(what is changed, another value) for each way in which a value can differ."""
    if isinstance(value, torch.Tensor):
        yield None, value.to(torch.float64 if value.dtype != torch.float64 else torch.float32)
        for dim in range(value.dim()):
            shape = list(value.shape)
            shape[dim] += 1
            yield dim, value.new_empty(shape)
    elif isinstance(value, bool):
        yield None, not value
    elif isinstance(value, (int, float)):
        yield None, value + 1
    elif isinstance(value, str):
        yield None, value + "?"
    elif isinstance(value, (list, tuple)) and value:
        for what, other in others(value[-1]):
            yield what, [*value[:-1], other]


@pytest.mark.parametrize("op", COLLECTIVE, ids=lambda op: op.name)
def test_whatever_differs_between_ranks_is_named_unless_the_op_allows_it(op):
    """Each argument in turn is another one on rank 1, in its type, value or one size."""
    first, second = ({k: v for k, v in given.items() if k != "team"} for given in calls_of(op))
    assert op.agreed(first) == op.agreed(second)
    assert set(op.differs) <= set(first), "of arguments that the op has"
    changed = 0
    for name, value in second.items():
        for what, other in others(value):
            agreed = op.agreed(second | {name: other})
            allowed = op.differs.get(name)
            may = allowed == () or allowed is not None and what in allowed
            assert [n for n in agreed if agreed[n] != op.agreed(first)[n]] == ([] if may else [name]), (name, what)
            changed += not may
    assert changed >= 2


@pytest.mark.parametrize("op", COLLECTIVE, ids=lambda op: op.name)
def test_a_rank_that_passes_another_dtype_is_told_before_the_op_runs(op):
    """Called directly by one rank, and through torch's dispatcher by the other: the same number, the same error."""
    given = calls_of(op)

    def main(team):
        arguments = given[team.rank] | {"team": team.name}
        name = next(n for n in op.agreed(arguments) if n != "team")
        if team.rank == 1:
            _, arguments[name] = next(others(arguments[name]))
            return op.torch_op(*arguments.values())
        return op.dispatch(*op.layout.given(tuple(arguments.values())))

    with pytest.raises(ArgumentMismatch, match=rf"weft.ops.{op.name}: .* on rank 0, .* on rank 1; pass the same"):
        weft.simulate(main, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: ops.all_reduce(torch.ones(4 + t.rank), t), "x is (4,) float32 on rank 0, (5,) float32 on rank 1"),
        (
            lambda t: ops.all_gather(torch.ones(4, dtype=(torch.float32, torch.bfloat16)[t.rank]), t),
            "x is (4,) float32 on rank 0, (4,) bfloat16 on rank 1",
        ),
        (lambda t: ops.reduce_scatter(torch.ones(4 + 2 * t.rank), t), "x is (4,) float32 on rank 0, (6,) float32"),
        (lambda t: ops.all_to_all(torch.ones(4 + 2 * t.rank), t), "x is (4,) float32 on rank 0, (6,) float32 on rank 1"),
        (
            lambda t: ops.moe_dispatch(torch.ones(1, 16), routing([[0, 1]]), t, experts=4, max_tokens=4 + t.rank),
            "max_tokens is 4 on rank 0, 5 on rank 1",
        ),
        (
            lambda t: ops.all_reduce(torch.ones(4), t, algorithm=("one_shot", "two_shot")[t.rank]),
            "algorithm is 'one_shot' on rank 0, 'two_shot' on rank 1",
        ),
        (lambda t: t.library.all_reduce(torch.ones(4 + t.rank)), "x is (4,) torch.float32 on rank 0, (5,)"),
    ],
)  # fmt: skip
def test_both_ranks_values_are_named(call, message):
    with pytest.raises(ArgumentMismatch, match=re.escape(message)):
        weft.simulate(call, 2)


def test_ranks_in_different_ops_are_told():
    def main(team):
        x = torch.ones(4)
        ops.all_reduce(x, team)
        ops.barrier(team) if team.rank == 2 else ops.all_gather(x, team)

    with pytest.raises(CallMismatch, match=r"collective call #2: rank \d is in weft.ops.(all_gather|barrier), rank 2"):
        weft.simulate(main, 3)


def test_calls_of_several_teams_are_counted_by_team():
    def main(team):
        pair = team.subset([0, 2])
        return [
            *([ops.all_reduce(torch.ones(2), pair).tolist()] if pair is not None else []),
            ops.all_reduce(torch.ones(3), team).tolist(),
        ]

    assert weft.simulate(main, 3) == [[[2.0] * 2, [3.0] * 3], [[3.0] * 3], [[2.0] * 2, [3.0] * 3]]


def test_what_may_differ_is_right():
    """K of a GEMM, the tokens of a dispatch: the sums and rows that they should give."""

    def main(team):
        K = 8 * (1 + team.rank)
        product = ops.matmul_reduce_scatter(torch.ones(4, K), torch.ones(8, K), team)
        T = 1 + team.rank
        sent = ops.moe_dispatch(
            torch.full((T, 16), 1.0 + team.rank), routing([[0, 1]] * T), team, experts=2, max_tokens=2
        )
        return product.tolist(), [sent.rows[t, 0].item() for t in (0, 2, 3)]

    for product, rows in weft.simulate(main, 2):
        assert product == [[24.0] * 8] * 2 and rows == [1.0, 2.0, 2.0]


def routing(ids):
    ids = torch.tensor(ids, dtype=torch.int32)
    return Routing(ids, torch.ones(ids.shape))


@pytest.mark.parametrize(
    "call",
    [
        lambda ids, t: ops.moe_dispatch(torch.ones(3, 16), routing(ids), t, experts=4, max_tokens=3),
        lambda ids, t: ops.moe_schedule(routing(ids).ids, Experts.slices(4)),
        lambda ids, t: ops.all_gather_grouped_matmul_silu_mul(
            torch.ones(3, 16), routing(ids), torch.ones(4, 32, 16), Experts.slices(4), t, max_tokens=3
        ),
    ],
    ids=["moe_dispatch", "moe_schedule", "ag_moe"],
)
def test_a_token_names_an_expert_once(call):
    """-1 is none, and may stand twice."""
    with pytest.raises(ValueError, match=r"ids\[2\] names expert 3 twice; a token's experts differ, and -1 is none"):
        weft.simulate(lambda team: call([[0, 1, 2], [-1, 2, -1], [3, 0, 3]], team), 2)
    weft.simulate(lambda team: call([[0, 1, 2], [-1, 2, -1], [3, 0, 1]], team), 2)


def test_ids_are_read_where_they_have_arrived():
    """Those that moe_dispatch has received, which come after its launch on other ranks."""

    def main(team):
        sent = ops.moe_dispatch(torch.ones(2, 16), routing([[0, 1], [1, 0]]), team, experts=2, max_tokens=2)
        return ops.moe_schedule(sent.routing.ids, sent.experts).counts.tolist()

    assert weft.simulate(main, 2, slow={1: 20}) == [[4], [4]]
