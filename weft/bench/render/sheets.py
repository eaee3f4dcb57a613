"""Reports as sheets, tables of text: pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.bench.harness.limits import GPUS
from weft.bench.harness.report import (
    REFUSED,
    Report,
    Row,
    best_other,
    providers_of,
    row_of,
    shapes_of,
    weft_row,
)
from weft.bench.models.breakdown import KINDS
from weft.bench.workloads import workload_of

NONE = "–"
FILL = "tile fill"
# Ceilings that are not the op's computation: what they are instead.
CEILINGS = {
    "cublas.dense": "one GEMM of as many rows, with one expert's weight",
    "cublas.weights": "one GEMM of the mean number of an expert's rows, with the weights of all active experts",
    "weft.gemm_alone": "weft's own grouped GEMM of the same rows, without what goes between the ranks",
    "nccl.counts_known": "the rows alone, without the sort and the counts by which frameworks learn how many there are",
    "weft.local": "each rank's attention to its own tokens, of all heads, without exchange and merge",
    "local": "weft's own kernel with a rank's share of the work, without the exchange",
}


def ceiling_of(provider: str) -> str:
    """Work that a ceiling computes in place of the op."""
    return CEILINGS.get(provider, "the GEMM alone")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """Title, header and cells as text.

    ``slower``: (row, column) of speed-ups below 1; ``notes``: sentences below the table.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    slower: frozenset[tuple[int, int]]
    notes: tuple[str, ...]


def sheets(report: Report) -> list[Sheet]:
    """All tables of a report: the times, and eager rows and the breakdown if they were measured."""
    return [made for made in (sheet(report), eager_sheet(report), breakdown_sheet(report)) if made is not None]


def sheet(report: Report) -> Sheet:
    """Table with each provider's time per shape, weft's speed-ups and spread, and its share of the limit."""
    providers, workload = providers_of(report), workload_of(report)
    milli = workload.in_milliseconds
    has_eager = any(row.role == "weft" and row.eager_us and row.mode != "eager" for row in report.rows)
    named = ["over eager"] if report.subject else []
    named += ["speed-up", *(["eager speed-up"] if has_eager else [])]
    first = 1 + len(providers)
    rows, slower = [], set()
    for number, shape in enumerate(shapes_of(report)):
        ours = weft_row(report, shape)
        gains = [ratio(ours, row_of(report, shape, "torch.eager"))] if report.subject else []
        gains += [ratio(ours, best_other(report, shape))]
        gains += [ratio(ours, best_other(report, shape, "eager_us"), "eager_us")] if has_eager else []
        slower |= {(number, first + place) for place, gain in enumerate(gains) if gain is not None and gain < 1}
        limit, share = limit_of(report, shape, ours)
        rows.append(
            (
                label_of(report, shape),
                *(cell(row_of(report, shape, provider), milli) for provider in providers),
                *(plain(gain, "{:.2f}x") for gain in gains),
                spread(ours, milli),
                *fill_of(report, shape),
                limit,
                plain(share, "{:.0%}"),
            )
        )
    last = "roofline" if report.subject else workload.unit
    return Sheet(
        title=f"{title_of(report)}, {workload.time_unit}",
        header=(
            "step" if report.subject else "shape",
            *providers,
            *named,
            "p10–p90",
            *fill_header(report),
            last,
            "of limit",
        ),
        rows=tuple(rows),
        slower=frozenset(slower),
        notes=tuple(_notes(report, providers)),
    )


def title_of(report: Report) -> str:
    subject = f"{report.op} of {report.subject}" if report.subject else report.op
    where = "simulated ranks" if report.is_simulated else f"{report.world_size} x {report.machine['gpu']}"
    where += f", {report.protocol['nodes']}" if "nodes" in report.protocol else ""
    return f"{subject}, {report.dtype}, world size {report.world_size} ({where})"


def label_of(report: Report, shape: Sequence[int]) -> str:
    label = next(row.label for row in report.rows if row.shape == tuple(shape))
    named = not report.subject and not label[0].isdigit() and len(shape) == 3
    return f"{label} ({'x'.join(map(str, shape))})" if named else label


def ratio(ours: Row | None, other: Row | None, field: str = "median_us") -> float | None:
    """Time of ``other`` over weft's."""
    if ours is None or other is None or not getattr(ours, field) or not getattr(other, field):
        return None
    return getattr(other, field) / getattr(ours, field)


def limit_of(report: Report, shape: Sequence[int], row: Row | None) -> tuple[str, float | None]:
    """(rate of an op, or roofline of a step; share of the limit, which is 1 at best)."""
    workload, us = workload_of(report), None if row is None else row.median_us
    # No limit of several nodes was measured.
    limits = None if "nodes" in report.protocol else GPUS.get(report.machine["gpu"])
    floor = workload.floor_us(report.world_size, shape, limits)
    share = floor / us if floor and us else None
    if report.subject:
        return NONE if floor is None else _time(floor, workload.in_milliseconds), share
    rate = workload.rate(report.world_size, shape, us) if us and not report.is_simulated else None
    return plain(rate, "{:.0f}"), share


def fill_header(report: Report) -> tuple[str, ...]:
    """Header of a column for the tile fill; () if no row has one."""
    return (FILL,) if any(FILL in (row.figures or {}) for row in report.rows) else ()


def fill_of(report: Report, shape: Sequence[int]) -> tuple[str, ...]:
    """Cells below ``fill_header``: the share of the rows of tiles that are pairs, in the timed routing."""
    of_shape = next((row.figures for row in report.rows if row.shape == tuple(shape) and row.figures), {})
    return tuple(plain(of_shape.get(name), "{:.2f}") for name in fill_header(report))


def spread(row: Row | None, milli: bool) -> str:
    """Percentiles 10 and 90 of a row's samples."""
    if row is None or row.p10_us is None or row.p90_us is None:
        return NONE
    return f"{_time(row.p10_us, milli)}–{_time(row.p90_us, milli)}"


def eager_sheet(report: Report) -> Sheet | None:
    """Table of calls in a row without a graph, with the host's time; None if they were not measured."""
    if all(row.eager_row_us is None for row in report.rows):
        return None
    providers = [name for name in providers_of(report) if any(row_of(report, s, name) for s in shapes_of(report))]
    rows, slower = [], set()
    for number, shape in enumerate(shapes_of(report)):
        gain = ratio(weft_row(report, shape), best_other(report, shape, "eager_row_us"), "eager_row_us")
        if gain is not None and gain < 1:
            slower.add((number, 1 + len(providers)))
        cells = [eager_cell(row_of(report, shape, name)) for name in providers]
        rows.append((label_of(report, shape), *cells, plain(gain, "{:.2f}x")))
    return Sheet(
        title=f"{title_of(report)}, eager, µs a call [of the host]",
        header=("shape", *providers, "speed-up"),
        rows=tuple(rows),
        slower=frozenset(slower),
        notes=("Calls in a row without a CUDA graph. In brackets: the host's time to submit a call.",),
    )


def eager_cell(row: Row | None) -> str:
    """Time of a call in a row, and the host's in brackets."""
    if row is None or row.eager_row_us is None or row.host_us is None:
        return "" if row is None else NONE
    return f"{microseconds(row.eager_row_us)} [{microseconds(row.host_us)}]"


def breakdown_sheet(report: Report) -> Sheet | None:
    """Table of the breakdown per layer; None if it was not requested."""
    rows = [row for row in report.rows if row.parts_us]
    if not rows:
        return None
    layers = workload_of(report).step_layers
    kinds = [kind for kind in KINDS if any((row.parts_us or {}).get(kind) for row in rows)]
    cells = []
    for row in rows:
        parts = {kind: (row.parts_us or {}).get(kind, 0.0) / layers for kind in kinds}
        cells.append(
            (row.label, row.provider, *(microseconds(parts[kind]) for kind in kinds), microseconds(sum(parts.values())))
        )
    notes = [
        "Rank 0, one profiled replay from its first kernel on, by kernel name. Overlaps count for the kernel that began first."
    ]
    if layers > 1:
        notes.append(f"The whole step divided by its {layers} layers, including embedding and head.")
    both = [kind for kind in kinds if "+" in kind]
    if both:
        notes.append(f"{', '.join(both)}: kernels that do both.")
    return Sheet(
        title=f"{report.op} of {report.subject}, world size {report.world_size}: µs per layer",
        header=("step", "provider", *kinds, "sum"),
        rows=tuple(cells),
        slower=frozenset(),
        notes=tuple(notes),
    )


# --- cells -----------------------------------------------------------------------------------------------------------


def cell(row: Row | None, milli: bool) -> str:
    if row is None:
        return ""
    if row.median_us is None:
        if not row.reason:
            return "right"
        return "WRONG" if row.reason.startswith("wrong") else "refused" if row.reason.startswith(REFUSED) else NONE
    text = _time(row.median_us, milli) + ("*" if row.mode == "eager" else "")
    if row.chain_us is not None and not milli:
        text += f" ({microseconds(row.chain_us)})"
    if row.first_us is not None and row.tokens_per_second is not None:
        return text + f" (first {_time(row.first_us, milli)}, {row.tokens_per_second:.0f}/s)"
    return text if row.eager_us is None or row.mode == "eager" else f"{text} / {_time(row.eager_us, milli)}"


def microseconds(value: float) -> str:
    """Number with about three digits: 3.26, 41.8, 752."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _time(value: float, milli: bool) -> str:
    return f"{value / 1e3:.2f}" if milli and value < 1e5 else f"{value / 1e3:.1f}" if milli else microseconds(value)


def plain(value: float | None, form: str) -> str:
    return NONE if value is None else form.format(value)


# --- notes -----------------------------------------------------------------------------------------------------------


def _notes(report: Report, providers: Sequence[str]) -> list[str]:
    notes, rows, workload = about_machine(report), report.rows, workload_of(report)
    if any(row.chain_us is not None for row in rows) and not workload.in_milliseconds:
        notes.append("In brackets: per call of several in a row.")
    if any(row.eager_us is not None and row.mode != "eager" for row in rows):
        notes.append(
            "After the slash: without a CUDA graph. Eager speed-up: of these times, over their fastest baseline."
        )
    if any(row.mode == "eager" for row in rows):
        notes.append("*: could not be captured in a CUDA graph.")
    ceilings = dict.fromkeys(row.provider for row in rows if row.role == "ceiling")
    if alone := [name for name in ceilings if name not in CEILINGS]:
        notes.append(f"{', '.join(alone)}: {ceiling_of(alone[0])}, not the whole op.")
    notes += [f"{name}: {ceiling_of(name)}; not the same computation." for name in ceilings if name in CEILINGS]
    return [*notes, *workload.notes, *reasons(report, providers)]


def about_machine(report: Report) -> list[str]:
    """First notes below a table: how the times were taken, and unknown limits."""
    if report.is_simulated:
        ran = any(row.max_abs_error is not None or cell(row, False) not in ("", NONE) for row in report.rows)
        return [f"Simulated ranks: {'answers were checked' if ran else 'no answer was checked'}, times mean nothing."]
    calls = "steps" if report.subject else "single calls"
    gpu = report.machine["gpu"]
    notes = [
        f"Median of {calls}, maximum over the ranks; p10–p90: of weft's. Speed-up: weft.auto over the fastest baseline."
    ]
    unknown = f"No limits: rates are known for {', '.join(GPUS)}, not for {gpu}."
    return notes if gpu in GPUS else [*notes, unknown]


def reasons(report: Report, providers: Sequence[str]) -> list[str]:
    """Notes why providers did not run; equal reasons at equal shapes share a note."""
    everywhere = [row.label for row in report.rows if row.provider == providers[0]] if providers else []
    shared: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for provider in providers:
        labels_of: dict[str, list[str]] = {}
        for row in report.rows:
            if row.provider == provider and row.reason:
                labels_of.setdefault(row.reason, []).append(row.label)
        for reason, labels in labels_of.items():
            shared.setdefault((reason, tuple(labels)), []).append(provider)
    return [
        f"{', '.join(names)}{'' if list(labels) == everywhere else ' at ' + ', '.join(labels)}: {reason}"
        for (reason, labels), names in shared.items()
    ]
