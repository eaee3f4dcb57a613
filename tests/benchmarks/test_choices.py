"""Tables in the docs of regret, of planned steps and of a layer's launches: the committed files' own."""

from pathlib import Path

from benchmarks import planned_steps, regrets
from benchmarks.lab import layer_launches
from weft.bench.models.breakdown import Kernel
from weft.bench.models.steps import config_of
from weft.costs.gpu import named
from weft.models.steps import Layout

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_tables_of_regret_are_those_of_the_committed_rows():
    page = (DOCS / "costs.md").read_text()
    for line in regrets.page():
        assert line in page


def test_rows_of_shapes_in_the_fit_are_not_reported_as_unseen(monkeypatch):
    monkeypatch.setattr(regrets, "UNSEEN", regrets.FILES[:1])
    assert regrets.unseen() == []
    monkeypatch.setattr(regrets, "FILES", ())
    assert regrets.unseen() == list(regrets.regrets(regrets.UNSEEN)) != []


def test_the_table_of_planned_steps_is_the_one_of_the_committed_cells():
    cells, page = planned_steps.read(planned_steps.FILE), (DOCS / "planning.md").read_text()
    for line in planned_steps.page(cells) if cells else ():
        assert line in page


def test_the_lists_of_launches_are_rows_of_the_committed_files():
    page = (DOCS / "layer-launches.md").read_text()
    lines = {line for row in layer_launches.rows() for line in layer_launches.table(row)}
    assert {line for line in page.splitlines() if line.startswith(("|", "**"))} <= lines


def test_kernels_of_a_layer_are_told_by_what_they_compute():
    layer = (
        "all_reduce_rms_norm_kernel", "small_m_kernel", "decode_attention_kernel", "small_m_kernel",
        "all_reduce_rms_norm_kernel", "matmul_route_schedule_kernel", "grouped_matmul_kernel", "grouped_matmul_kernel",
    )  # fmt: skip
    names = ["embedding", *layer * 12, "all_reduce_rms_norm_kernel", "small_m_kernel", "sample"]
    step = [Kernel(name, 5.0 * at, 5.0 * at + 4) for at, name in enumerate(names)]
    rows = layer_launches.layer_rows([step], 12)
    assert [row["kernel"] for row in rows] == list(layer) and {row["adds"] for row in rows} == {5.0}
    config = config_of("qwen3-30b-a3b", 12)
    launches = layer_launches.layer_of(config, (1, 1024, 1), Layout(world_size=2))
    layer_launches.named_kernels(rows, launches, named("h200"), 2)
    assert [row["what"] for row in rows] == [
        "all-reduce + norm", "qkv", "attention", "o", "all-reduce + norm", "router and schedule", "experts gate, up",
        "experts down",
    ]  # fmt: skip
    # Four experts in the mean, of 2 x 2048 x 768 weights in 16 bits.
    assert rows[-2]["floor"] == round(4 * 2 * 2048 * 768 * 2 / 4.3e6, 2)
