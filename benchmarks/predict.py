"""Errors of ``weft predict`` on committed rows of one, two and four GPUs, and its page and figure.

``python -m benchmarks.predict`` prints the page; ``python -m benchmarks.performance`` writes it. Constants are fitted by
``python -m benchmarks.costs``.
"""

from __future__ import annotations

import io
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from weft.bench.harness.report import Report, Row, from_json, row_of
from weft.bench.render.plot import COLOURS, PLAIN, STYLE, check_matplotlib
from weft.costs import fitted
from weft.costs.gpu import named
from weft.costs.predicted import predict
from weft.predict import ops
from weft.predict.command import KNOWN

RESULTS = Path(__file__).resolve().parent / "results"
PICTURE = "prediction.svg"
WORLD_SIZES = (1, 2, 4, 8, 16, 32, 64)
GOAL = 0.15
DECODE = "sharded-decode-attention"
# Ops of one rank, or at W = 1; rows over ranks of the other ops of experts, where there are any.
OF_ONE = ("grouped-gemm", "grouped-gemm-silu", DECODE)
OF_EXPERTS = ("ag-moe", "moe-rs", "moe-dispatch", "moe-combine")
# Lines of the page, (op, provider).
LINES = (
    ("ag-gemm", "cublas"), ("gemm-rs", "cublas"), ("ag-gemm", "weft.auto"), ("gemm-rs", "weft.auto"),
    ("all-reduce", "weft.auto"), ("grouped-gemm", "weft.auto"), ("grouped-gemm-silu", "weft.auto"), (DECODE, "weft.auto"),
    *((op, "weft.auto") for op in OF_EXPERTS),
)  # fmt: skip
# Exchanges, of which a single call takes some 5 us more, 3 of them between two events with nothing in between.
IN_A_ROW = ("all-reduce", "moe-dispatch", "moe-combine")
# Least number of rows M of a GEMM.
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

    gpu: str = "h200"
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
                            timed = of_todays_design(report, row)
                            yield Measured(
                                op=op, provider=row.provider, world_size=world_size, folder=folder, label=row.label,
                                shape=row.shape, us=(timed.chain_us if op in IN_A_ROW else None) or timed.median_us,
                            )  # fmt: skip


def of_todays_design(report: Report, row: Row) -> Row:
    """The row of the design that is predicted to be the fastest, where a combine was timed by design, else ``row``."""
    if report.op != "moe-combine" or row.provider != "weft.auto":
        return row
    times = ops.of_shape(report.op, row.shape, report.world_size).by_design
    timed = row_of(report, row.shape, f"weft.{min(times, key=times.get)}")
    return row if timed is None or timed.median_us is None else timed


def predicted(row: Measured) -> float:
    """µs by the model."""
    if row.provider == "cublas":
        return predict("matmul", row.shape[:3], gpu=row.gpu).seconds * 1e6
    return ops.of_shape(row.op, row.shape, row.world_size, row.gpu).us


# --- the page ------------------------------------------------------------------------------------------------------------

TEXT = f"""A model, not measurements: [trace.md](../trace.md#predicting-more-gpus) says what it contains and what is assumed.
Its constants are fitted to two thirds of the rows in [performance.md](../performance.md), by shape
([costs.md](../costs.md); `python -m benchmarks.costs`). GEMMs here have {LEAST_ROWS} rows and more. Beyond {ops.NODE} GPUs a
node ends, and pieces cross rails.
"""


def page(results: Path = RESULTS) -> str:
    """Text of docs/performance/prediction.md: errors at W = 1, 2 and 4, predictions.

    results  folder of measurements to compare with
    """
    rows = list(measurements(results))
    lines = [TEXT, *_table("op", "W", "rows", "mean error", "median", "largest", f"within {GOAL:.0%}")]
    for op, provider in LINES:
        for world_size in (1, 2, 4):
            which = op, provider, world_size
            errors = [predicted(row) / row.us - 1 for row in rows if (row.op, row.provider, row.world_size) == which]
            if errors:
                lines.append(_errors(op, provider, world_size, errors))
    missing = [op for op in (*OF_EXPERTS, DECODE) if not any(r.op == op and r.world_size > 1 for r in rows)]
    if missing:
        lines += ["", f"No row over ranks is committed yet of {', '.join(missing)}: their lines have no error to show."]
    lines += ["", "Weft's rows of four GPUs:", ""]
    lines += _table("op", "shape", "measured, µs", "predicted", "error")
    for row in rows:
        if row.world_size == 4 and row.provider == "weft.auto":
            us = predicted(row)
            label = row.label if row.op == "all-reduce" else f"{row.label} ({'x'.join(map(str, row.shape))})"
            lines.append(f"| {row.op} | {label} | {row.us:.1f} | {us:.1f} | {us / row.us - 1:+.0%} |")
    lines += ["", f"![prediction]({PICTURE})", "", *_table("µs at W =", *map(str, WORLD_SIZES))]
    for name, time in curves().items():
        lines.append(f"| {name} | {' | '.join(_number(time(w)) for w in WORLD_SIZES)} |")
    return "\n".join([*lines, ""])


def _table(first: str, *others: str) -> list[str]:
    return [f"| {' | '.join((first, *others))} |", "|---" + "|---:" * len(others) + "|"]


def _errors(op: str, provider: str, world_size: int, errors: Sequence[float]) -> str:
    """Row of the table of errors."""
    sizes = [abs(error) for error in errors]
    name = f"{op}, {'cuBLAS alone' if provider == 'cublas' else 'weft'}"
    mean, median, worst = statistics.mean(sizes), statistics.median(sizes), max(errors, key=abs)
    within = sum(size <= GOAL for size in sizes)
    return f"| {name} | {world_size} | {len(errors)} | {mean:.1%} | {median:.1%} | {worst:+.0%} | {within} |"


def curves() -> dict[str, Callable[[int], float | None]]:
    """Time by world size of a problem whose size stays."""

    def time(op: str, *sizes: int) -> Callable[[int], float]:
        return lambda w: ops.of_shape(op, KNOWN[op].shape(sizes, w), w).us

    experts = 8192, 2048, 768, 128, 8
    return {
        "AG-GEMM, Qwen3-32B gate-up, M=8192": time("ag-gemm", 8192, 51200, 5120),
        "GEMM-RS, Qwen3-32B down, M=8192": time("gemm-rs", 8192, 5120, 25600),
        "all-reduce, 1 MiB": time("all-reduce", 1 << 20),
        "MoE, Qwen3-30B-A3B, 8192 tokens": time("moe", *experts),
        "its dispatch": time("moe-dispatch", 8192, 2048, 128, 8),
        "its combine": time("moe-combine", 8192, 2048, 128, 8),
        f"decode attention, {LONGEST}": lambda w: decode_time(LONGEST, w),
    }


def decode_time(shape: Decode, world_size: int) -> float | None:
    """Microseconds of a layer's decode attention; None where the heads do not divide into equal shares."""
    return None if shape.q_heads % world_size else ops.of_shape(DECODE, shape, world_size).us


def _number(us: float | None) -> str:
    return "–" if us is None else f"{us:.0f}" if us >= 100 else f"{us:.1f}"


def decode_section(results: Path = RESULTS) -> str:
    """Section of docs/performance.md. results: folder of measurements to compare with."""
    gpu, of, sizes = named("h200"), fitted.read(), WORLD_SIZES[:-1]
    text = f"""## Decode attention on 1 to {sizes[-1]} GPUs, a model

Microseconds of one layer over a cache that is spread over the ranks, by the model of [prediction](performance/prediction.md).

- *local*: {gpu.launch + of.attention.call:.1f} µs, and a rank's share of the keys and values, in 16 bits, at
  {of.attention.cache * gpu.memory / 1e6:.1f} TB/s.
- *exchange*: outputs and log-sum-exps in fp32, to each rank of a node those of its heads, at
  {gpu.stores / 1e3:.0f} GB/s and {gpu.hop:.1f} µs.
- *rails*: the same to the ranks of other nodes, of {ops.NODE} GPUs each, if that takes longer. Assumed:
  {ops.RAIL_LINK / 1e3:.0f} GB/s, one card of 400 Gbit/s a GPU, and {ops.RAIL:.0f} µs.

Published for 12 KV heads on 8 H800s by Triton-distributed are 38 at 64k tokens and 300 at 1M.
"""
    lines = [text, *_table("W =", *map(str, sizes))]
    for shape in DECODES:
        lines.append(f"| {shape} | {' | '.join(f'{decode_time(shape, w):.1f}' for w in sizes)} |")
    lines += ["", *_table("measured on H200s", "W", "µs", "model", "error")]
    lines += [_beside(row) for row in measurements(results) if (row.op, row.provider) == (DECODE, "weft.auto")]
    rows = list(on_two_h100s(results))
    if rows:
        lines += ["", *_table("measured on H100s", "W", "µs", "model", "error"), *map(_beside, rows)]
    return "\n".join([*lines, ""])


def _beside(row: Measured) -> str:
    """Line of a table: a row of decode attention and the model's time."""
    us = predicted(row)
    return f"| {Decode(*row.shape[:5])} | {row.world_size} | {row.us:.1f} | {us:.1f} | {us / row.us - 1:+.0%} |"


def on_two_h100s(results: Path) -> Iterator[Measured]:
    """Rows of decode attention on one and two H100s, of one run."""
    file = results / "h100-x2-long" / f"{DECODE}.w2.json"
    for report in from_json(file.read_text()) if file.is_file() else ():
        for provider, world_size in (("weft.one_gpu", 1), ("weft.auto", 2)):
            for row in report.rows:
                if row.provider == provider and row.median_us is not None:
                    yield Measured(
                        gpu="h100", op=DECODE, provider="weft.auto", world_size=world_size, folder=file.parent.name,
                        label=row.label, shape=row.shape, us=row.median_us,
                    )  # fmt: skip


def picture() -> str:
    """Figure of the predictions: time by world size, measured sizes filled."""
    check_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.0, 4.2), layout="constrained")
        axes = figure.subplots()
        for (name, time), colour in zip(curves().items(), COLOURS, strict=False):
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
    print(page())


if __name__ == "__main__":
    main()
