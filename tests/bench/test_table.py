"""Tables, pages, plots and verdicts from canned JSON: pure functions of it."""

import io
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
from rich.console import Console

from benchmarks import performance, targets
from tests.bench import canned
from weft.bench.command import BenchOptions
from weft.bench.harness import report
from weft.bench.ops.shapes import OPS, is_gemm
from weft.bench.render import plot, table
from weft.bench.render.plot import svg


def test_json_comes_back_as_it_was(tmp_path):
    reports = [canned.all_reduce(), canned.ag_gemm()]
    report.write(tmp_path / "made" / "x.json", reports)
    assert report.read(tmp_path / "made" / "x.json") == reports
    assert [file.name for file in (tmp_path / "made").iterdir()] == ["x.json"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"schema": 1', '"schema": 7', "schema is 7"),
        ('"op": "all-reduce"', '"op": "all"', "op 'all' is unknown"),
        ('"role": "other"', '"role": "both"', "role='both'"),
        ('"samples"', '"sample"', "sample"),
        ('"no such op"', "null", "neither a time, an error nor a reason"),
        ("{", "", "x.json"),
        ("", "[1]", "schema is None"),
    ],
)
def test_a_file_of_another_kind_is_refused_by_name(tmp_path, old, new, message):
    file = tmp_path / "x.json"
    file.write_text(report.to_json([canned.all_reduce()]).replace(old, new, 1) if old else new)
    with pytest.raises(ValueError, match=message) as caught:
        report.read(file)
    assert "x.json" in str(caught.value)


def test_the_table_of_a_collective():
    made = table.sheet(canned.all_reduce())
    assert made.title == "all-reduce, bf16, world size 4 (4 x NVIDIA H200), µs"
    assert made.header == (
        "shape", "weft.auto", "weft.one_shot", "nccl", "torch.one_shot", "speed-up", "busbw GB/s", "of limit",
    )  # fmt: skip
    # 1.5 * 4096 / 360e9 + 1.2 µs = 1.217; 1.5 * 64 MiB / 300 µs = 336 GB/s
    assert made.rows == (
        ("4 KiB", "5.00 (3.10)", "4.50", "20.0 (18.2)", "–", "4.00x", "1", "24%"),
        ("64 MiB", "300", "WRONG", "290 / 310", "–", "0.97x", "336", "94%"),
    )
    assert made.slower == {1}
    assert made.notes[1:] == (
        "In brackets: per call of several in a row.",
        "After the slash: without a CUDA graph.",
        "weft.one_shot at 64 MiB: wrong answer: rank 1: 3 of 9 elements",
        "torch.one_shot: no such op",
    )


def test_the_table_of_a_gemm_sets_the_ceiling_apart():
    made = table.sheet(canned.ag_gemm())
    assert made.header[1:4] == ("weft.auto", "cublas+nccl", "cublas")
    # 2 * 4096 * 12800 * 5120 / 740 µs = 725.5 TFLOP/s of 790
    assert made.rows[0] == (
        "qwen3-32b gate-up M=4096 (4096x12800x5120)", "740", "830", "750", "1.12x", "726", "92%",
    )  # fmt: skip
    assert made.notes[-1] == "cublas: the GEMM alone, not the whole op."


def test_no_measured_call_of_a_collective_beats_its_limit():
    """In a row neither: each still crosses to its peers. Runs may be a few percent faster than the average rates."""
    shares = {
        (file.stem, row.label, row.provider): table.share_of_limit(
            found, replace(row, median_us=row.chain_us or row.median_us)
        )
        for file in sorted((performance.ROOT / "benchmarks" / "results").glob("*/*.w*.json"))
        for found in report.read(file)
        if found.op in OPS and not is_gemm(found.op)
        for row in found.rows
        if row.median_us
    }
    assert len(shares) > 100
    assert {name: share for name, share in shares.items() if share > 1.05} == {}


def test_an_unknown_gpu_has_no_limit():
    other = canned.all_reduce()
    other.machine["gpu"] = "some GPU"
    assert {row[-1] for row in table.sheet(other).rows} == {"–"}
    unknown = "No limits: rates are known for NVIDIA H200, not for some GPU."
    assert table.sheet(other).notes[1] == unknown
    assert unknown not in table.sheet(canned.all_reduce()).notes


def test_answers_were_checked_only_where_some_were():
    checked, unchecked = "answers were checked, times mean nothing.", "no answer was checked, times mean nothing."
    for more, said in (({"max_abs_error": 0.0}, checked), ({"reason": "needs GPUs"}, unchecked)):
        made = canned.report("all-reduce", 2, [canned.row((96,), "nccl", "other", **more)], simulated=True)
        assert table.sheet(made).notes[0] == f"Simulated ranks: {said}"


def test_printed_and_as_markdown():
    made = table.sheet(canned.all_reduce())
    console = Console(file=io.StringIO(), width=200, color_system=None)
    table.show(made, console)
    assert "4 KiB   5.00 (3.10)           4.50  20.0 (18.2)" in console.file.getvalue()
    narrow = Console(file=io.StringIO(), width=20, color_system=None)  # a file: nobody's terminal
    table.show(made, narrow)
    assert narrow.file.getvalue() == console.file.getvalue()
    lines = table.markdown(made).splitlines()
    assert lines[0].startswith("| shape | weft.auto |")
    assert lines[1] == "|---|---:|---:|---:|---:|---:|---:|---:|"
    assert lines[3] == "| 64 MiB | 300 | WRONG | 290 / 310 | – | 0.97x | 336 | 94% |"


def test_a_table_that_is_too_wide_for_the_terminal_is_turned():
    console = Console(file=io.StringIO(), width=80, color_system=None, force_terminal=True)
    table.show(table.sheet(canned.all_reduce()), console)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert lines[1:5] == [
        "shape                 4 KiB     64 MiB",
        "weft.auto       5.00 (3.10)        300",
        "weft.one_shot          4.50      WRONG",
        "nccl            20.0 (18.2)  290 / 310",
    ]
    # Labels of 43 columns: a table for each of the two shapes.
    narrow = Console(file=io.StringIO(), width=80, color_system=None, force_terminal=True)
    table.show(table.sheet(canned.ag_gemm()), narrow)
    lines = narrow.file.getvalue().splitlines()
    assert sum(line.startswith("weft.auto ") for line in lines) == 2
    assert max(map(len, lines[:-3])) <= 80
    assert "…" not in narrow.file.getvalue()


def test_plots_are_pictures_with_every_provider_that_ran():
    pytest.importorskip("matplotlib")
    untimed = canned.report("gemm", 1, [canned.row((1, 2, 3), "cublas", "other", reason="no GPU")])
    picture = svg([canned.all_reduce(), canned.ag_gemm(), untimed])
    groups = [e.get("id") for e in ElementTree.fromstring(picture).iter() if e.tag.endswith("}g")]
    assert [name for name in groups if name in ("weft.auto", "weft.one_shot", "nccl", "cublas+nccl", "cublas")] == [
        "weft.auto", "weft.one_shot", "nccl", "weft.auto", "cublas+nccl", "cublas",
    ]  # fmt: skip
    for words in ("all-reduce, bf16, world size 4: µs", "64 MiB", "nothing was timed"):
        assert words in picture
    assert "torch.one_shot" not in picture
    assert svg([canned.all_reduce(), canned.ag_gemm(), untimed]) == picture


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    for refused in (lambda: svg([]), lambda: BenchOptions(op="gemm", plot=tmp_path / "x.svg")):
        with pytest.raises(ValueError, match=r"pip install weft\[plot\]"):
            refused()


def test_the_page_is_written_from_the_results(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    for name, made in (("all-reduce.w4", canned.all_reduce()), ("ag-gemm.w4", canned.ag_gemm())):
        report.write(tmp_path / "results" / "h200-x4" / f"{name}.json", [made])
    stale = tmp_path / "docs" / "performance" / "no-longer-there.svg"
    stale.parent.mkdir(parents=True)
    stale.touch()
    assert performance.main(tmp_path / "results", tmp_path / "docs" / "performance.md") == 0
    assert not stale.exists()
    page = (tmp_path / "docs" / "performance.md").read_text()
    assert page.index("## h200-x4") < page.index("### all-reduce") < page.index("### ag-gemm")
    for words in (
        "- torch: 2.11.0",
        "weft abc, 2026-11-20\n\n![all-reduce]",
        "- measured: 2026-11-20",
        "`weft bench x`",
        "- empty_us: 1.25",
        "| 64 MiB | 300 |",
    ):
        assert words in page
    for line in page.splitlines():
        if line.startswith("!["):
            assert (tmp_path / "docs" / line.split("(")[1].rstrip(")")).is_file()
    assert performance.main(tmp_path / "nothing", tmp_path / "x.md") == 2
    assert "benchmarks/run.py" in capsys.readouterr().err


def test_targets_are_met_or_missed(tmp_path, capsys):
    (tmp_path / "check").mkdir()
    (tmp_path / "check" / "sweep.json").write_text("{}")
    report.write(tmp_path / "h200-x4" / "both.w4.json", [canned.all_reduce(), canned.ag_gemm()])
    assert targets.main([str(tmp_path)]) == 1
    told = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert told == [
        "all-reduce W=4 4 KiB <= 3.2 µs 5.00 alone, 3.10 in a row MISSED alone, met in a row",
        "all-reduce W=4 4 KiB <= nccl 5.00 / 20.00 = 0.25 met",
        "all-reduce W=4 64 MiB <= 295.0 µs 300.00 alone MISSED",
        "all-reduce W=4 64 MiB <= nccl 300.00 / 290.00 = 1.03 MISSED",
        "ag-gemm W=4 4096x12800x5120 <= cublas+nccl 740.00 / 830.00 = 0.89 met",
        "ag-gemm W=4 4096x12800x5120 <= 1.0 x cublas 740.00 / 750.00 = 0.99 met",
        "ag-gemm W=4 8192x12800x5120 <= cublas+nccl 1480.00 / 1700.00 = 0.87 met",
        "ag-gemm W=4 8192x12800x5120 <= 0.97 x cublas 1480.00 / 1500.00 = 0.99 MISSED",
        "4 met, 4 missed of 8",
    ]


def test_paths_without_results_are_one_line_and_exit_2(tmp_path, capsys):
    (tmp_path / "x.json").write_text("{}")
    for path, said in (
        (
            tmp_path / "missing",
            f"{tmp_path}/missing has no results, OP.wW.json; name a file or folder of benchmarks/run.py",
        ),
        (tmp_path, f"{tmp_path} has no results, OP.wW.json; name a file or folder of benchmarks/run.py"),
        (tmp_path / "x.json", f"{tmp_path}/x.json: not a results file of schema 1: schema is None"),
    ):
        assert targets.main([str(path)]) == 2
        assert capsys.readouterr() == ("", f"weft: {said}\n")


def test_the_other_targets(capsys, tmp_path):
    decode, prefill, skinny = (16, 5120, 6400), (2048, 5120, 6400), (16, 12800, 5120)
    reports = [
        canned.report(
            "gemm-ar",
            4,
            [canned.row(decode, "weft.auto", "weft", 21.0), canned.row(prefill, "weft.auto", "weft", 300.0)]
            + [canned.row(prefill, "cublas+nccl", "other", 350.0)],
        ),
        canned.report("gemm", 1, [canned.row(skinny, "weft.auto", "weft", 33.0), canned.row(skinny, "cublas", "other", 35.0)]),
        canned.report("all-gather", 2, [canned.row((1 << 20,), "weft.auto", "weft", 4.0)]),
    ]  # fmt: skip
    report.write(tmp_path / "x.json", reports)
    targets.main([str(tmp_path / "x.json")])
    told = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert told == [
        "gemm-ar W=4 16x5120x6400 <= 22.0 µs 21.00 alone met",
        "gemm-ar W=4 2048x5120x6400 <= cublas+nccl 300.00 / 350.00 = 0.86 met",
        "gemm-ar W=4 2048x5120x6400: 1.2 x over cublas+nccl 300.00 / 350.00 = 0.86 MISSED",
        "gemm W=1 16x12800x5120 <= cublas 33.00 / 35.00 = 0.94 met",
        "all-gather W=2 1 MiB <= 4.7 µs 4.00 alone met",
        "4 met, 1 missed of 5",
    ]
