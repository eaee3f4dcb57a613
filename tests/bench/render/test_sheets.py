"""Sheets of canned reports: pure functions of them."""

import re
from dataclasses import replace
from pathlib import Path

from benchmarks import performance
from tests.bench import canned
from weft.bench import render
from weft.bench.ops.shapes import OPS, op_of
from weft.bench.render.sheets import limit_of, sheet, sheets
from weft.bench.workloads import read


def test_the_table_of_a_collective():
    made = sheet(canned.all_reduce())
    assert made.title == "all-reduce, bf16, world size 4 (4 x NVIDIA H200), µs"
    assert made.header == (
        "shape", "weft.auto", "weft.one_shot", "nccl", "torch.one_shot", "speed-up", "p10–p90", "busbw GB/s", "of limit",
    )  # fmt: skip
    # 1.5 * 4096 / 389e9 + 1.2 µs = 1.216; 1.5 * 64 MiB / 300 µs = 336 GB/s
    assert made.rows == (
        ("4 KiB", "5.00 (3.10)", "4.50", "20.0 (18.2)", "–", "4.00x", "5.00–5.00", "1", "24%"),
        ("64 MiB", "300", "WRONG", "290 / 310", "–", "0.97x", "300–300", "336", "87%"),
    )
    assert made.slower == {(1, 5)}
    assert made.notes[1:] == (
        "In brackets: per call of several in a row.",
        "After the slash: without a CUDA graph. Eager speed-up: of these times, over their fastest baseline.",
        "weft.one_shot at 64 MiB: wrong answer: rank 1: 3 of 9 elements",
        "torch.one_shot: no such op",
    )


def test_the_table_of_a_gemm_sets_the_ceiling_apart():
    made = sheet(canned.ag_gemm())
    assert made.header[1:4] == ("weft.auto", "cublas+nccl", "cublas")
    # 2 * 4096 * 12800 * 5120 / 740 µs = 725.5 TFLOP/s of 790
    assert made.rows[0] == (
        "qwen3-32b gate-up M=4096 (4096x12800x5120)", "740", "830", "750", "1.12x", "740–740", "726", "92%",
    )  # fmt: skip
    assert made.notes[-1] == "cublas: the GEMM alone, not the whole op."


def test_the_tile_fill_of_a_grouped_gemm_is_printed_and_its_ceilings_explained():
    size, figures = (4096, 8, 128, 64, 2048, 768, 0), {"pairs": 16399.0, "active experts": 64.0, "tile fill": 0.8036}
    times = (("weft.auto", "weft", 250.0), ("torch.grouped", "other", 300.0), ("cublas.dense", "ceiling", 160.0))
    rows = [canned.row(size, name, role, us, label="qwen3-30b-a3b T=4096", figures=figures) for name, role, us in times]
    made = sheet(canned.report("grouped-gemm-silu", 2, rows))
    assert made.header[-4:] == ("p10–p90", "tile fill", "TFLOP/s", "of limit")
    # 16,384 pairs are expected: 2 * 16384 * 2 * 768 * 2048 operations / 250 µs = 412 TFLOP/s of 790
    assert made.rows[0] == (
        "qwen3-30b-a3b T=4096", "250", "300", "160", "1.20x", "250–250", "0.80", "412", "52%",
    )  # fmt: skip
    assert (
        made.notes[-1] == "cublas.dense: one GEMM of as many rows, with one expert's weight; not the same computation."
    )
    # 16,384 rows in and 4096 out, of 4 KiB, with 6 bytes a choice.
    alone = [canned.row(size, "weft.auto", "weft", 25.0, label="qwen3-30b-a3b T=4096")]
    made = sheet(canned.report("moe-sum", 2, alone))
    assert made.header[-3:] == ("p10–p90", "GB/s", "of limit")
    assert made.rows[0][-2:] == ("3363", "78%")


def test_no_measured_call_of_a_collective_beats_its_limit():
    """In a row neither: each still crosses to its peers. Runs may be a few percent faster than the average rates."""
    shares = {
        (file.stem, row.label, row.provider): limit_of(
            found, row.shape, replace(row, median_us=row.chain_us or row.median_us)
        )[1]
        for file in sorted(performance.RESULTS.glob("*/*.w*.json"))
        for found in read(file)
        if found.op in OPS and op_of(found.op).form != "gemm"
        for row in found.rows
        if row.median_us and row.role != "ceiling" and found.world_size > 1
    }
    assert len(shares) > 100
    assert {name: share for name, share in shares.items() if share > 1.05} == {}


def test_an_unknown_gpu_has_no_limit():
    other = canned.all_reduce()
    other.machine["gpu"] = "some GPU"
    assert {row[-1] for row in sheet(other).rows} == {"–"}
    unknown = "No limits: rates are known for NVIDIA H200, NVIDIA H100 80GB HBM3, not for some GPU."
    assert sheet(other).notes[1] == unknown
    assert unknown not in sheet(canned.all_reduce()).notes


def test_answers_were_checked_only_where_some_were():
    checked, unchecked = "answers were checked, times mean nothing.", "no answer was checked, times mean nothing."
    for more, said in (({"max_abs_error": 0.0}, checked), ({"reason": "needs GPUs"}, unchecked)):
        made = canned.report("all-reduce", 2, [canned.row((96,), "nccl", "other", **more)], simulated=True)
        assert sheet(made).notes[0] == f"Simulated ranks: {said}"


def test_the_tables_of_a_model():
    made, parts = sheets(canned.model())
    assert made.title == "model of qwen3-32b, bf16, world size 4 (4 x NVIDIA H200), ms"
    assert made.header == (
        "step", "weft.auto", "torch.eager", "torch.compile", "over eager", "speed-up", "p10–p90", "roofline", "of limit",
    )  # fmt: skip
    # 64 layers of 243.8 MB and a head of 389 MB at 4.3 TB/s, 128 latencies of 1.2 µs.
    assert made.rows[0] == ("decode 1x128", "5.00", "7.00", "6.00", "1.40x", "1.20x", "5.00–5.00", "3.87", "77%")
    assert made.rows[1][:6] == ("prefill 32x128", "110.0", "109.0", "–", "0.99x", "0.99x")
    assert made.slower == {(1, 4), (1, 5)}
    assert made.notes[-1] == "torch.compile at prefill 32x128: no compiler"
    assert parts.header == ("step", "provider", "gemm", "gap", "sum")
    assert parts.rows[0] == ("decode 1x128", "weft.auto", "54.7", "23.4", "78.1")


def test_the_table_of_answers():
    """Times per token in ms; in brackets the first tokens and tokens per second."""
    times = {"first_us": 25_000.0, "tokens_per_second": 110.0}
    rows = [canned.row((1, 128, 64), "weft.auto", "weft", 9000.0, label="1 prompts of 128, 64 new", **times)]
    made = sheet(replace(canned.report("generate", 2, rows), subject="qwen3-32b"))
    assert made.title == "generate of qwen3-32b, bf16, world size 2 (2 x NVIDIA H200), ms per token after the first"
    assert made.rows[0][:2] == ("1 prompts of 128, 64 new", "9.00 (first 25.00, 110/s)")
    assert made.notes[-1].startswith("In brackets: time until the first tokens were on the host")


def test_the_renderer_asks_the_workload_and_compares_no_name_of_an_op():
    for file in Path(render.__file__).parent.glob("*.py"):
        assert not re.search(r"\bop\s*(==|!=|in\b|not in\b)", file.read_text()), file.name


def test_eager_calls_in_a_row_have_their_own_table_with_the_hosts_time():
    times = (
        ("weft.auto", "weft", 5.0, 60.0, 55.0),
        ("nccl", "other", 9.0, 48.0, 47.5),
        ("torch.fused", "other", 8.0, None, None),
    )
    rows = [
        canned.row((4096,), name, role, us, label="4 KiB", eager_row_us=eager, host_us=host)
        for name, role, us, eager, host in times
    ]
    _, made = sheets(canned.report("all-reduce", 2, rows))
    assert made.title.endswith("eager, µs a call [of the host]")
    assert made.header == ("shape", "weft.auto", "nccl", "torch.fused", "speed-up")
    assert made.rows == (("4 KiB", "60.0 [55.0]", "48.0 [47.5]", "–", "0.80x"),)
    assert made.slower == {(0, 4)}
    assert len(sheets(canned.all_reduce())) == 1


def test_eager_times_have_their_own_speed_up():
    """Over the fastest baseline without a graph, which may be another one."""
    small = (4096,)
    times = (("weft.auto", "weft", 5.0, 80.0), ("nccl", "other", 12.0, 50.0), ("torch.one_shot", "other", 11.0, 60.0))
    rows = [canned.row(small, name, role, us, label="4 KiB", eager_us=eager) for name, role, us, eager in times]
    made = sheet(canned.report("all-reduce", 2, rows))
    assert made.header[4:6] == ("speed-up", "eager speed-up")
    assert made.rows[0][1:6] == ("5.00 / 80.0", "12.0 / 50.0", "11.0 / 60.0", "2.20x", "0.62x")
    assert made.slower == {(0, 5)}
