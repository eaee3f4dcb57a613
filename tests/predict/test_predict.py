"""The model of more GPUs: its parts by hand, its errors on committed rows, the command."""

import json
import re
import statistics
from dataclasses import fields, replace

import pytest
from typer.testing import CliRunner

from benchmarks import predict
from tests.bench import canned
from weft.bench.harness import report
from weft.cli import app
from weft.predict import ops
from weft.predict.costs import UNITS, Costs, errors, read, shown, to_json
from weft.predict.executor import CopyEngine, Slots


def test_tiles_take_the_sms_that_are_free_first():
    slots = Slots(3)
    assert slots.run(4, 10, 0) == 20  # 3, then 1
    assert slots.run(2, 5, 0) == 15  # beside the last one of the first GEMM
    assert slots.run(3, 1, 100) == 101
    many, one_by_one = Slots(4), Slots(4)
    many.run(3, 7, 2), one_by_one.run(3, 7, 2)
    assert many.run(41, 11, 3) == max(one_by_one.run(1, 11, 3) for _ in range(41))


def test_a_copy_engine_makes_one_copy_after_the_other():
    engine = CopyEngine(2, 100, 3, 10)
    assert [engine.send(500, 0), engine.send(500, 0), engine.send(0, 100)] == [20, 30, 105]


@pytest.mark.parametrize(
    "time", [ops.ag_gemm, lambda c, M, N, K, W: ops.gemm_rs(c, M, K, N, W)], ids=["ag_gemm", "gemm_rs"]
)
def test_an_overlapped_gemm_lies_between_its_parts_and_their_sum(time):
    costs = Costs()
    for world_size in (2, 4, 8):
        alone = ops.gemm(costs, 8192, 2560, 5120)
        wire = (world_size - 1) * (8192 / world_size * 5120 * 2 / costs.link + costs.copy + costs.flag)
        assert max(alone, wire) < time(costs, 8192, 2560, 5120, world_size) < 1.3 * (alone + wire)
    # A node more costs a rail at least.
    assert time(costs, 8192, 640, 5120, 16) > costs.rail


def test_a_large_all_reduce_takes_owners_and_a_small_one_does_not():
    costs = Costs()
    small, large = 1 << 12, 1 << 26
    assert ops.all_reduce(costs, small, 8) == pytest.approx(costs.push + 7 * small / costs.push_link)
    assert ops.all_reduce(costs, large, 8) < costs.push + 7 * large / costs.push_link
    assert ops.all_reduce(costs, small, 1) == 0 < ops.all_reduce(costs, small, 8) < ops.all_reduce(costs, small, 16)


def test_the_shipped_costs_predict_rows_that_they_were_not_fitted_to():
    costs, errors = read(), []
    for row in predict.measurements():
        if row.world_size == 4 and row.provider == "weft.auto":
            errors.append(abs(predict.predicted(costs, row) / row.us - 1))
    assert len(errors) >= 60
    assert statistics.mean(errors) < 0.07 and max(errors) < 0.2
    assert sum(error <= predict.GOAL for error in errors) >= len(errors) - 3


def test_a_fit_finds_the_costs_that_made_the_rows():
    true = Costs(push=3.3, push_link=200e3)
    rows = [
        predict.Measured(
            op="all-reduce", provider="weft.auto", world_size=2, folder="", label="", shape=(nbytes,),
            us=ops.all_reduce(true, nbytes, 2),
        )
        for nbytes in (1 << 10, 1 << 16, 1 << 20, 1 << 22)
    ]  # fmt: skip
    found = predict.fit(rows, Costs())
    assert (found.push, found.push_link) == (pytest.approx(3.3, rel=0.03), pytest.approx(200e3, rel=0.03))
    assert found.mac == Costs().mac and Costs(**json.loads(to_json(true))) == true


@pytest.mark.sweep
def test_the_shipped_costs_are_those_of_the_committed_rows():
    rows = list(predict.measurements())
    fitted = [row for row in rows if predict.FITTED_TO.get(row.op) == row.world_size]
    assert to_json(predict.fit(fitted, Costs())) == to_json(read())


def test_the_shipped_errors_are_those_of_the_committed_rows():
    found = predict.errors(read(), list(predict.measurements()))
    assert json.loads(json.dumps(found)) == errors()
    for op in predict.OF_ONE:
        rows, mean, largest = found[op]["1"]
        assert rows >= 5 and mean < 0.07 and abs(largest) < predict.GOAL


def test_experts_over_ranks_take_less_than_one_gpu_and_more_than_their_share():
    costs, sizes = read(), (8192, 2048, 768, 128, 8)
    for time in (ops.ag_moe, ops.moe_rs, ops.moe):
        alone = time(costs, *sizes, 1)
        assert alone / 4 < time(costs, *sizes, 4) < alone
    assert ops.moe(costs, *sizes, 2) == ops.ag_moe(costs, *sizes, 2) + ops.moe_rs(costs, *sizes, 2)
    # With 8 choices nearly every token goes to both of two ranks: half of them cross the link each way.
    wire = 4096 * 2048 * 2 / costs.push_link
    assert wire < ops.moe_dispatch(costs, 8192, 2048, 128, 8, 2) < wire + 2 * costs.push
    assert ops.moe_dispatch(costs, 8192, 2048, 128, 8, 1) == 0 < ops.moe_combine(costs, 8192, 2048, 128, 8, 1)
    assert (
        ops.moe_dispatch(costs, 8192, 2048, 128, 8, 16)
        > costs.rail + ops.moe_dispatch(costs, 8192, 2048, 128, 8, 8) / 2
    )


def test_a_grouped_gemm_of_few_tokens_reads_the_weights_of_experts_that_they_chose():
    costs = read()
    one = ops.grouped(costs, 1, 8, 128, 1, 2048, 768)
    assert one == pytest.approx(costs.grouped + 8 * 2048 * 768 * 2 / costs.weights)
    assert ops.grouped(costs, 128, 8, 128, 1, 2048, 768) < costs.grouped + 128 * 2048 * 768 * 2 / costs.weights
    # Twice the tokens of many take twice as long.
    many, more = (ops.grouped(costs, tokens, 8, 128, 1, 2048, 768) - costs.grouped for tokens in (1 << 16, 1 << 17))
    assert more == pytest.approx(2 * many, rel=0.05)


def test_decode_attention_reads_its_share_of_the_cache():
    costs, sizes = read(), (1, 64, 8, 128, 1 << 20)
    alone = ops.decode_attention(costs, *sizes, 1)
    for world_size in (2, 8, 64):
        share = (alone - costs.attention) / world_size
        time = ops.decode_attention(costs, *sizes, world_size) - costs.attention - share
        assert costs.hop <= time < 2 * costs.hop + (world_size > 8) * 2 * costs.rail


def test_both_pages_show_the_same_decode_attention_and_the_section_each_measured_row(tmp_path):
    section, longest = predict.decode_section(tmp_path), predict.LONGEST
    name, *times = next(line for line in section.splitlines() if str(longest) in line).strip("| ").split(" | ")
    of_page = next(line for line in predict.page().splitlines() if f"decode attention, {name}" in line)
    assert [f"{float(us):.3g}" for us in times] == [f"{float(us):.3g}" for us in of_page.strip("| ").split(" | ")[1:7]]
    one = canned.all_reduce()
    row = replace(one.rows[0], shape=(*longest, 2), provider="weft.auto", role="weft", median_us=2 * float(times[1]))
    made = replace(one, op=predict.DECODE, world_size=2, rows=[row])
    report.write(tmp_path / "h200-x2" / f"{predict.DECODE}.w2.json", [made])
    assert f"| {name} | 2 | {row.median_us:.1f} | {times[1]} | -50% |" in predict.decode_section(tmp_path)


def test_the_command_prints_a_time_for_each_world_size_or_one_line():
    result = CliRunner().invoke(app, ["predict", "ag-gemm", "--world-size", "8,16", "--shape", "4096x10240x5120"])
    lines = result.stdout.splitlines()
    assert result.exit_code == 0 and [line.split()[:3] for line in lines[1:3]] == [["W", "=", "8"], ["W", "=", "16"]]
    assert lines[3].startswith("fitted:    mac 342.7 fs, ") and "rail 10 us, rail_link 50 GB/s" in lines[5]
    assert lines[6].startswith("error:     4.1% in the mean of 27 committed rows at W = 2")
    for op in ("moe", "ag-moe", "moe-rs", "moe-dispatch", "moe-combine", "sharded-decode-attention"):
        result = CliRunner().invoke(app, ["predict", op])
        assert result.exit_code == 0 and result.stdout.count("W = ") >= 6
        assert ("not known over ranks" in result.stdout) == (op == "moe")
        assert ("committed rows at W = 2" in result.stdout) == (op != "moe")
    wrong = {
        ("moe-rs", "--shapes", "1x2"): "xinnerxexpertsxtop; pass positive numbers, as in 8192x2048x768x128x8",
        ("nothing",): "has no model", ("all-reduce", "--shape", "3x4"): "is not bytes",
        ("ag-gemm", "--world-size", "3"): "is not divisible by world_size=3",
    }  # fmt: skip
    for arguments, message in wrong.items():
        result = CliRunner().invoke(app, ["predict", *arguments])
        assert result.exit_code == 2 and message in result.stderr


def predicted(*arguments):
    """Lines of `weft predict` with a time or a problem."""
    result = CliRunner().invoke(app, ["predict", *arguments])
    assert result.exit_code == 0, result.output
    return [line for line in result.stdout.splitlines() if not re.match("(fitted|measured|assumed|error):", line)]


def test_shapes_are_those_of_bench_or_of_all_ranks_together():
    of_all = predicted("ag-gemm", "--shapes", "8192x51200x5120", "-tp", "2,16")
    assert predicted("ag-gemm", "--shape", "8192x51200x5120", "-tp", "2,16") == of_all  # the former name
    assert predicted("ag_gemm", "-tp", "2,16") == predicted("all_gather_matmul", "-tp", "2,16") == of_all
    assert predicted("ag-gemm", "--shapes", "qwen3-32b/gate-up:8192", "-tp", "2,16")[1:] == of_all[1:]
    assert predicted("ag-gemm", "--shapes", "8192,3200,5120", "-tp", "16")[1] == of_all[2]
    assert predicted("all-reduce", "--shapes", "64KiB,1MiB", "-tp", "2,4") == [
        *predicted("all-reduce", "--shapes", "64KB", "-tp", "2,4"), *predicted("all-reduce", "--shapes", "1M", "-tp", "2,4")
    ]  # fmt: skip
    [_, us] = predicted("moe", "--shapes", "qwen3-30b-a3b:1024", "-tp", "8")
    assert us == predicted("moe", "--shapes", "8192x2048x768x128x8", "-tp", "8")[1]
    # Rows that one world size does not divide are left out there.
    assert len(predicted("ag-gemm", "--shapes", "qwen3-32b/qkv", "-tp", "1,2")) == 13 + 13 + 12


def test_every_cost_has_a_unit_or_is_a_factor():
    assert {field.name for field in fields(Costs)} - {*UNITS} == {"smaller", "expert", "sms"}
    assert shown(Costs(), "link") == "link 375 GB/s" and shown(Costs(), "smaller") == "smaller 1.1"
