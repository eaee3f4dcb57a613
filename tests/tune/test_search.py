"""The search on simulated ranks: all ranks go one way, whatever goes wrong on one of them."""

import dataclasses
import functools
import threading
import types

import pytest
import torch

import weft
from weft.bench.harness import compiling
from weft.bench.harness.bench import Bench, Options
from weft.bench.harness.report import Row
from weft.bench.ops.problem import OpProblem
from weft.bench.ops.shapes import Shape, op_of
from weft.bench.ops.workload import OpWorkload
from weft.errors import WeftError
from weft.ops.collectives.space import QUICK_PUSHES
from weft.ops.gemm.gemm_op import GemmCall
from weft.ops.gemm.matmul import MATMUL, Persistent
from weft.ops.gemm.tile import Tile
from weft.ops.overlap.matmul_reduce_scatter import MATMUL_REDUCE_SCATTER
from weft.plan import table as tuned
from weft.plan.planned import machine
from weft.runtime import capabilities
from weft.tune import search, spaces, timing
from weft.tune.search import TunePlan

pytestmark = pytest.mark.skipif(torch.cuda.device_count() > 0, reason="for machines without a GPU")
STATE = threading.local()


def shapes(*sizes):
    return tuple(Shape(size=size, label="x".join(map(str, size))) for size in sizes)


def run(plan, world_size=2):
    """(outcomes by rank, lines that rank 0 said)."""
    lines = []
    found = weft.simulate(search.search, world_size, args=((plan,), lines.append))
    return [outcomes for (outcomes,) in found], lines


def without_room(outcome):
    """Dropped candidates for another reason than the heap: times of virtual ranks may lead to ones that it does not hold."""
    return [(name, reason) for name, reason in outcome.dropped if "Make it larger: heap_bytes=" not in reason]


@pytest.fixture
def calls(monkeypatch):
    """[(rank, label, whether it was compiled only)], in order."""
    made, call = [], OpProblem.call

    def recorded(problem, tensors, design):
        compiled = getattr(STATE, "compiling", False)
        made.append((problem.team.rank, spaces.label(problem.op, design), compiled))
        return None if compiled else call(problem, tensors, design)

    def compile_only(action, team):
        STATE.compiling = True
        try:
            action()
        finally:
            STATE.compiling = False

    monkeypatch.setattr(OpProblem, "call", recorded)
    monkeypatch.setattr(compiling, "compile_only", compile_only)
    return made


@pytest.fixture
def failing(monkeypatch, calls):
    """failing(action): action(rank, label, compiled, out) may raise, or give another answer."""

    def use(action):
        recorded = OpProblem.call

        def call(problem, tensors, design):
            compiled, name = getattr(STATE, "compiling", False), spaces.label(problem.op, design)
            if not compiled:
                action(problem.team.rank, name, compiled, None)
            out = recorded(problem, tensors, design)
            return action(problem.team.rank, name, compiled, out)

        monkeypatch.setattr(OpProblem, "call", call)

    return use


def test_all_ranks_try_the_same_the_same_number_of_times(calls):
    found, lines = run(TunePlan(op="all-reduce", shapes=shapes((96,), (240,)), quick=True), 3)
    assert found[0] == found[1] == found[2]
    by_rank = [[call[1:] for call in calls if call[0] == rank] for rank in range(3)]
    assert by_rank[0] == by_rank[1] == by_rank[2]
    for outcome in found[0]:
        first = 2 * len(QUICK_PUSHES)  # the default is one of them
        # Then three fields of the best so far, up and down. It need not be the one that is chosen at last.
        assert first < outcome.tried <= first + 6
        assert outcome.row.design in ("one_shot", "two_shot")
        assert 0 < outcome.row.us <= outcome.row.default_us
        assert without_room(outcome) == []
    assert [line.split(":")[0] for line in lines] == ["all-reduce 96", "all-reduce 240"]


def test_a_candidate_that_does_not_compile_on_one_rank_is_launched_on_none(calls, failing):
    def action(rank, label, compiled, out):
        if compiled and rank == 1 and label.startswith("two_shot transport=lamport row_bytes=512 "):
            raise RuntimeError("out of resource: shared memory")
        return out

    failing(action)
    found, _ = run(TunePlan(op="all-reduce", shapes=shapes((96,)), quick=True))
    (outcome,) = found[0]
    assert found[0] == found[1]
    ((name, reason),) = without_room(outcome)
    assert name.startswith("two_shot transport=lamport row_bytes=512 ")
    assert reason == "rank 1: RuntimeError: out of resource: shared memory"
    assert sorted(call for call in calls if call[1] == name) == [(0, name, True), (1, name, True)]
    assert outcome.row is not None
    assert outcome.row.candidates == outcome.tried - len(outcome.dropped)


def test_a_wrong_answer_on_one_rank_drops_it_everywhere(failing):
    def action(rank, label, compiled, out):
        if out is not None and rank == 1 and label == "sequential":
            out.view(-1)[0] += 1
        return out

    failing(action)
    found, _ = run(TunePlan(op="gemm-rs", shapes=shapes((32, 48, 32)), quick=True))
    assert found[0] == found[1]
    (outcome,) = found[0]
    assert [name for name, _ in outcome.dropped] == ["sequential"]
    assert "wrong answer: rank 1" in outcome.dropped[0][1]
    assert outcome.row.design in ("fused", "pipelined")


def test_a_candidate_that_fails_on_all_ranks_is_dropped_and_the_search_goes_on(failing):
    def action(rank, label, compiled, out):
        if not compiled and out is None and label != "pipelined":
            raise ValueError("too many programs")
        return out

    failing(action)
    found, lines = run(TunePlan(op="gemm-ar", shapes=shapes((5, 24, 16)), quick=True))
    (outcome,) = found[0]
    assert outcome.winner == "pipelined"
    assert outcome.row.default_us is None
    assert {reason for _, reason in outcome.dropped} == {"too many programs"}
    assert "dropped" in lines[0]


def test_no_candidate_at_all_is_an_outcome_with_a_reason(failing):
    def action(rank, label, compiled, out):
        raise ValueError("nothing runs here")

    failing(action)
    found, lines = run(TunePlan(op="gemm", shapes=shapes((5, 24, 16)), quick=True))
    assert found[0] == found[1]
    assert found[0][0].row is None
    assert lines[0].startswith("gemm 5x24x16: no candidate ran: nothing runs here")


def test_ranks_that_come_apart_end_the_search_and_leave_what_was_found(tmp_path, failing):
    """Rank 1 fails where rank 0 has launched: no agreement can help rank 0's kernel any more."""
    second = []

    def action(rank, label, compiled, out):
        if not compiled and out is None and rank == 1 and second:
            raise RuntimeError("lost")
        return out

    failing(action)
    file = tmp_path / "x.json"
    plan = TunePlan(op="all-reduce", shapes=shapes((96,), (2048,)), quick=True, out=file)
    with pytest.raises(WeftError, match=r"rank 0|deadlock"):
        weft.simulate(search.search, 2, args=((plan,), second.append))
    assert [row.shape for row in tuned.read(file).rows] == [(96,)]


def test_the_default_stays_unless_it_is_beaten():
    def main(team):
        return search.agreed(team, {"default": 10.0, "other": 9.95}, "default"), search.agreed(
            # Times are exchanged, so they are equal; rank 0 decides all the same.
            team, {"default": 10.0, "other": 9.0 + 2 * team.rank}, "default",
        )  # fmt: skip

    assert weft.simulate(main, 2) == [(("default", 10.0), ("other", 9.0))] * 2


def test_the_fastest_are_timed_once_more_beside_the_default(monkeypatch):
    """Of many candidates one reads fast by luck: what it reads beside the default counts."""
    rounds = [[], []]
    label_of = functools.partial(spaces.label, MATMUL_REDUCE_SCATTER)

    def measured(bench, entrants):
        mine = rounds[bench.team.rank]
        mine.append([label_of(design) for design in entrants])
        fused = next(label for label in mine[0] if label.startswith("fused"))
        us = {"pipelined": 1.0, fused: 7.0} if len(mine) == 1 else {"pipelined": 30.0}
        return {design: us.get(label_of(design), 10.0) for design in entrants}

    monkeypatch.setattr(timing, "measured", measured)
    found, _ = run(TunePlan(op="gemm-rs", shapes=shapes((32, 48, 32)), quick=True))
    (outcome,) = found[0]
    assert rounds[0] == rounds[1]
    assert len(rounds[0]) == 2
    assert [label.split()[0] for label in rounds[0][1]] == [outcome.default, "pipelined", "fused"]
    assert (outcome.winner, outcome.row.us) == (outcome.default, 10.0)
    assert (outcome.row.default_us, outcome.row.candidates) == (10.0, len(rounds[0][0]))


def test_collectives_are_compared_alone_and_in_a_row_where_all_were():
    alone = [Row(shape=(4,), label="x", provider="x", role="weft", median_us=us) for us in (8.0, 9.0)]
    in_a_row = [dataclasses.replace(row, chain_us=us) for row, us in zip(alone, (4.5, 4.0), strict=True)]
    assert timing.deciding(alone) == [8.0, 9.0]
    assert timing.deciding(in_a_row) == pytest.approx([6.0, 6.0])
    assert timing.deciding([in_a_row[0], alone[1]]) == [8.0, 9.0]


def test_times_of_a_warm_gpu_are_compared_by_the_default(monkeypatch):
    """Two groups and a second round, in each of which all is slower than in the one before."""
    passes = []

    def measured(bench, entrants):
        passes.append(len(entrants))
        slow = 1 + 0.5 * len(passes)
        us = {design: 10.0 if design == designs[0] else 8.0 if design == designs[3] else 9.0 for design in entrants}
        return {design: time * slow for design, time in us.items()}

    def main(team):
        problem = OpProblem(op_of("gemm"), shapes((5, 24, 16))[0], "bf16", team)
        bench = Bench(team, OpWorkload(name="gemm", shapes=(), words=("weft",)), Options(), None)
        return [timing.timed(bench, problem, designs, reference)[0] for reference in (None, 20.0)]

    tiles = [Tile(block_m=16, block_n=16, block_k=16, group=group) for group in range(1, 6)]
    designs = [Persistent(tile=tile) for tile in tiles]
    monkeypatch.setattr(timing, "measured", measured)
    monkeypatch.setattr(timing, "TOGETHER", 2)
    ((first, second),) = weft.simulate(main, 1)
    assert passes == [4, 3, 3] * 2
    assert list(first.values()) == pytest.approx([15.0, 13.5, 13.5, 12.0, 13.5])
    assert list(second.values()) == pytest.approx([20.0, 18.0, 18.0, 16.0, 18.0])


def test_large_results_are_timed_in_smaller_groups():
    def together(op, *size, replicas=2):
        shape = Shape(size=size, label="")
        problem = types.SimpleNamespace(op=op_of(op), shape=shape, dtype=torch.bfloat16, replicas=replicas)
        problem.result_bytes = OpProblem.result_bytes.fget(problem)
        return timing.most_together(problem)

    assert together("all-reduce", 1 << 28) == together("gemm-rs", 4096, 5120, 6400) == timing.TOGETHER
    assert together("gemm", 16384, 57344, 8192) == 6  # 1.9 GB twice: eight in 32 GB, two of which are in every group
    assert together("gemm", 1 << 20, 1 << 20, 64) == 1


def test_shapes_that_differ_in_k_alone_get_rows_that_agree():
    """Fused is best for the one and pipelined for the other: together pipelined costs less, each with its own streams."""
    op = MATMUL_REDUCE_SCATTER
    fused = op.designs["fused"](tile=Tile(block_m=128, block_n=128, block_k=64))
    one, two = (op.designs["pipelined"](streams=streams) for streams in (1, 2))

    def outcome(k, times):
        best = min(times, key=times.get)
        row = tuned.Row(
            op="matmul_reduce_scatter",
            dtype="bfloat16",
            shape=(1024, 5120, k),
            design=op.name_of(best),
            config=op.config_of(best),
            us=times[best],
        )
        return search.Outcome(label=str(k), row=row, winner=spaces.label(op, best), times=times)

    alone = outcome(6400, {fused: 100.0, one: 104.0, two: 103.0})
    found = search.reconciled([alone, outcome(2048, {fused: 70.0, one: 60.0, two: 66.0})])
    assert [(found.row.design, found.row.config["streams"], found.row.us) for found in found] == [
        ("pipelined", 2, 103.0),
        ("pipelined", 1, 60.0),
    ]
    assert search.reconciled([alone]) == [alone]


def test_everything_that_is_chosen_has_candidates():
    """Few rows too, with the variants of a decode step: the design that calls get now is among them."""
    caps = dataclasses.replace(capabilities.simulated(4), is_simulated=False)
    for word, size in (
        ("gemm", (16, 12800, 5120)),
        ("gemm+partials", (128, 5120, 2048)),
        ("gemm+deferred_norm+partials", (32, 2560, 5120)),
        ("gemm-silu+deferred_norm", (16, 6400, 5120)),
        ("all-reduce-rms-norm", (16, 5120)),
        ("gemm-ar", (4096, 5120, 6400)),
        ("ag-gemm+local_first", (4096, 12800, 5120)),
        ("paged-attention", (32, 1024, 128)),
        ("decode-attention", (2, 16384, 64)),
        ("paged-prefill-attention", (4, 1000, 128)),
    ):
        alias, variants = spaces.parse(word)
        op, here = op_of(alias), machine(caps, 4)
        call = op.call_of_case(op.case_of(size, torch.bfloat16, 4, **dict.fromkeys(variants, True)), here)
        found = list(op.space(call, here))
        assert len(set(found)) > 5, word
        assert {op.name_of(design) for design in found} <= set(op.designs)
        key, shape, _ = op.table_key(call, here)
        assert key == "+".join([op.name, *variants]) or "local_first" in variants
        assert tuned.row_shape(op.plan(call, here).name, shape) == shape == size
    with pytest.raises(ValueError, match="gemm has the variants deferred_norm, partials, not 'own_first'|local_first"):
        spaces.parse("gemm+own_first")


def test_ops_of_experts_are_searched_by_what_their_plans_depend_on():
    """The key of a row has the rows of a tile, not the shape of the whole layer."""
    caps = dataclasses.replace(capabilities.simulated(4), is_simulated=False)
    few, many = (8, 8, 128, 64, 2048, 768, 0), (4096, 8, 128, 64, 2048, 768, 1)
    for word, size, expected in (
        ("grouped-gemm-silu", few, ("grouped_matmul_silu_mul", (64, 16, 768, 2048), 1)),
        ("grouped-gemm-silu", many, ("grouped_matmul_silu_mul", (32768, 128, 768, 2048), 1)),
        ("grouped-gemm", many, ("grouped_matmul", (32768, 128, 2048, 768), 1)),
        ("grouped-gemm+gather", few, ("grouped_matmul+gather", (64, 16, 2048, 768), 1)),
        ("moe-dispatch", many, ("moe_dispatch", (4096, 8, 2048), 2)),
        ("moe-combine", few, ("moe_combine", (8, 8, 2048), 2)),
    ):
        alias, variants = spaces.parse(word)
        op, here = op_of(alias), machine(caps, 2)
        case = op.case_of(size, torch.bfloat16, 2, **dict.fromkeys(variants, True))
        call = op.call_of_case(case, here)
        assert op.table_key(call, here) == expected
        quick, found = list(op.space(call, here, True)), list(op.space(call, here))
        assert 2 <= len(set(quick)) < len(set(found)), word
        assert {op.name_of(design) for design in found} <= set(op.designs)
        around = list(op.around(found[-1], here))
        assert len(set(around)) == len(around) >= 4
        for design in around:
            assert sum(getattr(design, name) != getattr(found[-1], name) for name in op.config_of(design)) == 1


def test_a_variant_has_its_own_inputs_and_answer():
    def main(team):
        for word in ("gemm+partials", "gemm+deferred_norm", "gemm-silu+deferred_norm", "ag-gemm+own_first"):
            alias, variants = spaces.parse(word)
            shape = shapes((16, 32, 256))[0]
            problem = OpProblem(op_of(alias), shape, "bf16", team, **dict.fromkeys(variants, True))
            for design in spaces.first(problem, True)[:4]:
                out = problem.call(problem.sets[0], design)
                assert not problem.judge(out).wrong, (word, design)
                assert problem.judge(out * 1.5).wrong
        return True

    assert all(weft.simulate(main, 2))


def test_neighbours_move_one_field_within_what_the_design_allows():
    op, four = MATMUL_REDUCE_SCATTER, machine(capabilities.simulated(4), 4)
    tile = Tile(block_m=128, block_n=256, block_k=16, num_warps=8, group=1)
    best = op.designs["fused"](tile=tile, piece=8192)
    found = list(op.around(best, four))
    assert len(found) == len(set(found))
    for design in found:
        one, other = flat(design), flat(best)
        assert len([name for name in one if one[name] != other[name]]) == 1
    assert {design.piece for design in found} == {4096, 8192}
    assert {design.tile.block_k for design in found} == {16, 32}
    assert list(op.around(best, four, quick=True)) == []
    gemm = MATMUL.plan(GemmCall(16, 16, 16, torch.bfloat16), four)
    assert list(op.around(op.designs["sequential"](gemm=gemm), four)) == []
    for world_size, span, spans, accumulate in (
        (2, 1, {1}, {False, True}),
        (3, 2, {1, 2}, {False}),
        (8, 2, {1, 2, 4}, {False}),
    ):
        here = machine(capabilities.simulated(world_size), world_size)
        moved = list(op.around(op.designs["pipelined"](span=span), here))
        assert {design.span for design in moved} == spans
        assert {design.accumulate for design in moved} == accumulate


def flat(design):
    fields = dataclasses.asdict(design)
    return fields.pop("tile") | fields
