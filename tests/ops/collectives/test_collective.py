"""Collectives against plain PyTorch, on virtual ranks: one table, several schedules, several calls in a row."""

import dataclasses
import functools
import importlib
from collections.abc import Iterable

import pytest
import torch
import triton
import triton.language as tl

import weft
import weft.check
from tests.ops.cases import BF16, COLLECTIVES, FP32, OPERATIONS, Case, check, inputs_of
from tests.ops.closeness import assert_identical
from weft import ops
from weft.errors import TeamClosed
from weft.ops import dispatch
from weft.plan import table as tuned
from weft.runtime import capabilities
from weft.transport import push
from weft.transport.plans import Plan


def run_cases(team, cases: Iterable[Case], calls: int = 3):
    """Every case ``calls`` times, all on one team and without a host barrier between; then everything is checked."""
    results = []
    for case in cases:
        for call in range(calls):
            inputs = inputs_of(case, team.rank, call)
            results.append((case, call, OPERATIONS[case.op].run(case, team, *inputs)))
    for case, call, result in results:
        check(case, team.rank, call, result)
    return results


def check_replicated(by_rank):
    """Ops that give all ranks the same give them the same bits."""
    for others in by_rank[1:]:
        for (case, call, first), (_, _, other) in zip(by_rank[0], others, strict=True):
            if OPERATIONS[case.op].replicated:
                assert_identical(other, first, what=f"{case} call {call}, another rank")


def interleaved(world_size, dtypes=(BF16, FP32)):
    """Calls of different ops and sizes that share a workspace, large after small and small after large."""
    for dtype in dtypes:
        for length, algorithm in (
            (7, "one_shot"),
            (6000, "two_shot"),
            (300, "two_shot"),
            (5000, "one_shot"),
            (64, "auto"),
        ):
            yield Case(op="all_reduce", world_size=world_size, dtype=dtype, shape=(length,), algorithm=algorithm)
            yield Case(op="reduce_scatter", world_size=world_size, dtype=dtype, shape=(world_size, length // 3))
            yield Case(op="all_gather", world_size=world_size, dtype=dtype, shape=(length // 2,))


@pytest.mark.parametrize("op", sorted({case.op for case in COLLECTIVES}))
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_table(world_size, op):
    cases = [case for case in COLLECTIVES if case.op == op and case.world_size == world_size]
    check_replicated(weft.simulate(run_cases, world_size, seed=world_size, args=(cases,)))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("world_size", "slow"), [(2, {1: 20.0}), (3, None), (4, {0: 20.0})])
def test_mixed_sizes_back_to_back(world_size, slow, seed):
    cases = list(interleaved(world_size, (BF16,) if seed else (BF16, FP32)))
    check_replicated(weft.simulate(run_cases, world_size, seed=seed, slow=slow, args=(cases, 2)))


def test_more_tiles_than_programs():
    """Two programs a rank go round many times in one launch."""
    case = Case(op="all_reduce", world_size=2, dtype=BF16, shape=(9000,), algorithm="two_shot")
    gather = Case(op="all_gather", world_size=2, dtype=FP32, shape=(11000,))
    check_replicated(weft.simulate(run_cases, 2, sms=2, args=([case, gather, case],)))


def test_the_same_bits_from_run_to_run():
    case = Case(op="all_reduce", world_size=4, dtype=BF16, shape=(3000,), algorithm="two_shot")
    first, second = (weft.simulate(run_cases, 4, seed=seed, args=([case], 1)) for seed in (11, 12))
    assert_identical(first[0][0][2], second[0][0][2])


def test_every_bit_pattern_arrives():
    """Words that read as "unwritten", and the words that the keys of such tiles would make so."""

    def main(team):
        unwritten = torch.tensor([-(2**31), -(2**31) + 1, -(2**31) + 2, 0, 7], dtype=torch.int32)
        halves = torch.tensor([-(2**15), -(2**15) + 1, 5], dtype=torch.int16)
        byte = torch.arange(-128, 127, dtype=torch.int8)
        return [(x, ops.all_gather(x, team)) for x in (unwritten, halves, byte) for _ in range(3)]

    for results in weft.simulate(main, 2, seed=3):
        for x, gathered in results:
            assert torch.equal(gathered, torch.cat([x, x]))


def test_barrier_orders_streams():
    """What a rank stored before the barrier is there after it."""

    def main(team):
        box = team.zeros((team.size,), torch.int32)
        seen = []
        for turn in range(3):
            for peer in range(team.size):
                team.at_peer(box, peer)[team.rank] = turn * 10 + team.rank
            ops.barrier(team)
            seen.append(box.tolist())
            ops.barrier(team)
        return seen

    for seen in weft.simulate(main, 3, seed=5, slow={2: 10.0}):
        assert seen == [[turn * 10 + r for r in range(3)] for turn in range(3)]


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
    assert (small.algorithm, small.transport) == ("one_shot", "lamport")
    assert f"163,840 bytes <= {dispatch.ONE_SHOT_LIMIT[4]:,}" in small.reason
    large = ops.explain("all_reduce", (4096, 5120), BF16, 4)
    assert large.algorithm == "two_shot" and large.plan.row_bytes > small.plan.row_bytes
    assert ops.explain("all_reduce", (4096, 5120), BF16, 4, algorithm="one_shot").algorithm == "one_shot"
    assert ops.explain("all_reduce", (16,), BF16, 1).algorithm == "copy"
    assert ops.explain("all_gather", (16,), BF16, 6).transport == "keyed"
    assert ops.explain("all_gather", (3,), torch.int8, 6).transport == "lamport"
    for op, sizes in (("all_reduce", {"shape": (4,)}), ("gemm", {"M": 1, "N": 1, "K": 1})):
        with pytest.raises(ValueError, match="is for float16, bfloat16, float32, not int32"):
            ops.explain(op, dtype=torch.int32, world_size=4, **sizes)
    with pytest.raises(ValueError, match="all_gather is for elements of 1, 2, 4 or 8 bytes, not complex128"):
        ops.explain("all_gather", (4,), torch.complex128, 4)
    with pytest.raises(ValueError, match="op='broadcast' is not one of"):
        ops.explain("broadcast", (16,), BF16, 4)


@pytest.mark.parametrize(
    "stages, algorithm, clean",
    [
        (6, "two_shot", True), (5, "two_shot", False), (5, "one_shot", True), (4, "one_shot", False),
        (5, "gather", True), (4, "gather", False),
    ],
)  # fmt: skip
def test_the_orders_of_sends_need_as_many_stages_as_the_proof_says(monkeypatch, stages, algorithm, clean):
    """weft.transport.push: a peer one tile ahead reuses a stage that is not cleared yet, with one stage less."""

    def main(team):
        generator = torch.Generator().manual_seed(team.rank)
        x = torch.randn(256 * 8, generator=generator).bfloat16()
        if algorithm == "gather":
            return [ops.all_gather(x, team) for _ in range(3)]
        return [ops.all_reduce(x, team, algorithm) for _ in range(3)]

    monkeypatch.setattr(push, "STAGES", tl.constexpr(stages))
    report = weft.check.check(main, 2, schedules=4, sms=1, heap_bytes=None)
    assert report.ok is clean
    assert clean or "race" in {f.kind for found in report.findings for f in (found.finding, *found.also)}


@triton.jit
def never(slot, exchanges, WIDTH: tl.constexpr):
    return exchanges < 0


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_to_all", "one_shot", "two_shot"])
@pytest.mark.parametrize(("row_bytes", "most"), [(512, 4), (4096, 16)])
def test_a_launch_of_few_tiles_need_not_see_its_clearings(monkeypatch, op, row_bytes, most):
    """weft.transport.push: up to three exchanges less than there are stages. With one more, `weft check` finds a clearing that
    comes too late; what the kernels do of their own accord, it finds clean."""
    name = "all_reduce" if "shot" in op else op
    module, each = importlib.import_module(getattr(weft.ops, name).__module__), 2 if op == "two_shot" else 1
    plan = Plan(transport="lamport", row_bytes=row_bytes, num_warps=1, programs_per_sm=1)
    if name in ("all_gather", "all_to_all"):
        plan = dataclasses.replace(plan, transport="keyed")

    def main(team, sizes):
        generator = torch.Generator().manual_seed(team.rank)
        for tiles in sizes:
            parts = tiles * row_bytes // 2 * (1 if op in ("all_gather", "one_shot") else team.size)
            x = torch.randn(parts, generator=generator).bfloat16()
            module.run(x, team, op, plan) if name == "all_reduce" else module.run(x, team, plan)

    def findings(*sizes):
        report = weft.check.check(functools.partial(main, sizes=sizes), 2, schedules=3, sms=1, heap_bytes=None)
        return {finding.kind for found in report.findings for finding in (found.finding, *found.also)}

    few = most // each
    assert not findings(few + 1, 1, few, few + 2, few + 1)
    monkeypatch.setattr(module, "clears_in_order", never)
    assert not findings(few, 1, few, few, 1, 2, few)
    assert "overtaken" in findings(few + 1, few + 1, few + 1)


@pytest.mark.parametrize("world_size", [2, 3, 4, 8, 9])
def test_rows_of_all_plans_begin_on_lines(world_size):
    """A warp's stores to a peer go in whole packets: a stage is whole lines, keys and all."""
    line = push.LINE_BYTES.value
    keys = push.key_bytes("keyed", world_size)
    assert keys % line == 0 and keys >= world_size * push.KEY_BYTES.value
    assert push.key_bytes("lamport", world_size) == 0
    for table in (dispatch.ONE_CROSSING, dispatch.TWO_SHOT):
        assert all(row_bytes % line == 0 for _, row_bytes, _, _ in dispatch.of_world(table, world_size))


def test_a_stage_holds_its_rows_and_then_its_keys():
    def main(team):
        x = torch.arange(100, dtype=torch.int32) + 1000 * (team.rank + 1)
        ops.all_gather(x, team)
        plan = dispatch.choose("all_gather", x.nbytes, x.dtype, team.size, team.caps).plan
        slots = push.slots_of(team, plan, 4)
        stage = 3 * plan.row_bytes + push.LINE_BYTES.value
        assert slots.buffer.numel() == slots.programs * push.stages_of(plan.row_bytes) * stage
        assert slots.buffer.data_ptr() % push.LINE_BYTES.value == 0
        first = slots.buffer.view(torch.int32)[stage // 4 : 2 * stage // 4]  # epoch 1 of the first program
        rows, keys = first[: 3 * plan.row_bytes // 4].view(3, -1), first[3 * plan.row_bytes // 4 :].view(-1, 4)
        for peer in range(3):
            if peer != team.rank:
                assert torch.equal(rows[peer, :100] ^ keys[peer, 0], torch.arange(100) + 1000 * (peer + 1))

    weft.simulate(main, 3, seed=2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"transport": "flags"}, "transport='flags' is not one of 'lamport', 'keyed', 'none'"),
        ({"row_bytes": 40}, "row_bytes=40 is not a positive multiple of 16"),
        ({"row_bytes": 0}, "row_bytes=0 is not a positive multiple of 16"),
        ({"num_warps": 3}, "num_warps=3 is not a power of two"),
        ({"programs_per_sm": 0}, "programs_per_sm=0 is not positive"),
    ],
)
def test_plans_that_no_kernel_has_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Plan(**{"transport": "lamport", "row_bytes": 64, "num_warps": 1} | fields)


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_rows_that_would_overrun_the_workspace_are_refused(op):
    """48 bytes are sent as 64."""
    module, transport = (
        importlib.import_module(getattr(weft.ops, op).__module__),
        "lamport" if "reduce" in op else "keyed",
    )
    plan = Plan(transport=transport, row_bytes=48, num_warps=1)

    def main(team):
        arguments = ("one_shot", plan) if op == "all_reduce" else (plan,)
        with pytest.raises(ValueError, match="row_bytes=48 is not a power of two: 64 bytes .* pass 64"):
            module.run(torch.ones(200), team, *arguments)

    weft.simulate(main, 2)


@pytest.mark.parametrize("stale", [{"stages": 4}, {"transport": None}, {"algorithm": None}])
def test_a_tuned_row_of_another_version_says_to_tune_again(monkeypatch, tmp_path, stale):
    path = tuned.file_for("Some GPU", 4, tmp_path)
    monkeypatch.setattr(tuned, "file_for", lambda gpu, world_size: path)
    fields = {"algorithm": "two_shot", "transport": "lamport", "row_bytes": 512, "num_warps": 1, "programs_per_sm": 4}
    fields = {name: value for name, value in (fields | stale).items() if value is not None}
    row = tuned.Row(op="all_reduce", dtype="bfloat16", shape=(1 << 20,), config=fields, us=1.0)
    tuned.write(path, tuned.Table(gpu="Some GPU", world_size=4, rows=(row,)))
    caps = dataclasses.replace(capabilities.simulated(4, 132), device_name="Some GPU", arch="sm_90")
    with pytest.raises(ValueError, match=r"tuned row all_reduce bfloat16 1048576 does not fit .*; run weft tune again"):
        dispatch.choose("all_reduce", 1 << 20, BF16, 4, caps)
