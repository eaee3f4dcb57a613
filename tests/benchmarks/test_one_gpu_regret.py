"""Regret on one GPU: its locks, its list of kernels, its shapes; the run itself on virtual ranks."""

import argparse
import math
import os
import threading
import time
from collections import Counter
from dataclasses import replace

import pytest
import torch

from benchmarks import latent_regret, one_gpu_regret, regret_shapes, searched_starts
from benchmarks.locks import Budget, Room, claimed
from tests.limits import ANSWER
from weft.bench.names import REGRET
from weft.bench.ops.shapes import op_of
from weft.bench.regret.command import machine_here
from weft.bench.regret.file import read, write
from weft.bench.regret.measure import planned
from weft.ops.gemm.cublas import Cublas

pytestmark = pytest.mark.skipif(torch.cuda.device_count() > 0, reason="for machines without a GPU")


def test_a_process_that_waits_to_be_alone_lets_nobody_in_before_it(tmp_path):
    room, told, inside = Room(tmp_path), [], threading.Event()

    def alone():
        with Room(tmp_path).alone():
            told.append("alone")

    def late():
        with Room(tmp_path).beside():
            told.append("late")

    threads = [threading.Thread(target=alone), threading.Thread(target=late)]
    with room.beside(), Room(tmp_path).beside():  # two at once
        inside.set()
        threads[0].start()
        time.sleep(0.2)
        threads[1].start()
        time.sleep(0.2)
        told.append("first")
    for thread in threads:
        thread.join(timeout=ANSWER)
    assert told == ["first", "alone", "late"]


def test_a_claim_is_of_the_first_that_asks(tmp_path):
    assert claimed(tmp_path / "job-1") and not claimed(tmp_path / "job-1") and claimed(tmp_path / "job-2")


def test_a_budget_takes_back_what_ended_processes_had_and_gives_at_most_all(tmp_path):
    budget = Budget(tmp_path, 10)
    (tmp_path / "budget.json").write_text('{"999999999": 8, "1": 4}')  # process 1 runs
    with budget.part(6):
        assert (tmp_path / "budget.json").read_text() == f'{{"1": 4, "{os.getpid()}": 6}}'
    assert not budget._take(7) and budget._take(5)
    (tmp_path / "budget.json").unlink()
    with budget.part(99):
        pass


def test_all_ops_of_one_rank_with_several_designs_are_taken():
    of_one = {op for op in REGRET if not op_of(op).collective}
    assert {*regret_shapes.OPS} == of_one - {"moe-schedule"} and len(set(regret_shapes.OPS)) == 20


def test_each_kernel_is_compiled_at_one_shape_with_its_design():
    here = machine_here(1, True)
    every = regret_shapes.shapes_of(("gemm-silu", "grouped-gemm+four_bit"), 54, here, "cuda")
    assert Counter(workload.name for workload, _ in every) == {"gemm-silu": 60, "grouped-gemm+four_bit": 60}
    jobs = regret_shapes.jobs_of(every, here)
    assert 60 < len(jobs) < 200
    wanted = {
        (workload.name, design)
        for workload, shape in every
        for _, designs, _, _ in planned(replace(workload, shapes=(shape,)), here, regret_shapes.SEARCH)
        for design in designs
        if workload.fields or not isinstance(design, Cublas)
    }
    assert {(job.workload.name, job.design) for job in jobs} == wanted


def test_the_whole_run_on_virtual_ranks_writes_rows_and_goes_on_from_them(tmp_path, capsys):
    given = argparse.Namespace(
        out=tmp_path / "rows.json", seconds=300.0, seed=1, ops=["gemm", "moe-route"], known=None, above=math.inf, plan=False,
        device="sim", processes=(1, 2),
    )  # fmt: skip
    one_gpu_regret.main(given)
    kept = read(given.out)
    assert {one.row.op for one in kept} == {"gemm", "moe-route"} and all(one.row.regret for one in kept)
    assert "2 of 2 shapes" in capsys.readouterr().out and "timed in" in given.out.with_suffix(".log").read_text()
    write(given.out, kept[:1])
    given.known = given.out
    every, jobs = regret_shapes.work_of(given, kept[:1])
    assert [workload.name for workload, _ in every] == [kept[1].row.op] and {job.workload.name for job in jobs} == {
        kept[1].row.op
    }
    # Known rows of another plan, or of much regret, come first; a new row takes the place of a known one.
    stale = replace(kept[1], row=replace(kept[1].row, auto="another design", best_us=1.0, auto_us=3.0))
    every, _ = regret_shapes.work_of(given, [stale])
    assert [workload.name for workload, _ in every] == [kept[1].row.op, kept[0].row.op]
    slow = replace(kept[1], row=replace(kept[1].row, best_us=1.0, auto_us=3.0))
    for above, count in ((2.9, 1), (3.1, 0)):
        given.above = above
        assert len(regret_shapes.work_of(given, [kept[0], slow])[0]) == count + (kept[0].row.regret > above)
    assert regret_shapes.merged([kept[0], stale], [kept[1]]) == kept


def test_latents_have_thirty_listed_and_thirty_drawn_shapes_and_several_designs():
    made, here = latent_regret.shapes(54), machine_here(1, True)
    assert len(set(made)) == 60 and latent_regret.shapes(55)[:30] == made[:30] != latent_regret.shapes(55)[30:]
    for shape in made:
        designs = latent_regret.designs_of(shape, here)
        auto = latent_regret.MLA_DECODE_ATTENTION.plan(latent_regret.call_of(shape), here).design
        assert next(iter(designs)) == auto and len(designs) >= 5 and len(set(designs.values())) == len(designs)


def test_starts_agree_if_each_knows_what_was_found_before():
    agree, counts = searched_starts.agree, searched_starts.counts
    lines = ["weft: rank 0: search: …", "qwen3-0.6b, world size 1: 40 calls: 9 known, 20 searched in 14 s; 11 are left"]
    assert counts(lines) == (40, 9, 20) and counts(lines[:1]) is None
    assert agree([(40, 9, 20), (40, 29, 11), (40, 40, 0)])
    assert (
        not agree([(40, 9, 20), (40, 9, 20)]) and not agree([(40, 9, 0), (40, 9, 0)]) and not agree([(40, 9, 20), None])
    )
