"""The search in a warm-up, with a fake timer: ranks agree, the budget holds, and what is kept never makes a start fail."""

import dataclasses
import json
import logging
import random

import pytest
import torch

import weft
from weft.bench.harness import meters
from weft.bench.models.steps import TINY_CONFIG
from weft.engine.config import EngineConfig
from weft.engine.runner import Runner
from weft.models import Decoder
from weft.ops.gemm.gemm_op import GemmCall
from weft.ops.gemm.matmul import MATMUL
from weft.ops.op import find_op
from weft.plan import searched, table
from weft.plan.planned import machine
from weft.runtime import capabilities
from weft.tune import search, timing, warm_search
from weft.tune.engine_search import search_passes
from weft.tune.warm_search import Pass

pytestmark = pytest.mark.skipif(torch.cuda.device_count() > 0, reason="for machines without a GPU")
SHAPES = ((5, 24, 16), (64, 24, 16), (5, 48, 16))


@pytest.fixture(autouse=True)
def no_rows(monkeypatch):
    """No rows of earlier tests, and none afterwards."""
    monkeypatch.setattr(table, "_searched", {})
    table.forget()
    yield
    table.forget()


@pytest.fixture
def timed(monkeypatch):
    """Labels that were timed together, by rank. Meters read other times on each rank."""
    made, draws, measured = {}, {}, timing.measured

    def recorded(bench, entrants):
        made.setdefault(bench.team.rank, []).append([entrant.row.provider for entrant in entrants.values()])
        return measured(bench, entrants)

    def samples(meter):
        draw = draws.setdefault(meter._team.rank, random.Random(meter._team.rank))
        return [draw.uniform(1.0, 9.0)]

    monkeypatch.setattr(timing, "measured", recorded)
    monkeypatch.setattr(meters.HostMeter, "samples", samples)
    return made


class Clock:
    """Seconds that pass by one at each look, on each rank by itself."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


def passes(team, shapes=SHAPES):
    here = machine(team.caps, 1)
    return [Pass(f"{s}", s[0], lambda s=s: MATMUL.plan(GemmCall(*s, torch.float32), here)) for s in shapes]


def start(folder, seconds=1e9, shapes=SHAPES, world_size=2):
    """Results of a start by rank, and the design that each rank then plans for each shape."""

    def main(team):
        made = warm_search.warm_search(
            team, passes(team, shapes), None, seconds=seconds, folder=folder, clock=Clock(), say=lambda line: None
        )
        here = machine(team.caps, 1)
        return made, [MATMUL.plan(GemmCall(*s, torch.float32), here) for s in shapes]

    return weft.simulate(main, world_size)


def restart(folder, **options):
    """``start`` as in a new process."""
    table._searched.clear()
    table.forget()
    return start(folder, **options)


NO_TIME = 0.5
KEPT = {}


@pytest.fixture
def kept(tmp_path, timed):
    """File of a search of all SHAPES, which is made once."""
    if not KEPT:
        start(tmp_path)
        [file] = tmp_path.glob("*.json")
        KEPT[file.name] = file.read_text()
    [(name, text)] = KEPT.items()
    (tmp_path / name).write_text(text)
    return tmp_path / name


def test_ranks_agree_though_their_times_do_not(tmp_path, timed):
    of_ranks = start(tmp_path, world_size=3)
    assert timed[0] == timed[1] == timed[2]
    assert len({str(plans) for _, plans in of_ranks}) == 1
    made, plans = of_ranks[0]
    assert (made.calls, made.known, made.left) == (3, 0, 0)
    assert all(plan.row is not None for plan in plans)
    assert of_ranks[1][0].entries == made.entries


def test_the_second_start_searches_nothing_and_plans_the_same(tmp_path, timed):
    first = start(tmp_path)
    timed.clear()
    made, plans = restart(tmp_path)[0]
    assert (made.known, made.entries, timed) == (3, (), {})
    assert plans == first[0][1]


def test_the_budget_is_kept_and_the_next_start_goes_on(tmp_path, timed):
    made, _ = start(tmp_path, seconds=2)[0]
    assert len(made.entries) == 1
    assert made.left == 2
    # A batch of candidates that has begun is ended, its fastest timed once more, and no second batch begins.
    assert [len(labels) <= 2 + search.AT_ONCE for labels in timed[0]] == [True, True]
    made, _ = restart(tmp_path)[0]
    assert (made.known, len(made.entries), made.left) == (1, 2, 0)


def test_no_time_is_no_search(tmp_path, timed):
    made, _ = start(tmp_path, seconds=NO_TIME)[0]
    assert (made.entries, made.left, timed) == ((), 3, {})
    assert list(tmp_path.iterdir()) == []


def test_a_search_that_is_killed_leaves_what_it_found(tmp_path, timed, monkeypatch):
    measured, count = timing.measured, []

    def killed(bench, entrants):
        if bench.workload.shapes[0].size == SHAPES[2]:
            raise KeyboardInterrupt
        count.append(bench.team.rank)
        return measured(bench, entrants)

    monkeypatch.setattr(timing, "measured", killed)
    with pytest.raises(BaseException):  # noqa: B017, PT011  as the simulator hands it on
        start(tmp_path)
    assert count
    monkeypatch.setattr(timing, "measured", measured)
    made, _ = restart(tmp_path)[0]
    assert made.known == 2
    assert [entry.size for entry in made.entries] == [SHAPES[2]]


def test_a_call_without_a_candidate_is_not_searched_again(tmp_path, timed, monkeypatch):
    monkeypatch.setattr(timing, "timed", lambda *rest: ({}, [("any", "nothing runs here")]))
    made, plans = start(tmp_path, shapes=SHAPES[:1])[0]
    assert [entry.reason for entry in made.entries] == ["no candidate ran: nothing runs here"]
    assert plans[0].row is None
    made, _ = restart(tmp_path, shapes=SHAPES[:1])[0]
    assert (made.known, made.entries) == (1, ())


def damaged_text(text):
    return text[: len(text) // 2]


def of_another_gpu(text):
    return text.replace('"gpu": "NVIDIA H200"', '"gpu": "NVIDIA A100"', 1)


def of_another_version(text):
    return text.replace(f'"triton": "{weft_triton()}"', '"triton": "2.0.0"', 1)


def weft_triton():
    import triton

    return triton.__version__


def of_an_old_schema(text):
    return text.replace('"schema": 1', '"schema": 0', 1)


@pytest.mark.parametrize(
    "change", [damaged_text, of_another_gpu, of_another_version, of_an_old_schema, lambda _: "[3]"]
)
def test_a_damaged_or_foreign_file_is_one_warning_and_is_searched_again(change, kept, caplog):
    text = kept.read_text()
    kept.write_text(change(text))
    assert kept.read_text() != text
    with caplog.at_level(logging.WARNING):
        made, plans = restart(kept.parent, seconds=NO_TIME)[0]
    assert (made.known, made.left) == (0, 3)
    assert all(plan.row is None for plan in plans)
    [warning] = [record.getMessage() for record in caplog.records if "is ignored" in record.getMessage()]
    assert str(kept) in warning


def test_a_damaged_file_is_replaced(kept):
    kept.write_text(damaged_text(kept.read_text()))
    made, _ = restart(kept.parent, seconds=2)[0]
    assert len(made.entries) == 1
    assert len(searched.load(kept, json.loads(kept.read_text())["place"], warm_search.check_row)) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda line: line["row"].__setitem__("us", 0.5),
        lambda line: line["row"].__setitem__("design", "magic"),
        lambda line: line.__setitem__("op", "nothing"),
        lambda line: line.pop("digest"),
        lambda line: line.__setitem__("size", [1, 2, 3]),
    ],
)
def test_a_damaged_line_is_skipped_with_a_warning_and_the_rest_is_used(change, kept, caplog):
    document = json.loads(kept.read_text())
    change(document["calls"][0])
    kept.write_text(json.dumps(document))
    with caplog.at_level(logging.WARNING):
        made, _ = restart(kept.parent, seconds=NO_TIME)[0]
    assert (made.known, made.left) == (2, 1)
    assert "1 of 3 calls are skipped: calls[0]" in caplog.text


def test_a_line_with_a_right_digest_and_an_impossible_design_is_skipped(kept):
    """As after a change of weft's designs under the same version."""
    document = json.loads(kept.read_text())
    content = {name: value for name, value in document["calls"][0].items() if name != "digest"}
    content["row"]["config"] = {"no_such_field": 3}
    document["calls"][0] = content | {"digest": searched._digest(content)}
    kept.write_text(json.dumps(document))
    made, _ = restart(kept.parent, seconds=NO_TIME)[0]
    assert (made.known, made.left) == (2, 1)


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, timed, caplog):
    target = tmp_path / "file"
    target.write_text("")
    with caplog.at_level(logging.WARNING):
        made, plans = start(target / "below")[0]
    assert len(made.entries) == 3
    assert all(plan.row is not None for plan in plans)
    assert "not kept in a file" in caplog.text


def test_rows_of_this_machine_come_before_the_table_only_where_they_are_exact():
    caps = dataclasses.replace(capabilities.simulated(1), is_simulated=False)
    [file] = table.files_for(caps.device_name, 1)
    shipped = next(row for row in table.read(file).rows if row.design == "cublas" and row.op == "matmul")

    def found(M):
        return table.find("matmul", (M, *shipped.shape[1:]), torch.bfloat16, 1, caps)

    before = found(shipped.shape[0])
    row = dataclasses.replace(shipped, us=0.25, shape=(2 * shipped.shape[0], *shipped.shape[1:]))
    table.use([row], table.Path("mine.json"), 1, caps)
    assert found(shipped.shape[0]) == before
    table.use([dataclasses.replace(shipped, us=0.5)], table.Path("mine.json"), 1, caps)
    assert found(shipped.shape[0]).row.us == 0.5
    virtual = table.find("matmul", shipped.shape, torch.bfloat16, 1, capabilities.simulated(1))
    assert virtual == before


def test_a_model_names_its_calls(tmp_path, timed):
    """Decode steps and prompts of a decoder on two ranks; a budget for one batch of candidates."""
    config = EngineConfig(
        max_batch=1, max_seq_len=64, pages=4, chunk_tokens=32, tune=1.0, tune_cache=tmp_path, dtype=torch.bfloat16
    )

    def main(team):
        made = []
        model = Decoder(dataclasses.replace(TINY_CONFIG, num_hidden_layers=1), team).fill_dummy()
        Runner(model, config, before_cache=lambda runner: made.append(search_passes(runner, config)))
        return made[0]

    one, other = weft.simulate(main, 2)
    assert one == other
    assert one.calls > 10
    # A row may stand for further calls, so fewer may be left.
    assert 0 < one.left <= one.calls - one.known - len(one.entries)
    assert len(one.entries) >= 1


@pytest.mark.parametrize("op", ["matmul_all_reduce", "matmul_reduce_scatter", "grouped_matmul_reduce_scatter"])
def test_rows_of_designs_whose_steps_have_plans_are_read_again(op, tmp_path, caplog):
    file, place, shape = tmp_path / "kept.json", {"gpu": "a GPU"}, (512, 4096, 4096)
    row = table.Row(
        op=op, dtype="bfloat16", shape=shape, design="sequential", config={}, us=5.0, default_us=6.0, candidates=2,
        date="2026-11-28", versions="weft",
    )  # fmt: skip
    entry = searched.Entry(op=op, dtype="bfloat16", size=shape, row=row, reason="")
    assert searched.save(file, place, [entry], warm_search.check_row)
    assert searched.load(file, place, warm_search.check_row) == [entry] and not caplog.records
    with pytest.raises(ValueError, match="does not fit design 'a design'"):
        warm_search.check_row(dataclasses.replace(row, design="a design"))


def test_one_rank_searches_no_collective_op():
    def asked(world_size):
        here = machine(capabilities.simulated(world_size, like="h200"), world_size)
        call = find_op("matmul_all_reduce").call_of((4096, 4096, 4096), torch.bfloat16, here)
        return warm_search._as_wanted(("matmul_all_reduce", call, here), 4096, None, world_size)

    assert asked(1) is None and asked(2).op == "matmul_all_reduce"
