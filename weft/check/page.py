"""Report as one self-contained HTML page, with a drawing of each race, for a bug report."""

from __future__ import annotations

from html import escape

from weft.check.detector.findings import RACES, Finding
from weft.check.explanations import EXPLANATIONS
from weft.check.picture import access, synchronised
from weft.check.report import Found, Report, side_lines

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; color: #222; }
pre { background: #f5f5f5; padding: .6em; overflow-x: auto; } h2 { border-top: 1px solid #ccc; padding-top: .8em; }
svg text { font: 12px ui-monospace, monospace; } .what { color: #555; }
"""
_LEFT, _RIGHT, _TOP, _STEP = 150, 610, 40, 44


def page(report: Report) -> str:
    """HTML text of a report."""
    parts = [_section(number, entry, report.script) for number, entry in enumerate(report.wrong, 1)]
    body = "\n".join(parts) or "<p>No findings.</p>"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>weft check {escape(report.script)}</title>'
        f"<style>{_STYLE}</style></head><body>\n<h1>weft check {escape(report.script)}</h1>\n<p>{escape(report.summary)}</p>\n"
        f"{body}\n</body></html>\n"
    )


def _section(number: int, entry: Found, script: str) -> str:
    finding = entry.finding
    sides = "".join(f"<pre>{escape(chr(10).join(side_lines(side)))}</pre>" for side in finding.sides)
    detail = f"<pre>{escape(chr(10).join(finding.detail))}</pre>" if finding.detail else ""
    return (
        f"<h2>{number}. {escape(finding.head)}</h2><p>{escape(finding.message)}</p>\n"
        f'<p class="what">{escape(EXPLANATIONS[finding.kind].what)}</p>\n{drawing(finding)}\n{sides}{detail}'
        f"<p><b>Remedy:</b> {escape(finding.remedy)}</p>\n<p>Seen {entry.count} time(s) in {entry.schedules} schedule(s). "
        f"Replay:</p><pre>{escape(entry.replay.command(script))}</pre>"
    )


def drawing(finding: Finding) -> str:
    """Drawing of two timelines, as the text of ``picture``; "" for another finding."""
    if finding.kind not in RACES or len(finding.sides) != 2:
        return ""
    earlier, later = finding.sides
    events = [(_LEFT, synchronised(earlier)[0], "#888"), (_LEFT, access(earlier), "#c00")]
    known, ended = synchronised(later)
    arrows = []
    if ended and earlier.task in later.ended:
        events.append((_LEFT, ended, "#888"))
        arrows.append((len(events) - 1, len(events), "#888", ""))
    events.append((_RIGHT, known, "#888"))
    events.append((_RIGHT, access(later), "#c00"))
    arrows.append((1, len(events) - 1, "#c00", "no order"))
    height = _TOP + _STEP * len(events)
    drawn = [
        f'<text x="{x}" y="16" text-anchor="middle">{escape(side.task)}</text>'
        f'<line x1="{x}" y1="24" x2="{x}" y2="{height}" stroke="#bbb"/>'
        for x, side in ((_LEFT, earlier), (_RIGHT, later))
    ]
    for start, end, colour, says in arrows:
        (x1, y1), (x2, y2) = (_point(events, index) for index in (start, end))
        dashes = ' stroke-dasharray="6 5"' if says else ""
        drawn.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}"{dashes} marker-end="url(#head)"/>'
        )
        if says:
            drawn.append(f'<text x="{(x1 + x2) / 2}" y="{(y1 + y2) / 2 - 6}" fill="{colour}">{says}</text>')
    for index, (x, text, colour) in enumerate(events):
        y = _point(events, index)[1]
        drawn.append(
            f'<circle cx="{x}" cy="{y}" r="5" fill="{colour}"/><text x="{x + 10}" y="{y + 4}">{escape(text)}</text>'
        )
    size = 'markerWidth="9" markerHeight="9" refX="8" refY="4" orient="auto"'
    head = f'<marker id="head" {size}><path d="M0,0 L8,4 L0,8 z"/></marker>'
    return f'<svg viewBox="0 0 1040 {height}" width="100%"><defs>{head}</defs>{"".join(drawn)}</svg>'


def _point(events: list[tuple[int, str, str]], index: int) -> tuple[int, int]:
    return events[index][0], _TOP + _STEP * index + 10
