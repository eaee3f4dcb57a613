"""Elements of SVG as text, and the colours of light and dark pages."""

from __future__ import annotations

import html
from collections.abc import Iterable
from dataclasses import dataclass

FONT = "ui-sans-serif, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


@dataclass(frozen=True, slots=True, kw_only=True)
class Palette:
    """Colours of a page. ``weft``: weft's own bars and GEMMs; ``wire``: copies and the engine beside it."""

    name: str
    ink: str
    faint: str
    line: str
    weft: str
    wire: str
    other: str
    arrow: str


LIGHT = Palette(
    name="light", ink="#1f2328", faint="#59636e", line="#d1d9e0",
    weft="#d55e00", wire="#0072b2", other="#8c959f", arrow="#1f2328",
)  # fmt: skip
DARK = Palette(
    name="dark", ink="#f0f6fc", faint="#9198a1", line="#3d444d",
    weft="#ff8c42", wire="#56b4e9", other="#6e7681", arrow="#f0f6fc",
)  # fmt: skip


def text(
    x: float, y: float, words: str, fill: str, size: float = 12, anchor: str = "start", weight: str = "normal"
) -> str:
    shown = html.escape(words, quote=False)
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} fill="{fill}" font-size="{size}" font-weight="{weight}">{shown}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, title: str = "") -> str:
    told = f"<title>{html.escape(title, quote=False)}</title>" if title else ""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2" fill="{fill}">{told}</rect>'


def line(x1: float, y1: float, x2: float, y2: float, stroke: str, width: float = 1, end: str = "") -> str:
    marker = f' marker-end="url(#{end})"' if end else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}" stroke-width="{width}"{marker}/>'


def document(width: float, height: float, title: str, parts: Iterable[str], font: str = FONT) -> str:
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{font}">'
    return "\n".join([head, f"<title>{html.escape(title, quote=False)}</title>", *parts, "</svg>", ""])


def badge(label: str, value: str) -> str:
    """A label on grey and a value on green, readable on light and dark pages."""
    left, right = 6.6 * len(label) + 14, 6.6 * len(value) + 14
    parts = [
        f'<rect width="{left + right:.0f}" height="20" rx="3" fill="#4d555e"/>',
        f'<rect x="{left:.0f}" width="{right:.0f}" height="20" rx="3" fill="#1a7f37"/>',
        text(left / 2, 14, label, "#ffffff", 11, "middle"),
        text(left + right / 2, 14, value, "#ffffff", 11, "middle"),
    ]
    return document(left + right, 20, f"{label}: {value}", parts)
