"""The zoo as a table of docs/check.md: ``python -m tests.zoo.table`` writes it there."""

from __future__ import annotations

from pathlib import Path

from tests.zoo.catalogue import EXHIBITS
from weft.simulator.findings import REMEDIES

PAGE = Path(__file__).parent.parent.parent / "docs" / "check.md"


def zoo() -> str:
    rows = ["| what is wrong | found as | example |", "|---|---|---|"]
    for case in EXHIBITS:
        module = case.main.__module__.rpartition(".")[2]
        star = " *" if case.published else ""
        rows.append(f"| {case.what}{star} | `{case.kind}` | `{module}.{case.name}` |")
    return "\n".join(rows)


def kinds() -> str:
    rows = ["| kind | what to do |", "|---|---|"]
    return "\n".join(rows + [f"| `{kind}` | {remedy} |" for kind, remedy in REMEDIES.items()])


def with_tables(text: str) -> str:
    """The page with what stands between ``<!-- NAME -->`` and ``<!-- end -->`` made anew."""
    for name, make in (("zoo", zoo), ("kinds", kinds)):
        head, _, rest = text.partition(f"<!-- {name} -->\n")
        tail = rest.partition("<!-- end -->")[2]
        text = f"{head}<!-- {name} -->\n{make()}\n<!-- end -->{tail}"
    return text


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
