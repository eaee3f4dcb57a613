"""Fit of weft.predict's costs to rows of one and two GPUs, its errors on all rows, and its figure.

``python -m benchmarks.predict`` writes weft/predict/h200.json and errors.json; ``python -m benchmarks.performance`` the page
and the figure.
"""

from __future__ import annotations

import io
import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from weft.bench.harness.report import from_json
from weft.bench.render.plot import COLOURS, PLAIN, STYLE, check_matplotlib
from weft.predict import ops
from weft.predict.costs import ERRORS, FILE, FITTED, Costs, read, to_json
from weft.runtime.files import put

RESULTS = Path(__file__).resolve().parent / "results"
PICTURE = "prediction.svg"
WORLD_SIZES = (1, 2, 4, 8, 16, 32, 64)
GOAL = 0.15
DECODE = "sharded-decode-attention"
# Of FITTED: the rows that each group of costs is fitted to, (op, provider).
SOURCES = {
    "gemm": (("ag-gemm", "cublas"), ("gemm-rs", "cublas")),
    "overlap": (("ag-gemm", "weft.auto"), ("gemm-rs", "weft.auto")),
    "all-reduce": (("all-reduce", "weft.auto"),),
    "grouped": (("grouped-gemm", "weft.auto"), ("grouped-gemm-silu", "weft.auto")),
    "decode": ((DECODE, "weft.auto"),),
}
# Ops of one rank, or at W = 1; rows over ranks of the other ops of experts, where there are any.
OF_ONE = ("grouped-gemm", "grouped-gemm-silu", DECODE)
OF_EXPERTS = ("ag-moe", "moe-rs", "moe-dispatch", "moe-combine")
# Exchanges, of which a single call takes some 5 us more, 3 of them between two events with nothing in between.
IN_A_ROW = ("all-reduce", "moe-dispatch", "moe-combine")
# World size to whose rows an op's costs are fitted.
FITTED_TO = {op: 1 if op in OF_ONE else 2 for sources in SOURCES.values() for op, _ in sources}
# Least number of rows M of a GEMM: below, other designs than the modelled ones run.
LEAST_ROWS = 512


class Decode(NamedTuple):
    """One layer's attention of ``batch`` new tokens, each after ``context`` others."""

    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    context: int

    def __str__(self) -> str:
        size = f"{self.context >> 20}M" if self.context >> 20 else f"{self.context >> 10}k"
        return f"{self.kv_heads} KV heads x {self.head_dim}, {size}, batch {self.batch}"


LONGEST = Decode(1, 96, 12, 128, 1 << 20)
DECODES = (
    *(Decode(1, 32, 4, 128, context) for context in (32 << 10, 128 << 10, 1 << 20)),
    LONGEST._replace(context=64 << 10),
    LONGEST,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Row of committed results. us: of a call; of IN_A_ROW, where that was measured, of one in a row."""

    op: str
    provider: str
    world_size: int
    folder: str
    label: str
    shape: tuple[int, ...]
    us: float


def measurements(results: Path = RESULTS) -> Iterator[Measured]:
    """Rows of the modelled ops."""
    for world_size in (1, 2, 4):
        for op in (*OF_ONE, *(("ag-gemm", "gemm-rs", "all-reduce", *OF_EXPERTS) if world_size > 1 else ())):
            for file in sorted(results.glob(f"h200-x{world_size}*/{op}.w{world_size}.json")):
                folder = file.parent.name
                if not folder.endswith((f"x{world_size}", "-other-shapes", "-long", "-moe")):
                    continue  # other questions than weft's choice
                for report in from_json(file.read_text()):
                    for row in report.rows:
                        is_large = op not in ("ag-gemm", "gemm-rs") or row.shape[0] >= LEAST_ROWS
                        if row.provider in ("cublas", "weft.auto") and row.median_us is not None and is_large:
                            yield Measured(
                                op=op, provider=row.provider, world_size=world_size, folder=folder, label=row.label,
                                shape=row.shape, us=(row.chain_us if op in IN_A_ROW else None) or row.median_us,
                            )  # fmt: skip


def predicted(costs: Costs, row: Measured) -> float:
    if row.provider == "cublas":
        return ops.gemm(costs, *row.shape)
    return ops.of_shape(costs, row.op, row.shape, row.world_size)


def fit(rows: Sequence[Measured], costs: Costs) -> Costs:
    """Costs with the least squares of log errors, group after group, by steps along each cost that halve."""
    for group, names in FITTED.items():
        mine = [row for row in rows if (row.op, row.provider) in SOURCES[group]]
        best, step = _loss(costs, mine), 0.32
        while step > 0.01:
            found = costs
            for name in names:
                for factor in (1 + step, 1 / (1 + step)):
                    other = replace(costs, **{name: getattr(costs, name) * factor})
                    if (loss := _loss(other, mine)) < best:
                        best, costs = loss, other
            if found == costs:
                step /= 2
    return costs


def _loss(costs: Costs, rows: Sequence[Measured]) -> float:
    return sum(math.log(predicted(costs, row) / row.us) ** 2 for row in rows)


def errors(costs: Costs, rows: Sequence[Measured]) -> dict[str, dict[str, tuple[int, float, float]]]:
    """Errors of weft's rows as ``weft.predict.costs.errors`` has them."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if row.provider == "weft.auto":
            of_op = found.setdefault(row.op, {}).setdefault(str(row.world_size), [])
            of_op.append(predicted(costs, row) / row.us - 1)
    return {
        op: {
            world: (len(each), round(statistics.mean(map(abs, each)), 4), round(max(each, key=abs), 4))
            for world, each in worlds.items()
        }
        for op, worlds in found.items()
    }


# --- the page ------------------------------------------------------------------------------------------------------------

TEXT = f"""A model, not measurements: [trace.md](../trace.md#predicting-more-gpus) says what it contains and what is assumed.
Its costs are fitted to the rows of two GPUs in [performance.md](../performance.md) (`python -m benchmarks.predict`), GEMMs of
{LEAST_ROWS} rows and more; those of grouped GEMMs and decode attention to rows of one. Beyond {ops.NODE} GPUs a node
ends, and pieces cross rails.
"""


def page(results: Path = RESULTS) -> str:
    """Text of docs/performance/prediction.md: errors at W = 2 (fitted) and W = 4 (not), predictions.

    results  folder of measurements to compare with
    """
    costs, rows = read(), list(measurements(results))
    lines = [TEXT, *_table("op", "W", "rows", "mean error", "median", "largest", f"within {GOAL:.0%}")]
    for op, provider in (
        *(pair for pairs in SOURCES.values() for pair in pairs),
        *((op, "weft.auto") for op in OF_EXPERTS),
    ):
        for world_size in (1, 2, 4):
            which = op, provider, world_size
            errors = [
                predicted(costs, row) / row.us - 1 for row in rows if (row.op, row.provider, row.world_size) == which
            ]
            if errors:
                lines.append(_errors(op, provider, world_size, errors))
    missing = [op for op in (*OF_EXPERTS, DECODE) if not any(r.op == op and r.world_size > 1 for r in rows)]
    if missing:
        lines += ["", f"No row over ranks is committed yet of {', '.join(missing)}: their lines have no error to show."]
    lines += ["", "Weft's rows of four GPUs, which the fit has not seen:", ""]
    lines += _table("op", "shape", "measured, µs", "predicted", "error")
    for row in rows:
        if row.world_size == 4 and row.provider == "weft.auto":
            us = predicted(costs, row)
            label = row.label if row.op == "all-reduce" else f"{row.label} ({'x'.join(map(str, row.shape))})"
            lines.append(f"| {row.op} | {label} | {row.us:.1f} | {us:.1f} | {us / row.us - 1:+.0%} |")
    lines += ["", f"![prediction]({PICTURE})", "", *_table("µs at W =", *map(str, WORLD_SIZES))]
    for name, time in curves(costs).items():
        lines.append(f"| {name} | {' | '.join(_number(time(w)) for w in WORLD_SIZES)} |")
    return "\n".join([*lines, ""])


def _table(first: str, *others: str) -> list[str]:
    return [f"| {' | '.join((first, *others))} |", "|---" + "|---:" * len(others) + "|"]


def _errors(op: str, provider: str, world_size: int, errors: Sequence[float]) -> str:
    """Row of the table of errors."""
    sizes = [abs(error) for error in errors]
    name = f"{op}, {'cuBLAS alone' if provider == 'cublas' else 'weft'}"
    fitted = " (fitted)" if FITTED_TO.get(op) == world_size else ""
    mean, median, worst = statistics.mean(sizes), statistics.median(sizes), max(errors, key=abs)
    within = sum(size <= GOAL for size in sizes)
    return f"| {name} | {world_size}{fitted} | {len(errors)} | {mean:.1%} | {median:.1%} | {worst:+.0%} | {within} |"


def curves(costs: Costs) -> dict[str, Callable[[int], float | None]]:
    """Time by world size of a problem whose size stays."""
    experts = 8192, 2048, 768, 128, 8
    return {
        "AG-GEMM, Qwen3-32B gate-up, M=8192": lambda w: ops.ag_gemm(costs, 8192, 51200 // w, 5120, w),
        "GEMM-RS, Qwen3-32B down, M=8192": lambda w: ops.gemm_rs(costs, 8192, 5120, 25600 // w, w),
        "all-reduce, 1 MiB": lambda w: ops.all_reduce(costs, 1 << 20, w),
        "MoE, Qwen3-30B-A3B, 8192 tokens": lambda w: ops.moe(costs, *experts, w),
        "its dispatch": lambda w: ops.moe_dispatch(costs, 8192, 2048, 128, 8, w),
        "its combine": lambda w: ops.moe_combine(costs, 8192, 2048, 128, 8, w),
        f"decode attention, {LONGEST}": lambda w: decode_time(costs, LONGEST, w),
    }


def decode_time(costs: Costs, shape: Decode, world_size: int) -> float | None:
    """Microseconds of a layer's decode attention; None where the heads do not divide into equal shares."""
    return None if shape.q_heads % world_size else ops.decode_attention(costs, *shape, world_size)


def _number(us: float | None) -> str:
    return "–" if us is None else f"{us:.0f}" if us >= 100 else f"{us:.1f}"


def decode_section(results: Path = RESULTS) -> str:
    """Section of docs/performance.md. results: folder of measurements to compare with."""
    costs, sizes = read(), WORLD_SIZES[:-1]
    text = f"""## Decode attention on 1 to {sizes[-1]} GPUs, a model

Microseconds of one layer over a cache that is spread over the ranks: `decode_attention` of `weft/predict/ops.py`, the model of
[prediction](performance/prediction.md), with its costs (`weft/predict/h200.json`).

- *local*: {costs.attention:.1f} µs, and a rank's share of the keys and values, in 16 bits, at
  {costs.cache / 1e6:.1f} TB/s; both fitted to the rows of one GPU below.
- *exchange*: outputs and log-sum-exps in fp32, to each rank of a node those of its heads, at
  {costs.push_link / 1e3:.0f} GB/s (fitted to all-reduces of two GPUs) and {costs.hop:.1f} µs.
- *rails*: the same to the ranks of other nodes, of {ops.NODE} GPUs each, if that takes longer. Assumed:
  {costs.rail_link / 1e3:.0f} GB/s, one card of 400 Gbit/s a GPU, and {costs.rail:.0f} µs.

Published for 12 KV heads on 8 H800s by Triton-distributed are 38 at 64k tokens and 300 at 1M.
"""
    lines = [text, *_table("W =", *map(str, sizes))]
    for shape in DECODES:
        lines.append(f"| {shape} | {' | '.join(f'{decode_time(costs, shape, w):.1f}' for w in sizes)} |")
    lines += ["", *_table("measured on H200s", "W", "µs", "model", "error")]
    lines += [_beside(costs, row) for row in measurements(results) if (row.op, row.provider) == (DECODE, "weft.auto")]
    rows = list(on_two_h100s(results))
    if rows:
        alone = [row for row in rows if row.world_size == 1]
        costs = fit(alone, costs)
        lines += [
            "",
            f"The same on two H100s: {costs.attention:.1f} µs and {costs.cache / 1e6:.1f} TB/s are fitted to the rows of one\n"
            "(`paged_attention` of the whole cache), the rows of two are not.",
            "",
            *_table("measured on H100s", "W", "µs", "model", "error"),
            *(_beside(costs, row) for row in rows),
        ]
    return "\n".join([*lines, ""])


def _beside(costs: Costs, row: Measured) -> str:
    """Line of a table: a row of decode attention and the model's time."""
    us = predicted(costs, row)
    return f"| {Decode(*row.shape[:5])} | {row.world_size} | {row.us:.1f} | {us:.1f} | {us / row.us - 1:+.0%} |"


def on_two_h100s(results: Path) -> Iterator[Measured]:
    """Rows of decode attention on one and two H100s, of one run."""
    file = results / "h100-x2-long" / f"{DECODE}.w2.json"
    for report in from_json(file.read_text()) if file.is_file() else ():
        for provider, world_size in (("weft.one_gpu", 1), ("weft.auto", 2)):
            for row in report.rows:
                if row.provider == provider and row.median_us is not None:
                    yield Measured(
                        op=DECODE, provider="weft.auto", world_size=world_size, folder=file.parent.name, label=row.label,
                        shape=row.shape, us=row.median_us,
                    )  # fmt: skip


def picture() -> str:
    """Figure of the predictions: time by world size, measured sizes filled."""
    check_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.0, 4.2), layout="constrained")
        axes = figure.subplots()
        for (name, time), colour in zip(curves(read()).items(), COLOURS, strict=False):
            points = [(w, us) for w in WORLD_SIZES if (us := time(w))]
            axes.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=4, label=name, gid=name)
        axes.axvspan(1, 4, color="#eeeeee", label="measured sizes")
        axes.set(
            xscale="log",
            yscale="log",
            xlabel="GPUs",
            ylabel="µs of a call",
            xticks=WORLD_SIZES,
            xticklabels=WORLD_SIZES,
        )
        axes.minorticks_off()
        axes.set_title("Predicted for H200s: one problem on more GPUs", loc="left")
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata=PLAIN)
    text = file.getvalue()
    return text[text.index("<svg") :]


def main() -> None:
    rows = list(measurements())
    costs = fit([row for row in rows if FITTED_TO.get(row.op) == row.world_size], Costs())
    put(FILE, to_json(costs))
    put(ERRORS, json.dumps(errors(read(), rows), indent=2) + "\n")
    print(page())


if __name__ == "__main__":
    main()
