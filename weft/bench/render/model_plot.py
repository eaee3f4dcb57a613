"""Panels of a model benchmark: each step's times over the roofline, and the breakdown, as bars."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.bench.harness.limits import GPUS
from weft.bench.harness.report import Report, providers_of, row_of, shapes_of
from weft.bench.models.breakdown import KINDS
from weft.bench.render.sheets import title_of
from weft.bench.workloads import workload_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

GAP_COLOUR = "#dddddd"


def times(axes: Axes, report: Report, colours: Sequence[str]) -> None:
    """Draw each step's time over the roofline's, a bar per provider.

    The roofline's time stands below the step. Without a roofline the bars are milliseconds.
    """
    shapes = shapes_of(report)
    workload, limits = workload_of(report), GPUS.get(report.machine["gpu"])
    floors = [workload.floor_us(report.world_size, shape, limits) for shape in shapes]
    has_roofline = all(floors)
    units = floors if has_roofline else [1e3] * len(shapes)
    times_of = {p: [_us(report, shape, p) for shape in shapes] for p in providers_of(report)}
    timed = {provider: times for provider, times in times_of.items() if any(times)}
    width = 0.8 / max(1, len(timed))
    for number, (provider, all_us) in enumerate(timed.items()):
        bars = {place: us / unit for place, (us, unit) in enumerate(zip(all_us, units, strict=True)) if us}
        axes.bar(
            [place - 0.4 + (number + 0.5) * width for place in bars], list(bars.values()), width, label=provider,
            color=colours[number % len(colours)], gid=provider,
        )  # fmt: skip
    labels = [next(row.label for row in report.rows if row.shape == shape) for shape in shapes]
    about, ratio = workload.axis, f"ms of {workload.timed}"
    if has_roofline:
        axes.axhline(1, color="black", linewidth=1.2, label="roofline")
        unit, name = (1e3, "ms") if workload.in_milliseconds else (1, "µs")
        labels = [f"{label}\n{floor / unit:.3g} {name}" for label, floor in zip(labels, floors, strict=True)]
        about, ratio = f"{workload.axis}, and the roofline of {workload.timed}", "time over the roofline's"
    axes.set_xticks(range(len(shapes)), labels, fontsize=7)
    axes.set_xlabel(about)
    axes.set_ylabel(ratio)
    axes.set_title(title_of(report), loc="left")
    if timed:
        dress(axes)


def parts(axes: Axes, report: Report, colours: Sequence[str]) -> None:
    """Draw microseconds per layer, a stacked bar for each row with a breakdown."""
    rows, layers = [row for row in report.rows if row.parts_us], workload_of(report).step_layers
    lefts = [0.0] * len(rows)
    for number, kind in enumerate(KINDS):
        values = [(row.parts_us or {}).get(kind, 0.0) / layers for row in rows]
        if any(values):
            colour = GAP_COLOUR if kind == "gap" else colours[number % len(colours)]
            axes.barh(range(len(rows)), values, 0.7, lefts, label=kind, color=colour, gid=kind)
        lefts = [left + value for left, value in zip(lefts, values, strict=True)]
    axes.set_yticks(range(len(rows)), [f"{row.label}  {row.provider}" for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("µs per layer")
    axes.set_ylabel("step and provider", labelpad=12)
    axes.set_title(f"{title_of(report)}: breakdown", loc="left")
    dress(axes, "x")


def _us(report: Report, shape: tuple[int, ...], provider: str) -> float | None:
    row = row_of(report, shape, provider)
    return None if row is None else row.median_us


def dress(axes: Axes, grid: str = "y", which: str = "major") -> None:
    """Draw grid and legend."""
    axes.grid(axis=grid, which=which, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
