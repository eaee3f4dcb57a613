"""Tables on terminals of any width, and as Markdown."""

import io

from rich.console import Console

from tests.bench import canned
from weft.bench.render import table
from weft.bench.render.sheets import sheet


def test_printed_and_as_markdown():
    made = sheet(canned.all_reduce())
    console = Console(file=io.StringIO(), width=200, color_system=None)
    table.show(made, console)
    assert "4 KiB   5.00 (3.10)           4.50  20.0 (18.2)" in console.file.getvalue()
    narrow = Console(file=io.StringIO(), width=20, color_system=None)  # a file: nobody's terminal
    table.show(made, narrow)
    assert narrow.file.getvalue() == console.file.getvalue()
    lines = table.markdown(made).splitlines()
    assert lines[0].startswith("| shape | weft.auto |")
    assert lines[1] == "|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    assert lines[3] == "| 64 MiB | 300 | WRONG | 290 / 310 | – | 0.97x | 300–300 | 336 | 87% |"


def test_a_table_that_is_too_wide_for_the_terminal_is_turned():
    console = Console(file=io.StringIO(), width=80, color_system=None, force_terminal=True)
    table.show(sheet(canned.all_reduce()), console)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert lines[1:5] == [
        "shape                 4 KiB     64 MiB",
        "weft.auto       5.00 (3.10)        300",
        "weft.one_shot          4.50      WRONG",
        "nccl            20.0 (18.2)  290 / 310",
    ]
    # Labels of 43 columns: a table for each of the two shapes.
    narrow = Console(file=io.StringIO(), width=80, color_system=None, force_terminal=True)
    table.show(sheet(canned.ag_gemm()), narrow)
    lines = narrow.file.getvalue().splitlines()
    assert sum(line.startswith("weft.auto ") for line in lines) == 2
    assert max(map(len, lines[:-3])) <= 80
    assert "…" not in narrow.file.getvalue()
