"""Results of a run as data: written to JSON, read back, source of all tables and plots."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.runtime.codec import exchangeable
from weft.runtime.files import put

SCHEMA = 1
# "weft": weft's own. "other": a baseline. "ceiling": the GEMM alone, an upper limit that overlap can reach.
ROLES = ("weft", "other", "ceiling")
# "graph": events in a CUDA graph. "around": whole graphs (see the protocol). "eager": events on the stream.
# "wall": the host's clock. "host": the simulator's, which means nothing.
MODES = ("graph", "around", "eager", "wall", "host")
# Beginning of the reason of a row whose design does not take its dtype or shape.
REFUSED = "refused: "
# Former names of providers, which commands and results name.
RENAMED = {
    "weft.segments": "weft.pipelined", "weft.library": "weft.sequential",
    "weft.ag_rs": "weft.sequence_parallel", "weft.gemm_ar": "weft.replicated",
}  # fmt: skip


@exchangeable
@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One provider at one shape. Times are None if it did not run; then ``reason`` says why.

    median_us  of one call, on the rank with the largest median; p10_us and p90_us are that rank's (extremes of few samples)
    chain_us   per call of several in a row, for short calls
    eager_us   without a graph, if requested
    eager_row_us, host_us: per call of several in a row without a graph, and what of it the host takes to submit the call
    parts_us   breakdown of a step by kind of kernel, of rank 0, if requested
    first_us, tokens_per_second: of generate, whose median_us is that of a token after the first
    figures    of the inputs: pairs, active experts and tile fill of a grouped GEMM
    reason     why there is no time, or why it was not taken inside a graph
    """

    shape: tuple[int, ...]
    label: str
    provider: str
    role: str
    mode: str | None = None
    median_us: float | None = None
    p10_us: float | None = None
    p90_us: float | None = None
    samples: int = 0
    chain_us: float | None = None
    eager_us: float | None = None
    eager_row_us: float | None = None
    host_us: float | None = None
    max_abs_error: float | None = None
    rms_error: float | None = None
    parts_us: dict[str, float] | None = None
    first_us: float | None = None
    tokens_per_second: float | None = None
    figures: dict[str, float] | None = None
    reason: str | None = None

    def __post_init__(self) -> None:
        if self.role not in ROLES or self.mode not in (*MODES, None):
            raise ValueError(f"row of {self.provider}: role={self.role!r}, mode={self.mode!r} are not known")
        if self.median_us is None and self.max_abs_error is None and not self.reason:
            raise ValueError(f"row of {self.provider} at {self.label}: neither a time, an error nor a reason")


@exchangeable
@dataclass(slots=True, kw_only=True)
class Report:
    """Results of one op at one world size. ``subject``: the model of a model benchmark."""

    op: str
    world_size: int
    dtype: str
    machine: dict[str, Any]
    protocol: dict[str, Any]
    date: str
    command: str
    subject: str = ""
    rows: list[Row] = field(default_factory=list)

    @property
    def is_simulated(self) -> bool:
        return bool(self.machine.get("simulated"))


def to_json(reports: Iterable[Report]) -> str:
    document = {"schema": SCHEMA, "reports": [dataclasses.asdict(report) for report in reports]}
    return json.dumps(document, indent=1) + "\n"


def write(path: Path, reports: Iterable[Report]) -> None:
    put(path, to_json(reports))


def write_each(folder: Path, reports: Iterable[Report]) -> None:
    """Write each report to a file OP.wW.json."""
    for report in reports:
        write(folder / file_name(report.op, report.world_size), [report])


def file_name(op: str, world_size: int) -> str:
    return f"{op}.w{world_size}.json"


def from_json(text: str) -> list[Report]:
    """Reports of a document, under today's names. ValueError, TypeError or KeyError for another schema."""
    document = json.loads(text)
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"schema is {schema!r}")
    return [
        Report(**{**fields, "rows": [_row(**{**row, "shape": tuple(row["shape"])}) for row in fields["rows"]]})
        for fields in document["reports"]
    ]


def _row(provider: str, **fields: object) -> Row:
    return Row(provider=RENAMED.get(provider, provider), **fields)


def shapes_of(report: Report) -> list[tuple[int, ...]]:
    """Shapes in the order of the run."""
    return list(dict.fromkeys(row.shape for row in report.rows))


def providers_of(report: Report) -> list[str]:
    """Providers: weft's first, then baselines, then ceilings."""
    names = dict.fromkeys((row.provider, row.role) for row in report.rows)
    return [name for role in ROLES for name, its_role in names if its_role == role]


def row_of(report: Report, shape: Sequence[int], provider: str) -> Row | None:
    return next((row for row in report.rows if row.shape == tuple(shape) and row.provider == provider), None)


def weft_row(report: Report, shape: Sequence[int]) -> Row | None:
    """Row of ``weft.auto``, the default, or of the fastest other weft provider if that was not measured."""
    rows = _timed(report, shape, "weft")
    return next((row for row in rows if row.provider == "weft.auto"), min(rows, key=_median, default=None))


def best_other(report: Report, shape: Sequence[int], field: str = "median_us") -> Row | None:
    """Fastest baseline by ``field``, a time of its row."""
    timed = [row for row in _timed(report, shape, "other") if getattr(row, field)]
    return min(timed, key=lambda row: getattr(row, field), default=None)


def _timed(report: Report, shape: Sequence[int], role: str) -> list[Row]:
    return [r for r in report.rows if r.shape == tuple(shape) and r.role == role and r.median_us is not None]


def _median(row: Row) -> float:
    assert row.median_us is not None
    return row.median_us
