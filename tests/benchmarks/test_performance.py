"""The pages of measured results, from canned ones."""

import json
from dataclasses import replace

import pytest

from benchmarks import performance, summary
from benchmarks.pages import with_tables
from benchmarks.pictures import cast, double_buffering, engines
from benchmarks.pictures.badges import badges
from benchmarks.pictures.svg import DARK, LIGHT
from tests.bench import canned
from weft.bench.harness import report


def written(folder, **reports):
    """Exit status with these reports as the results, by folder."""
    for name, made in reports.items():
        for one in made:
            report.write(folder / "results" / name.replace("_", "-") / f"{one.op}.w4.json", [one])
    readme = folder / "README.md"
    front = folder / "docs" / "performance.md"
    front.parent.mkdir(exist_ok=True)
    front.write_text("# Performance\n\n<!-- tables -->\nold\n<!-- end -->\n")
    readme.write_text("# weft\n\n<!-- measured -->\nold\n<!-- end -->\n\n## Next\n")
    return performance.main(folder / "results", front, readme)


def test_pages_are_written_from_the_results(tmp_path):
    pytest.importorskip("matplotlib")
    stale = tmp_path / "docs" / "performance" / "no-longer-there.svg"
    stale.parent.mkdir(parents=True)
    stale.touch()
    one_op = [canned.ag_gemm()]
    reports = {"h200_x2": [canned.all_reduce(), canned.model()], "h200_x4": one_op, "h200_x4_more": one_op}
    assert written(tmp_path, **reports) == 0
    assert not stale.exists()
    front = (tmp_path / "docs" / "performance.md").read_text()
    for words in (
        "### Two H200s, summary\n",
        "| all-reduce | [h200-x2](performance/h200-x2.md) | nccl | 2 | 0.97x | 1.97x | 4.00x | 64 MiB |",
        "### all-reduce, bf16, world size 4 (4 x NVIDIA H200)\n\nweft abc; 2026-11-20; 4 x NVIDIA H200\n",
        "| 4 KiB | 5.00 (3.10) | 5.00–5.00 | nccl | 20.0 (18.2) | 20.0–20.0 | 4.00x | 1 | 24% |",
        "| 64 MiB | 300 | 300–300 | nccl | 290 | 290–290 | 0.97x | 336 | 87% |",
        "### model of qwen3-32b",
        "- [h200-x2](performance/h200-x2.md): all-reduce, model of qwen3-32b.",
        "- [h200-x4-more](performance/h200-x4-more.md): ag-gemm.",
    ):
        assert words in front
    further = (tmp_path / "docs" / "performance" / "summary.md").read_text()
    assert "### Four H200s, summary\n" in further and "| ag-gemm | [h200-x4](h200-x4.md) | cublas+nccl | 2 |" in further
    assert "Two H200s" not in further
    readme = (tmp_path / "README.md").read_text()
    row = "| all-reduce, all-gather, reduce-scatter, all-to-all | nccl | 2 | 0.97x | 1.97x | 4.00x |"
    assert row in readme and "| steps of Qwen3-32B | eager, compile | 1 |" in readme
    assert readme.startswith("# weft\n\n<!-- measured -->\n|") and readme.endswith("|\n<!-- end -->\n\n## Next\n")
    # Only h200-x2 has tables on the front page, and -more is not in the summary.
    assert "### ag-gemm" not in front and front.count("h200-x4-more.md") == 1
    page = (tmp_path / "docs" / "performance" / "h200-x2.md").read_text()
    for words in ("- torch: 2.11.0", "`weft bench x`", "- empty_us: 1.25", "| 64 MiB | 300 | WRONG |"):
        assert words in page
    assert "### model of qwen3-32b, world size 4: µs per layer" in page
    pictures = [line.split("(")[1].rstrip(")") for line in page.splitlines() if line.startswith("![")]
    assert len(pictures) == 2
    folder = tmp_path / "docs" / "performance"
    others = {file.name for file in folder.iterdir()} - set(pictures)
    assert {name for name in others if name.endswith(".md")} == {
        "gemms.md",
        "h200-x2.md",
        "h200-x4.md",
        "h200-x4-more.md",
        "prediction.md",
        "summary.md",
    }
    assert {name for name in others if name.endswith(".svg")} == {"h200-x4-ag-gemm-w4-bf16.svg", "prediction.svg"}


def test_results_of_changed_sources_and_none_at_all_are_refused(tmp_path, capsys):
    changed = canned.all_reduce()
    changed.machine["clean"] = False
    assert written(tmp_path, h200_x4=[changed]) == 2
    assert "was measured on sources that no commit holds" in capsys.readouterr().err
    lost = canned.all_reduce()
    lost.machine = {key: value for key, value in lost.machine.items() if key != "clean"} | {
        "revision": "abc with changes"
    }
    assert written(tmp_path, h200_x2=[lost]) == 2
    assert "was measured on sources that no commit holds" in capsys.readouterr().err
    assert performance.main(tmp_path / "nothing", tmp_path / "x.md") == 2
    assert "weft bench --out" in capsys.readouterr().err
    assert [file.name for file in (tmp_path / "docs").iterdir()] == ["performance.md"]
    assert "\nold\n" in (tmp_path / "docs" / "performance.md").read_text()


def test_the_committed_pages_are_those_of_the_committed_results():
    """`python -m benchmarks.performance` writes them."""
    reports = performance.reports_of(performance.RESULTS)
    tables = {name: performance.joined(found) for name, found in reports.items()}
    front, pages, beside = performance.texts(reports, tables, performance.RESULTS)
    assert with_tables(performance.PAGE.read_text(), {"tables": front}) == performance.PAGE.read_text()
    readme = performance.README.read_text()
    assert with_tables(readme, {"measured": summary.measured(tables)}) == readme
    folder = performance.PAGE.with_suffix("")
    assert {file.name: file.read_text() for file in folder.glob("*.md")} == pages
    assert {file.parent.name: file.read_text() for file in performance.RESULTS.glob("*/README.md")} == beside
    named = {
        line.split("(")[1].rstrip(")") for text in pages.values() for line in text.splitlines() if line[:2] == "!["
    }
    assert {file.name for file in folder.glob("*.svg")} == named


def test_protocols_that_differ_name_their_ops_or_rows():
    gemm, mlp, answers = (replace(canned.model(), op=op) for op in ("gemm", "mlp", "generate"))
    assert performance.values_of("rounds", [(gemm, "quick"), (mlp, "quick")]) == ["- rounds: quick"]
    assert performance.values_of("rounds", [(answers, "3"), (gemm, "quick"), (mlp, "quick")]) == [
        "- rounds: quick",
        "- rounds of generate: 3",
    ]
    some, others = (replace(canned.model(), rows=rows) for rows in (canned.model().rows[2:], canned.model().rows[:2]))
    labels = ", ".join(dict.fromkeys(row.label for row in others.rows))
    assert performance.values_of("rounds", [(some, "quick"), (others, "3"), (gemm, "quick")]) == [
        "- rounds: quick",
        f"- rounds of model {labels}: 3",
    ]


def test_a_page_names_every_command_and_machine_of_a_table():
    first, second = (replace(canned.model(), rows=rows) for rows in (canned.model().rows[:3], canned.model().rows[3:]))
    first.machine, second.machine = first.machine | {"uuid": "GPU-1"}, second.machine | {"uuid": "GPU-2"}
    first.command, second.command = "weft bench model@decode:1x1", "weft bench model@prefill:1x1"
    first.protocol, second.protocol = {"empty_us": 2.71}, {"empty_us": 2.938}
    text = performance.page("h200-x4", [first, second], performance.joined([first, second]), "", [])
    assert "- `weft bench model@decode:1x1`\n- `weft bench model@prefill:1x1`\n- empty_us: 2.71 to 2.94\n" in text
    assert text.count("\n## ") == 1
    assert "(first GPU of each machine: GPU-1, GPU-2)" in text


def test_the_summary_tells_in_how_many_rows_a_baseline_ran():
    steps = canned.model()
    ran = {row.shape for row in steps.rows if row.provider == "torch.compile" and row.median_us}
    assert "| eager, compile (1) | 2 |" in summary.row_of(steps, "")
    rows = [row for row in steps.rows if row.shape in ran]
    assert "| eager, compile | 1 |" in summary.row_of(replace(steps, rows=rows), "")


def test_runs_with_no_step_in_common_share_a_table():
    decode, prefill = (
        replace(canned.model(), rows=rows) for rows in (canned.model().rows[:3], canned.model().rows[3:])
    )
    other = replace(decode, world_size=2)
    prefill.machine = prefill.machine | {"revision": "def"}
    (both, alone) = performance.joined([decode, other, prefill])
    assert (both.rows, both.machine["revision"]) == (canned.model().rows, "abc, def")
    assert alone == other
    assert performance.joined([decode, prefill, decode]) == [both, decode]
    assert performance.pictures_of("h200-x4", [both, both])[1] == "h200-x4-model-qwen3-32b-w4-bf16-2.svg"


def test_the_committed_pictures_and_the_table_of_engines_are_those_of_the_committed_files():
    """`python -m benchmarks.performance` and `python -m benchmarks.pictures` write them."""
    readme, pictures = performance.README.read_text(), performance.PAGE.parent / "pictures"
    shown = engines.pairs()
    assert with_tables(readme, {"engines": engines.table(shown)}) == readme
    for colours in (LIGHT, DARK):
        assert (pictures / f"engines-{colours.name}.svg").read_text() == engines.picture(shown, colours)
        assert (pictures / f"double-buffering-{colours.name}.svg").read_text() == double_buffering.picture(colours)
    assert {name: (pictures / name).read_text() for name in badges()} == badges()


def test_the_newest_version_of_an_engine_is_shown(tmp_path):
    run = {"model": "qwen3-8b", "device": engines.GPU, "world_size": 2}
    rows = [{"prompts": 1, "tokens": 128, "per_token_ms": 4.0}, {"prompts": 1, "tokens": 8192, "per_token_ms": 9.0}]
    for folder, version, factor in (("a", "0.9.0", 3.0), ("b", "0.26.0", 2.0)):
        (tmp_path / folder).mkdir()
        for engine, times in (("weft", 1.0), ("vllm", factor)):
            made = [{**row, "per_token_ms": row["per_token_ms"] * times} for row in rows]
            report = run | {"engine": engine, "version": version, "rows": made}
            (tmp_path / folder / f"{engine}.json").write_text(json.dumps(report))
    [pair] = engines.pairs(tmp_path)
    assert (pair.model, pair.form, pair.engine, pair.version) == ("Qwen3-8B", "bf16", "vLLM", "0.26.0")
    assert pair.rows == {1: (4.0, 8.0)}
    assert "| Qwen3-8B, bf16, two H200s, beside vLLM 0.26.0 | 4.00, 8.00 (2.00x) | – |" in engines.table([pair])


def test_a_report_is_shown_line_by_line_as_it_is_printed():
    text = cast.picture(["1. race  x of rank 0", "   <load>"])
    assert text.count('<text id="l') == 2 and "\u00a0\u00a0\u00a0&lt;load&gt;" in text and cast.COMMAND in text
