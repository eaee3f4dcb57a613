"""Reports as an SVG picture with one panel each.

Times of collectives over bytes, TFLOP/s of GEMM ops over shapes, times of layers and models and, in a second panel, their
breakdown.

Drawn by matplotlib, which nothing else of weft needs: ``pip install 'weft[plot]'``.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from weft.bench.harness.report import Report, providers_of, row_of, shapes_of
from weft.bench.render import model_plot
from weft.bench.workloads import workload_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT = 9.0, 4.2  # inches per panel
# Distinguishable for colour-blind readers (Okabe and Ito), weft's own first.
COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999", "#7b4fa3", "#8c6d31")
# Text stays text, and equal reports give equal bytes: plots are kept in git.
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "weft", "font.family": "sans-serif", "font.size": 9}
PLAIN = {"Date": None, "Creator": None}


def check_matplotlib() -> None:
    """Raise ValueError if matplotlib is missing, before hours of measurement."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("plots need matplotlib, which is not installed: pip install 'weft[plot]'")


def svg(reports: Sequence[Report]) -> str:
    """Picture of the reports. A report without times has an empty panel. ValueError without matplotlib."""
    check_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    panels = [(draw, report) for report in reports for draw in _panels(report)]
    count = max(1, len(panels))
    with matplotlib.rc_context(STYLE):
        # A separate Figure: pyplot keeps state and looks for a display.
        figure = Figure(figsize=(WIDTH, HEIGHT * count), layout="constrained")
        for axes, (draw, report) in zip(figure.subplots(count, squeeze=False)[:, 0], panels, strict=False):
            draw(axes, report, COLOURS)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata=PLAIN)
    text = file.getvalue()
    return text[text.index("<svg") :]


def _panels(report: Report) -> list[Callable[[Axes, Report, Sequence[str]], None]]:
    if not report.subject:
        return [_panel]
    parts = any(row.parts_us for row in report.rows)
    return [model_plot.times, model_plot.parts] if parts else [model_plot.times]


def _panel(axes: Axes, report: Report, colours: Sequence[str]) -> None:
    timed, shapes = workload_of(report).unit != "TFLOP/s", shapes_of(report)
    unit = "µs" if timed else "TFLOP/s"
    axes.set_title(f"{report.op}, {report.dtype}, world size {report.world_size}: {unit}", loc="left")
    lines = _lines(report, shapes)
    if not lines:
        axes.set_axis_off()
        axes.text(0.02, 0.9, "nothing was timed", transform=axes.transAxes)
        return
    for number, (provider, points) in enumerate(lines.items()):
        style = {
            "color": colours[number % len(colours)], "marker": "o", "markersize": 4, "gid": provider,
            "linewidth": 2.5 if provider == "weft.auto" else 1.2,
        }  # fmt: skip
        # A line joins shapes that differ in M or in bytes only; a provider's first line is in the legend.
        for part, (_, run) in enumerate(groupby(points, key=lambda point: shapes[point[0]][1:])):
            places, values = zip(*run, strict=True)
            axes.plot(places, values, label=None if part else provider, **style)
    axes.margins(y=0.08)
    if timed:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    labels = [next(row.label for row in report.rows if row.shape == shape) for shape in shapes]
    axes.set_xticks(range(len(shapes)), labels, rotation=35, ha="right", fontsize=7)
    axes.grid(axis="y", which="both" if timed else "major", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)


def _lines(report: Report, shapes: Sequence[tuple[int, ...]]) -> dict[str, list[tuple[int, float]]]:
    """Points by provider, for shapes with a time: (index of the shape, TFLOP/s of a GEMM, else µs)."""
    lines: dict[str, list[tuple[int, float]]] = {}
    workload = workload_of(report)
    for provider in providers_of(report):
        for place, shape in enumerate(shapes):
            row = row_of(report, shape, provider)
            if row is not None and row.median_us:
                us = row.median_us
                value = workload.rate(report.world_size, shape, us) if workload.unit == "TFLOP/s" else us
                lines.setdefault(provider, []).append((place, value))
    return lines
