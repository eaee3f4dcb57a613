"""Reports as an SVG picture with one panel each.

Times of collectives over bytes, TFLOP/s of GEMM ops over shapes, times of layers and models over their rooflines and, in a
second panel, their breakdown. A provider that computes less than the op is a dashed line, a limit.

Drawn by matplotlib, which nothing else of weft needs: ``pip install 'weft[plot]'``.
"""

from __future__ import annotations

import importlib.util
import io
import re
import textwrap
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import TYPE_CHECKING

from weft.bench.harness.report import Report, providers_of, row_of, shapes_of
from weft.bench.ops.shapes import size_label
from weft.bench.render import model_plot
from weft.bench.render.sheets import ceiling_of, title_of
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
    from matplotlib.ticker import LogFormatter

    axes.set_title(title_of(report), loc="left")
    lines = _lines(report)
    if not lines:
        axes.set_axis_off()
        axes.text(0.02, 0.9, "nothing was timed", transform=axes.transAxes)
        return
    places = _places(axes, report)
    ceilings = {row.provider for row in report.rows if row.role == "ceiling"}
    colour, dashes = iter(colours), cycle(("--", ":", "-."))
    for provider, values in lines.items():
        if provider in ceilings:
            label = textwrap.fill(f"limit: {provider}, {ceiling_of(provider)}", 30)
            style = {"color": "#555555", "linestyle": next(dashes), "linewidth": 1.0}
        else:
            label, style = provider, {"color": next(colour), "linewidth": 2.5 if provider == "weft.auto" else 1.2}
        # A line joins shapes that differ in one size; a provider's first line is in the legend.
        for run in places:
            points = [(place, values[shape]) for shape, place in run.items() if shape in values]
            if points:
                marker = {"marker": "" if provider in ceilings and len(points) > 1 else "o", "markersize": 4}
                axes.plot(*zip(*points, strict=True), label=label, gid=provider, **style, **marker)
                label = None
    axes.margins(y=0.08)
    timed = workload_of(report).unit != "TFLOP/s"
    if timed:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(LogFormatter())
        axes.yaxis.set_minor_formatter(LogFormatter())
    else:
        axes.set_ylim(bottom=0)
    axes.set_ylabel(f"µs of {workload_of(report).timed}" if timed else "TFLOP/s of a rank")
    model_plot.dress(axes, which="both" if timed else "major")


def _places(axes: Axes, report: Report) -> list[dict[tuple[int, ...], float]]:
    """Place of each shape on the x axis, by runs of shapes that differ in one size, which grows.

    The axis gets ticks and a name. Bytes are on a scale of powers of 2; other shapes stand side by side.
    """
    shapes, workload = shapes_of(report), workload_of(report)
    label = {row.shape: row.label for row in report.rows}
    if len(shapes[0]) == 1:
        return _places_of_bytes(axes, sorted(size for (size,) in shapes), workload.axis)
    varied = max(range(len(shapes[0])), key=lambda axis: len({shape[axis] for shape in shapes}))
    runs: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for shape in shapes:
        runs.setdefault((*shape[:varied], *shape[varied + 1 :]), []).append(shape)
    places, names, at = [], {}, 0.0
    for run in runs.values():
        run.sort(key=lambda shape: shape[varied])
        places.append({shape: at + number for number, shape in enumerate(run)})
        names[at + (len(run) - 1) / 2] = label[run[0]].rpartition(" ")[0]
        at += len(run) + 0.5
    ticks = {place: label[shape] for run in places for shape, place in run.items()}
    if not all(" " in text for text in ticks.values()):
        axes.set_xticks(list(ticks), list(ticks.values()), rotation=35, ha="right", fontsize=7)
        axes.set_xlabel(workload.axis)
        return places
    # "qwen3-32b qkv M=512": 512 at the shape, the name below its run.
    axes.set_xticks(list(ticks), [re.split("[ =]", text)[-1] for text in ticks.values()], fontsize=7)
    below = axes.secondary_xaxis(location=0)
    below.set_xticks(list(names), [f"\n{name}" for name in names.values()], fontsize=8)
    below.tick_params("x", length=0, pad=8)
    below.spines["bottom"].set_visible(False)
    below.set_xlabel(workload.axis)
    return places


def _places_of_bytes(axes: Axes, sizes: list[int], name: str) -> list[dict[tuple[int, ...], float]]:
    axes.set_xscale("log", base=2)
    ticks = [4**power for power in range(32) if sizes[0] <= 4**power <= sizes[-1]] or sizes[:1]
    axes.set_xticks(ticks, [size_label(size) for size in ticks], rotation=35, ha="right", fontsize=7)
    axes.set_xlabel(name)
    return [{(size,): size for size in sizes}]


def _lines(report: Report) -> dict[str, dict[tuple[int, ...], float]]:
    """Values by provider and shape, for shapes with a time: TFLOP/s of a GEMM, else µs."""
    lines: dict[str, dict[tuple[int, ...], float]] = {}
    workload = workload_of(report)
    for provider in providers_of(report):
        for shape in shapes_of(report):
            row = row_of(report, shape, provider)
            if row is not None and row.median_us:
                us = row.median_us
                value = workload.rate(report.world_size, shape, us) if workload.unit == "TFLOP/s" else us
                lines.setdefault(provider, {})[shape] = value
    return lines
