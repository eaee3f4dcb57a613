"""Reports of model benchmarks as tables: pure functions.

weft.bench.render.table prints them and writes Markdown.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.bench.harness.limits import limits_of
from weft.bench.harness.report import Report, Row, best_other, providers_of, row_of, shapes_of, weft_row
from weft.bench.models.breakdown import KINDS
from weft.bench.models.roofline import roofline
from weft.bench.models.steps import MODELS, config_of
from weft.bench.render.table import NONE, Sheet, about_machine, microseconds, plain, reasons, speed_up


def sheet(report: Report) -> Sheet:
    """Table with each provider's time per step, weft's speed-ups, and the roofline."""
    providers, shapes = providers_of(report), shapes_of(report)
    milli = report.op in ("model", "generate")
    rows, slower = [], set()
    for number, shape in enumerate(shapes):
        ours, other = weft_row(report, shape), best_other(report, shape)
        gain, floor = speed_up(ours, other), floor_us(report, shape)
        if gain is not None and gain < 1:
            slower.add(number)
        share = floor / ours.median_us if floor and ours is not None and ours.median_us else None
        rows.append(
            (
                next(row.label for row in report.rows if row.shape == shape),
                *(_cell(row_of(report, shape, provider), milli) for provider in providers),
                plain(speed_up(ours, row_of(report, shape, "torch.eager")), "{:.2f}x"),
                plain(gain, "{:.2f}x"),
                NONE if floor is None else _time(floor, milli),
                plain(share, "{:.0%}"),
            )
        )
    where = "simulated ranks" if report.is_simulated else f"{report.world_size} x {report.machine['gpu']}"
    unit = "ms per token after the first" if report.op == "generate" else "ms" if milli else "µs"
    return Sheet(
        title=f"{report.op} of {report.subject}, {report.dtype}, world size {report.world_size} ({where}), {unit}",
        header=("step", *providers, "over eager", "speed-up", "roofline", "of limit"),
        rows=tuple(rows),
        slower=frozenset(slower),
        notes=tuple(_notes(report, providers)),
    )


def breakdown_sheet(report: Report) -> Sheet | None:
    """Table of the breakdown per layer; None if it was not requested."""
    rows = [row for row in report.rows if row.parts_us]
    if not rows:
        return None
    layers = layers_of(report)
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


def floor_us(report: Report, shape: Sequence[int]) -> float | None:
    if report.op == "generate":
        # Step of a token in the middle of the answers.
        batch, prompt, new = shape
        shape = (batch, prompt + (new + 1) // 2, 1)
    name, _, rest = report.subject.partition(",")
    if name not in MODELS:
        return None
    config = config_of(name, int(rest.split()[0]) if rest else None)
    level = "model" if report.op == "generate" else report.op
    found = roofline(level, config, report.world_size, shape, report.dtype, limits_of(report.machine["gpu"]))
    return None if found is None else found.floor


def layers_of(report: Report) -> int:
    """Number of layers in a step of the report."""
    name, _, rest = report.subject.partition(",")
    if report.op in ("mlp", "attn") or name not in MODELS:
        return 1
    return config_of(name, int(rest.split()[0]) if rest else None).num_hidden_layers


def _cell(row: Row | None, milli: bool) -> str:
    if row is None:
        return ""
    if row.median_us is None:
        if not row.reason:
            return "right"
        return "WRONG" if row.reason.startswith("wrong") else NONE
    text = _time(row.median_us, milli) + ("*" if row.mode == "eager" else "")
    if row.first_us is not None and row.tokens_per_second is not None:
        text += f" (first {_time(row.first_us, milli)}, {row.tokens_per_second:.0f}/s)"
    elif row.eager_us is not None and row.mode != "eager":
        text += f" / {_time(row.eager_us, milli)}"
    return text


def _time(value: float, milli: bool) -> str:
    return f"{value / 1e3:.2f}" if milli and value < 1e5 else f"{value / 1e3:.1f}" if milli else microseconds(value)


def _notes(report: Report, providers: Sequence[str]) -> list[str]:
    notes = about_machine(
        report,
        "Median, maximum over the ranks. Speed-up: weft.auto (or the best mode) over the faster torch provider.",
    )
    if any(row.eager_us is not None and row.mode != "eager" for row in report.rows):
        notes.append("After the slash: without a CUDA graph.")
    if any(row.mode == "eager" for row in report.rows):
        notes.append("*: could not be captured in a CUDA graph.")
    if report.op == "generate":
        notes.append(
            "In brackets: time until the first tokens were on the host, and new tokens of all sequences per second."
        )
    if report.op == "model":
        notes.append("Whole steps: embedding, layers, head and greedy choice.")
    return notes + reasons(report, providers)
