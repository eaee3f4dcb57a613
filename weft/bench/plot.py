"""Reports as an SVG picture, a panel for each: times of collectives over bytes, TFLOP/s of GEMM ops over shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from itertools import groupby

from weft.bench.limits import rate
from weft.bench.report import Report, providers_of, row_of, shapes_of
from weft.bench.shapes import COLLECTIVES

WIDTH, HEIGHT = 900, 420
LEFT, RIGHT, TOP, BOTTOM = 110, 170, 40, 90
# Told apart by colour-blind readers as well (Okabe and Ito), weft's own first.
COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999", "#7b4fa3", "#8c6d31")
INK = "#333333"


def svg(reports: Sequence[Report]) -> str:
    """One picture; reports without a time have an empty panel."""
    height = HEIGHT * max(1, len(reports))
    panels = "".join(
        f'<g transform="translate(0 {HEIGHT * number})">{_panel(report)}</g>' for number, report in enumerate(reports)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">'
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>{panels}</svg>\n'
    )


def _panel(report: Report) -> str:
    collective, shapes = report.op in COLLECTIVES, shapes_of(report)
    lines: dict[str, list[tuple[int, float]]] = {}
    for provider in providers_of(report):
        for place, shape in enumerate(shapes):
            row = row_of(report, shape, provider)
            if row is not None and row.median_us:
                us = row.median_us
                value = us if collective else rate(report.op, report.world_size, shape, report.dtype, us)
                lines.setdefault(provider, []).append((place, value))
    unit = "µs" if collective else "TFLOP/s"
    title = f"{report.op}, {report.dtype}, world size {report.world_size}: {unit}"
    parts = [_text(LEFT, 22, title, size=15)]
    values = [value for points in lines.values() for _, value in points]
    if not values:
        return parts[0] + _text(LEFT, 60, "nothing was timed")
    low, high, ticks = _scale(values, logarithmic=collective)

    def x(place: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (place + 0.5) / len(shapes)

    def y(value: float) -> float:
        f = math.log10 if collective else float
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - (f(value) - f(low)) / (f(high) - f(low)))

    for tick in ticks:
        parts.append(f'<path d="M{LEFT} {y(tick):.1f}H{WIDTH - RIGHT}" stroke="#dddddd"/>')
        parts.append(_text(LEFT - 8, y(tick) + 4, f"{tick:g}", anchor="end"))
    for place, shape in enumerate(shapes):
        label = next(row.label for row in report.rows if row.shape == shape)
        parts.append(_slanted(x(place), HEIGHT - BOTTOM + 14, label))
    for number, (provider, points) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        width = 3 if provider == "weft.auto" else 1.5
        # A line joins shapes that differ in M or in bytes only.
        for _, run in groupby(points, key=lambda point: shapes[point[0]][1:]):
            path = " ".join(f"{x(place):.1f},{y(value):.1f}" for place, value in run)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>')
        parts += [f'<circle cx="{x(p):.1f}" cy="{y(v):.1f}" r="3" fill="{colour}"/>' for p, v in points]
        parts.append(_text(WIDTH - RIGHT + 14, TOP + 12 + 18 * number, provider, colour=colour))
    return "".join(parts)


def _scale(values: Sequence[float], logarithmic: bool) -> tuple[float, float, list[float]]:
    """(lowest, highest, ticks) of the y axis."""
    if logarithmic:
        powers = range(math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)) + 1e-9) + 1)
        return 10.0 ** powers[0], 10.0 ** powers[-1], [10.0**power for power in powers]
    step = 10 ** math.floor(math.log10(max(values)))
    step = step / 2 if max(values) / step < 4 else step
    count = math.ceil(max(values) / step)
    return 0.0, count * step, [tick * step for tick in range(count + 1)]


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, colour: str = INK) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}">{escape(text)}</text>'
    )


def _slanted(x: float, y: float, text: str) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="end" font-size="10" fill="{INK}" '
        f'transform="rotate(-35 {x:.1f} {y:.1f})">{escape(text)}</text>'
    )
