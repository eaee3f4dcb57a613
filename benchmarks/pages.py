"""Tables of pages, between ``<!-- NAME -->`` and ``<!-- end -->``: the prose around them stands in the page alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from weft.runtime.files import put

DOCS = Path(__file__).resolve().parent.parent / "docs"


def with_tables(text: str, tables: Mapping[str, str]) -> str:
    """Text of a page with these tables in place of those between its marks."""
    for name, table in tables.items():
        head, mark, rest = text.partition(f"<!-- {name} -->\n")
        old, end, tail = rest.partition("<!-- end -->\n")
        if not (mark and end) or "<!-- " in old:
            raise ValueError(f"the page has no <!-- {name} --> with an <!-- end --> before the next mark")
        text = head + mark + table.rstrip("\n") + "\n" + end + tail
    return text


def write(page: Path, tables: Mapping[str, str]) -> None:
    try:
        put(page, with_tables(page.read_text(), tables))
    except ValueError as error:
        raise ValueError(f"{page}: {error}") from None
