"""What collectives share: calls in a row on one workspace, the rule that chooses, and refused arguments."""

import dataclasses

import pytest
import torch

import weft
from tests.ops.checking import assert_identical, check_replicated, run_cases
from tests.sampled import sampled
from weft import ops
from weft.errors import TeamClosed
from weft.ops.case import BF16, FP32, Case
from weft.ops.collectives.all_reduce import ALL_REDUCE
from weft.ops.collectives.collective import Collective
from weft.ops.collectives.heads import ExchangeHeads
from weft.ops.op import registered
from weft.plan import table
from weft.plan.memo import forget
from weft.plan.planned import machine
from weft.runtime import capabilities
from weft.transport.plans import PushPlan

COLLECTIVES = [op for op in registered() if isinstance(op, Collective)]


def interleaved(world_size, dtypes=(BF16, FP32)):
    """Calls of different ops and sizes that share a workspace, large after small and small after large."""
    for dtype in dtypes:
        for length, design in (
            (7, "one_shot"),
            (6000, "two_shot"),
            (300, "two_shot"),
            (5000, "one_shot"),
            (64, "auto"),
        ):
            yield Case(op="all_reduce", world_size=world_size, dtype=dtype, sizes=(length,), design=design)
            yield Case(op="reduce_scatter", world_size=world_size, dtype=dtype, sizes=(world_size, length // 3))
            yield Case(op="all_gather", world_size=world_size, dtype=dtype, sizes=(length // 2,))


@pytest.mark.parametrize(
    ("world_size", "slow", "seed"),
    sampled(
        ((*ranks, seed) for ranks in ((2, {1: 20.0}), (3, None), (4, {0: 20.0})) for seed in range(4)),
        # Seed 0 has twice the calls.
        lambda world_size, slow, seed: world_size < 4 and seed == world_size - 1,
    ),
)
def test_mixed_sizes_back_to_back(world_size, slow, seed):
    cases = list(interleaved(world_size, (BF16,) if seed else (BF16, FP32)))
    check_replicated(weft.simulate(run_cases, world_size, seed=seed, slow=slow, sms=8, args=(cases, 2)))


def test_what_follows_from_a_plan_is_made_once(monkeypatch):
    made = []
    prepared = ALL_REDUCE.prepared
    monkeypatch.setattr(ALL_REDUCE, "prepared", lambda *given: made.append(given[2:]) or prepared(*given))

    def main(team):
        def call(*shape, dtype=BF16, algorithm="auto"):
            ops.all_reduce(torch.ones(shape, dtype=dtype), team, algorithm)
            return len(made)

        counts = [call(6), call(6), call(2, 3), call(3, dtype=FP32), call(6, algorithm="two_shot")]
        forget()
        counts += [call(6), call(6)]
        team.empty(5)  # the plan depends on how the heap is filled
        return [*counts, call(6), call(6)]

    assert weft.simulate(main, 1) == [[1, 1, 1, 2, 3, 4, 4, 5, 5]]


def test_more_tiles_than_programs():
    """Two programs a rank go round many times in one launch."""
    case = Case(op="all_reduce", world_size=2, dtype=BF16, sizes=(9000,), design="two_shot")
    gather = Case(op="all_gather", world_size=2, dtype=FP32, sizes=(11000,))
    check_replicated(weft.simulate(run_cases, 2, sms=2, args=([case, gather, case], 1)))


def test_the_same_bits_from_run_to_run():
    case = Case(op="all_reduce", world_size=4, dtype=BF16, sizes=(3000,), design="two_shot")
    first, second = (weft.simulate(run_cases, 4, seed=seed, args=([case], 1)) for seed in (11, 12))
    assert_identical(first[0][0][2], second[0][0][2])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda team: ops.all_reduce(torch.ones(4, dtype=torch.float64), team), r"x\.dtype=torch\.float64 .* convert"),
        (lambda team: ops.all_reduce(torch.ones(4, device="meta"), team), r"x is on meta and team .* on cpu; move"),
        (
            lambda team: ops.all_reduce(torch.ones(4), team, "ring"),
            r"algorithm='ring' is not one of 'auto', 'one_shot'",
        ),
        (
            lambda team: ops.reduce_scatter(torch.ones(5), team),
            r"x\.shape\[0\]=5 .* world_size=2; pad dimension 0 to 6",
        ),
        (lambda team: ops.all_to_all(torch.ones(3, 2), team), r"x\.shape\[0\]=3 .* pad dimension 0 to 4"),
        (lambda team: ops.all_reduce(team, torch.ones(2)), r"x=<Team> is not a tensor; pass a torch.Tensor"),
        (lambda team: ops.all_gather(torch.tensor(1.0), team), r"no dimension 0 .* x\.reshape\(1\)"),
        (lambda team: ops.all_gather(torch.ones(2, dtype=torch.complex128), team), r"16 bytes an element"),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    def main(team):
        with pytest.raises(ValueError, match=message):
            call(team)

    weft.simulate(main, 2)


def test_a_closed_team_is_refused():
    def main(team):
        team.close()
        for call in (ops.all_reduce, ops.all_gather, ops.reduce_scatter, ops.all_to_all):
            with pytest.raises(TeamClosed):
                call(torch.ones(2), team)
        with pytest.raises(TeamClosed):
            ops.barrier(team)

    weft.simulate(main, 2)


def test_explain_says_what_and_why():
    small = ops.explain("all_reduce", (16, 5120), BF16, 4)
    assert (small.algorithm, small.plan.push.transport) == ("one_shot", "lamport")
    assert small.reason.startswith("predicted µs in a row: one_shot ")
    large = ops.explain("all_reduce", (4096, 5120), BF16, 4)
    assert large.algorithm == "two_shot" and large.plan.push.row_bytes > small.plan.push.row_bytes
    assert ops.explain("all_reduce", (4096, 5120), BF16, 4, algorithm="one_shot").algorithm == "one_shot"
    assert ops.explain("all_reduce", (16,), BF16, 1).algorithm == "copy"
    assert ops.explain("all_gather", (16,), BF16, 6).plan.push.transport == "keyed"
    assert ops.explain("all_gather", (3,), torch.int8, 6).plan.push.transport == "lamport"
    for op, sizes in (("all_reduce", {"shape": (4,)}), ("gemm", {"M": 1, "N": 1, "K": 1})):
        with pytest.raises(ValueError, match="is for float16, bfloat16, float32, not int32"):
            ops.explain(op, dtype=torch.int32, world_size=4, **sizes)
    with pytest.raises(ValueError, match="all_gather is for elements of 1, 2, 4 or 8 bytes, not complex128"):
        ops.explain("all_gather", (4,), torch.complex128, 4)
    with pytest.raises(ValueError, match="op='broadcast' is not one of"):
        ops.explain("broadcast", (16,), BF16, 4)


@pytest.mark.parametrize("op", COLLECTIVES, ids=lambda op: op.name)
def test_rows_that_would_overrun_the_workspace_are_refused(op):
    """48 bytes are sent as 64."""
    plan = PushPlan(transport="keyed" if op.moves_bits else "lamport", row_bytes=48, num_warps=1)
    design = next(iter(op.designs.values()))(push=plan)
    given = ([torch.ones(100, 2, 1)], (100, 100)) if isinstance(op, ExchangeHeads) else (torch.ones(200),)

    def main(team):
        with pytest.raises(ValueError, match="row_bytes=48 is not a power of two: 64 bytes .* pass 64"):
            op.run(design, team, *given)

    weft.simulate(main, 2)


def plan_by_a_row(monkeypatch, tmp_path, design, **fields):
    """The plan of a call that a tuned row of ``design`` decides, if it can."""
    path = table.file_for("Some GPU", 4, tmp_path)
    monkeypatch.setattr(table, "file_for", lambda gpu, world_size: path)
    known = {"transport": "lamport", "row_bytes": 512, "num_warps": 1, "programs_per_sm": 4}
    push = {name: value for name, value in (known | fields).items() if value is not None}
    row = table.Row(op="all_reduce", dtype="bfloat16", shape=(1 << 20,), design=design, config={"push": push}, us=1.0)
    table.write(path, table.Table(gpu="Some GPU", world_size=4, rows=(row,)))
    caps = dataclasses.replace(capabilities.simulated(4), device_name="Some GPU", is_simulated=False)
    here = machine(caps, 4)
    return [ALL_REDUCE.plan(ALL_REDUCE.call_of(((nbytes,),), BF16, here), here) for nbytes in (1 << 19, 3 << 18)]


@pytest.mark.parametrize("stale", [{"stages": 4}, {"transport": None}])
def test_a_tuned_row_of_another_version_says_to_tune_again(monkeypatch, tmp_path, stale):
    with pytest.raises(ValueError, match=r"tuned row all_reduce bfloat16 1048576 does not fit .*; run weft tune again"):
        plan_by_a_row(monkeypatch, tmp_path, "two_shot", **stale)


def test_a_tuned_row_of_an_unknown_design_is_left_out_with_one_warning(monkeypatch, tmp_path, caplog):
    plans = plan_by_a_row(monkeypatch, tmp_path, "ring")
    assert all(plan.name in ALL_REDUCE.designs and plan.row is None for plan in plans)
    assert [record.message for record in caplog.records] == [
        "some-gpu.w4.json: row all_reduce bfloat16 1048576 has design 'ring', which is unknown, so a rule decides; "
        "run weft tune again"
    ]
