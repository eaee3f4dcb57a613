"""`weft bench --regret`: its shapes and designs without GPUs, its choice by fake times, its file, the command."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import typer
from typer.testing import CliRunner

from weft.bench.command import command as bench
from weft.bench.harness.workload import DTYPES
from weft.bench.names import REGRET, VARIED
from weft.bench.ops.shapes import op_of
from weft.bench.regret import measure
from weft.bench.regret.command import RegretFlags, workloads
from weft.bench.regret.file import Kept, read, summary, write
from weft.bench.regret.measure import Row, best_of, candidates, halves
from weft.bench.regret.published import DENSE, EXPERTS, LISTED_DENSE, LISTED_EXPERTS, drawn, listed, planned_ops
from weft.console import logged
from weft.ops.op import registered
from weft.plan.planned import machine
from weft.runtime import capabilities

pytestmark = pytest.mark.skipif(torch.cuda.device_count() > 0, reason="for machines without a GPU")
app = typer.Typer(pretty_exceptions_enable=False)
app.command("bench")(logged(bench))
OPS = tuple(planned_ops())


def test_thirty_pairs_are_listed_of_each_kind_of_model():
    for pairs, models in ((LISTED_DENSE, DENSE), (LISTED_EXPERTS, EXPERTS)):
        assert len(set(pairs)) == 30 and {name for name, _ in pairs} <= models.keys()


def test_every_op_that_plans_and_has_shapes_is_taken():
    assert {op.alias for op in registered() if op.form and op.sizes and not op.no_plan} == set(OPS)
    assert {name.partition("+")[0] for name in REGRET} == set(OPS) and {*VARIED, *OPS} == set(REGRET)


@pytest.mark.parametrize("world_size", [1, 2])
def test_without_an_op_the_ops_of_one_rank_or_the_collective_ones_are_taken(world_size):
    here, flags = machine(capabilities.simulated(world_size), world_size), RegretFlags(regret=True, listed=1, drawn=0)
    made = workloads(flags, dict.fromkeys(REGRET, ()), "bf16", here, every=True)
    assert {one.name for one in made} == {one for one in REGRET if op_of(one).collective == (world_size > 1)}


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("alias", OPS)
def test_every_shape_plans_without_a_row_and_every_legal_design_is_named(alias, world_size):
    op, here = op_of(alias), machine(capabilities.simulated(world_size), world_size)
    first = listed(op, here, "bf16", {})
    more = drawn(op, here, "bf16", {}, 1, 30, first)
    assert (len(first), len(more)) == (30, 30) and len({shape.size for shape in (*first, *more)}) == 60
    assert more == drawn(op, here, "bf16", {}, 1, 30, first) != drawn(op, here, "bf16", {}, 2, 30, first)
    for shape in (*first, *more):
        case = op.case_of(shape.size, DTYPES["bf16"], world_size)
        designs, reason, refused = candidates(op, case, here, search=2)
        auto = op.plan(op.call_of_case(case, here), here)
        assert auto.row is None and reason == auto.reason and next(iter(designs)) == auto.design
        names = {op.name_of(design) for design in designs} | refused.keys()
        # A named design may be another one at this shape: all of one rank are a copy.
        for name in filter(lambda name: op.offers(name, ()), op.algorithms[1:]):
            asked = replace(case, design=name)
            assert name in refused or op.plan(op.call_of_case(asked, here), here).name in names
        assert len(set(designs.values())) == len(designs)


def test_the_best_design_is_chosen_in_one_half_and_timed_in_the_other():
    times = {"auto": (10.0, 10.0), "lucky": (9.0, 12.0), "slow": (20.0, 5.0)}
    assert best_of(times, "auto") == ("lucky", 10.0, 12.0)
    assert best_of({"auto": (9.0, 10.0), "equal": (9.0, 1.0)}, "auto") == ("auto", 10.0, 10.0)


class FakeMeter:
    """Meter whose rounds take given times, of two calls each."""

    def __init__(self, rounds):
        self.rounds, self.last = iter(rounds), None

    def replay(self):
        self.last = next(self.rounds)

    def samples(self):
        return [self.last, self.last]


def test_rounds_are_halved_and_the_slowest_rank_counts(monkeypatch):
    monkeypatch.setattr(measure, "ROUNDS", 2)
    entrants = {
        name: SimpleNamespace(single=FakeMeter(single), chain=FakeMeter(chain))
        for name, single, chain in (("a", [4, 9, 4, 9, 4], [1] * 5), ("b", [16] * 5, [1, 4, 1, 4, 1]))
    }
    for entrant in entrants.values():
        entrant.meters = lambda one=entrant: [one.single, one.chain]
    peer = [(16.0, 4.0), (1.0, 1.0), (1.0, 1.0), (1.0, 1.0)]
    bench = SimpleNamespace(
        team=SimpleNamespace(is_simulated=False, exchange=lambda mine: [mine, peer]),
        round=lambda timed: [meter.replay() for meter in timed],
        rounds=lambda timed: 3,
    )
    assert halves(bench, entrants) == {"a": (4.0, 3.0), "b": (4.0, 8.0)}


ROW = Row(
    op="moe-combine", shape=(128, 4, 128, 64, 2880, 2880, 0), label="gpt-oss-120b T=128", world_size=2, dtype="bf16",
    auto="push", reason="a rule", best="sum_then_scatter", auto_us=22.0, best_us=20.0,
    us={"push": (21.0, 22.0), "sum_then_scatter": (19.0, 20.0)}, dropped={"lamport": "wrong answer"},
)  # fmt: skip


def test_a_file_keeps_its_rows_and_a_damaged_one_is_named(tmp_path):
    file = tmp_path / "regret.json"
    assert read(file) == []
    kept = [Kept(gpu="NVIDIA H200", versions="weft 0.1.0", row=ROW)]
    write(file, kept)
    assert read(file) == kept and json.loads(file.read_text())["rows"][0]["auto"] == "push"
    for text in ("{", "[]", '{"schema": 2, "rows": []}', '{"schema": 1, "rows": [{"gpu": 1}]}'):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"regret\.json: not a file of weft bench --regret"):
            read(file)


def test_a_summary_has_the_geometric_mean_and_the_worst_row():
    even, lost = replace(ROW, auto_us=20.0), replace(ROW, auto_us=None, best_us=None, reason="it does not fit")
    (line,) = summary([ROW, even, lost])
    assert line.startswith(
        "moe-combine W=2: 2 shapes, geometric mean 1.049, 0 above 1.10, worst 1.100: gpt-oss-120b T=128"
    )
    assert line.endswith("sum_then_scatter 20; 1 without a time")
    assert summary([lost]) == ["moe-combine W=2: no shape was measured; 1 without a time"]


def test_the_command_lists_plans_and_goes_on_where_the_file_ends(tmp_path):
    def run(*words):
        return CliRunner().invoke(app, ["--regret", *words, "--world-size", "2"])

    shown = run("all-gather", "--check-only", "--listed", "2", "--drawn", "1")
    assert shown.exit_code == 0 and shown.output.startswith("all-gather W=2 bf16, NVIDIA H200: 3 shapes")
    assert shown.output.count("against copy_engine") == 3
    file = tmp_path / "r.json"
    words = ["all-gather@1KiB,2KiB", "--device", "sim", "--search", "0", "--json", str(file)]
    first = run(*words, "--seconds", "1e-9")
    assert first.exit_code == 0 and len(read(file)) == 0
    assert run(*words).exit_code == 0
    rows = read(file)
    assert [kept.row.shape for kept in rows] == [(1024,), (2048,)] and all(kept.gpu == "simulated" for kept in rows)
    again = run(*words)
    assert again.exit_code == 0 and read(file) == rows and "all-gather W=2: 2 shapes, geometric mean" in again.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["all-gather"], "takes GPUs; pass --check-only"),
        (["route", "--check-only"], "'route' has no designs to choose from"),
        (["model", "--check-only"], "'model' has no designs to choose from"),
        (["all-gather", "--listed", "31"], "--listed=31 is not an integer in 0 .. 30"),
        (["all-gather", "--seconds", "0"], "--seconds 0.0 is not positive"),
        (["all-gather", "--out", "x"], "--out does not go with --regret"),
        (["all-gather", "--providers", "weft"], "--providers does not go with --regret"),
        (["all-gather", "--one-by-one"], "--one-by-one does not go with --regret"),
    ],
)
def test_flags_that_do_not_fit_are_refused(words, message):
    result = CliRunner().invoke(app, ["--regret", *words])
    assert result.exit_code != 0 and message in result.output
