"""Traces of virtual ranks: what is in them, that it fits together, and that tracing changes no result."""

import json
import logging

import pytest
import torch

import weft
from weft.errors import Unsupported
from weft.ops.gemm.tile import Tile
from weft.ops.overlap.all_gather_matmul import ALL_GATHER_MATMUL, Pipelined
from weft.ops.overlap.fused_reduce import Fused
from weft.ops.overlap.matmul_reduce_scatter import MATMUL_REDUCE_SCATTER
from weft.simulator.observer import Observer
from weft.trace.chrome import read, to_json
from weft.trace.summary import summarize, summary
from weft.trace.timeline import VIRTUAL

SMALL = Tile(block_m=16, block_n=32, block_k=32, group=2, num_warps=4, num_stages=2)
# By design: the op, the design, and rows of a rank's first operand.
DESIGNS = {
    "fused": (MATMUL_REDUCE_SCATTER, Fused(tile=SMALL, split=False), 64),
    "pipelined": (ALL_GATHER_MATMUL, Pipelined(chunks=2), 32),
}


def gemm(team, design, file=None):
    """A GEMM of 64 rows over all ranks; traced if there is a file."""
    op, chosen, rows = DESIGNS[design]
    generator = torch.Generator().manual_seed(team.rank)
    x, w = (torch.randn(size, generator=generator).bfloat16() for size in ((rows, 64), (64, 64)))
    if file is None:
        return op.run(chosen, team, x, w)
    with weft.trace(file, team):
        return op.run(chosen, team, x, w)


@pytest.fixture(scope="module", params=DESIGNS)
def traced(request, tmp_path_factory):
    """(design, its file, timeline)"""
    file = tmp_path_factory.mktemp("trace") / "out.json"
    results = weft.simulate(gemm, 2, args=(request.param, file))
    plain = weft.simulate(gemm, 2, args=(request.param,))
    assert all(map(torch.equal, results, plain))
    return request.param, file, read(file)


def test_a_trace_has_what_the_ranks_did(traced):
    design, _, timeline = traced
    assert (timeline.world_size, timeline.clock) == (2, VIRTUAL)
    for rank in range(2):
        kinds = {event.kind for event in timeline.events if event.rank == rank}
        assert {"kernel", "wait", "notify"} <= kinds
        assert ({"tile"} if design == "fused" else {"copy", "gemm"}) <= kinds
    tiles = [event.name for event in timeline.events if event.kind == "tile" and event.rank == 0]
    if design == "fused":  # 4 rows of tiles, two of each rank, and two columns
        assert sorted(tiles) == sorted(f"tile {row},{column}" for row in range(4) for column in range(2))


def test_slices_of_a_track_are_nested(traced):
    *_, timeline = traced
    tracks = {(event.rank, event.track) for event in timeline.events}
    for track in tracks:
        around = []
        for event in timeline.events:
            if (event.rank, event.track) == track:
                while around and around[-1].end <= event.start:
                    around.pop()
                assert event.start <= event.end and all(event.end <= outer.end for outer in around), (event, around)
                around.append(event)


def test_every_wait_has_an_arrow_from_a_notify_that_precedes_its_end(traced):
    *_, timeline = traced
    waits = [number for number, event in enumerate(timeline.events) if event.kind == "wait"]
    assert waits and sorted(arrow.wait for arrow in timeline.arrows) == waits
    for arrow in timeline.arrows:
        notify, wait = timeline.events[arrow.notify], timeline.events[arrow.wait]
        assert notify.kind == "notify" and notify.end <= wait.end and notify.cause == wait.cause
        assert notify.name.endswith(f"of rank {wait.rank}")


def test_a_file_is_in_chrome_s_format_and_read_back(traced):
    _, file, timeline = traced
    lines = json.loads(file.read_text())["traceEvents"]
    assert {line["ph"] for line in lines} == {"M", "X", "s", "f"}
    assert all({"pid", "tid", "name"} <= line.keys() for line in lines)
    flows = [line["id"] for line in lines if line["ph"] == "s"]
    assert flows == [line["id"] for line in lines if line["ph"] == "f"] == list(range(len(timeline.arrows)))
    slices = {(line["pid"], line["tid"]) for line in lines if line["ph"] == "X"}
    assert slices == {(line["pid"], line["tid"]) for line in lines if line["name"] == "thread_name"}
    assert to_json(timeline).count("\n") == file.read_text().count("\n")


def test_a_summary_names_the_cause_of_exposed_communication(traced):
    design, _, timeline = traced
    for one in summarize(timeline):
        assert 0 < one.gemm < one.time and 0 <= one.wire < one.time
        assert (one.wire > 0) == (design == "pipelined")  # the fused kernel's stores are no copies
        assert 0 < sum(one.exposed.values()) < one.time
        # Of so small a pipelined GEMM the first part hides the copies.
        cause = "signals" if design == "fused" else "entered"
        assert one.exposed.keys() == {(cause, 1 - one.rank)}
    text = summary(timeline)
    assert ("signals" if design == "fused" else "entered") in text and "overlap = max(GEMM, wire) / time" in text


def test_the_same_run_gives_the_same_file(traced, tmp_path):
    design, file, _ = traced
    weft.simulate(gemm, 2, args=(design, tmp_path / "again.json"), seed=5)
    assert (tmp_path / "again.json").read_text() == file.read_text()


def test_a_trace_ends_with_its_scope_and_another_may_follow(tmp_path, caplog):
    caplog.set_level(logging.INFO, "weft")

    def main(team):
        for name in ("one.json", "two.json"):
            with weft.trace(tmp_path / name, team):
                team.barrier()
                x = torch.ones(4, device=team.device)
                weft.ops.all_reduce(x, team)
        weft.ops.all_reduce(x, team)

    weft.simulate(main, 2)
    one, two = (read(tmp_path / name) for name in ("one.json", "two.json"))
    assert len(one.events) == len(two.events) > 0
    lines = [record.getMessage() for record in caplog.records if record.name == "weft.trace.tracing"]
    assert len(lines) == 2 and all("virtual time" in line for line in lines)


class Checking(Observer):
    """Observer of a check."""


def refused(main, world_size=2, **options):
    with pytest.raises(Unsupported) as caught:
        weft.simulate(main, world_size, **options)
    return str(caught.value)


def test_what_a_trace_cannot_do_is_refused(tmp_path):
    def within(team):
        with weft.trace(tmp_path / "a.json", team), weft.trace(tmp_path / "b.json", team):
            pass

    def once(team):
        with weft.trace(tmp_path / "a.json", team):
            pass

    assert "begins within another one" in refused(within)
    assert "trace team.node" in refused(once, 4, node_size=2)
    assert "under weft check" in refused(once, prepare=lambda machine: setattr(machine, "observer", Checking()))
    assert not list(tmp_path.iterdir())
