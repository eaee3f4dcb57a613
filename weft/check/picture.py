"""Picture of a race as text: two timelines, the order there is, and the arrow that is missing."""

from __future__ import annotations

from weft.check.detector.findings import RACES, Finding, Side

_WIDTH, _ARROW = 50, 6  # of a column, and of an arrow at least


def picture(finding: Finding) -> list[str]:
    """Lines of the picture; none for a finding that is not about the order of two accesses."""
    if finding.kind not in RACES or len(finding.sides) != 2:
        return []
    earlier, later = finding.sides
    rows = [_row(earlier.task, later.task), _row("|", "|")]
    start, _ = synchronised(earlier)
    rows.append(_row(f"o {start}" if start else "|", "|"))
    rows.append(_row(f"* {access(earlier)}", "|"))
    known, ended = synchronised(later)
    if ended and later.ended.find(earlier.task) >= 0:
        rows.append(_row("|", "|"))
        rows.append(_arrow(f"o {ended} ", "-", f"o {known}"))
    elif known:
        rows.append(_row("|", f"o {known}"))
    rows.append(_row("|", "|"))
    rows.append(_arrow("|   ", ".", f"* {access(later)}", " no order "))
    rows.append(_row("|", "|"))
    return [row.rstrip() for row in rows]


def access(side: Side) -> str:
    """Verb and place of a side."""
    return f"{side.verb}, {side.place}" if side.place else side.verb


def synchronised(side: Side) -> tuple[str, str]:
    """Last synchronisation of a side, and the write that ended it, with their places; or ""."""
    sync = side.sync.replace(f" of {side.task}", "")
    verb, _, rest = side.ended.partition(" of rank ")
    place = rest.rpartition(" in ")[2].partition(",")[0] if " in " in rest else ""
    return sync, f"{verb}{f', {place}' if place else ''}" if side.ended else ""


def _row(left: str, right: str) -> str:
    return f"{_cut(left):<{_WIDTH}}{_cut(right)}"


def _cut(text: str) -> str:
    return text if len(text) < _WIDTH else f"{text[: _WIDTH - 4]}..."


def _arrow(left: str, line: str, right: str, says: str = "") -> str:
    """Row with an arrow from the left column to the right one."""
    left = left if len(left) < _WIDTH - _ARROW else f"{left[: _WIDTH - _ARROW - 4]}... "
    return f"{left}{says.center(_WIDTH - len(left) - 2, line)}> {_cut(right)}"
