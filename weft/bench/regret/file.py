"""File of regrets: rows as JSON, written after each shape, read when a run goes on.

{"schema": 1, "rows": [
 {"gpu": "NVIDIA H200", "versions": "weft 0.1.0 …", "op": "moe-combine", "shape": [128, 4, …], "auto": "lamport", …},
]}
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.arguments import quoted
from weft.bench.regret.measure import Row
from weft.runtime.files import put, text_of

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Row of a file, with where it was measured."""

    gpu: str
    versions: str
    row: Row


def read(path: Path) -> list[Kept]:
    """Rows of a file, none if there is none. ValueError, with its name, unless it is of this schema."""
    if not path.exists():
        return []
    try:
        document = json.loads(text_of(path))
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            raise ValueError(f"schema is not {SCHEMA}")
        return [kept_of(fields) for fields in document["rows"]]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: not a file of weft bench --regret: {error}; name another") from error


def kept_of(fields: dict) -> Kept:
    """Row of a line's fields."""
    known = {field.name for field in dataclasses.fields(Row)}
    values = {name: value for name, value in fields.items() if name in known}
    values["shape"] = tuple(values["shape"])
    values["us"] = {name: tuple(halves) for name, halves in values["us"].items()}
    if not all(isinstance(size, int) for size in values["shape"]):
        raise ValueError(f"shape={quoted(fields['shape'])} is not a list of integers")
    return Kept(gpu=str(fields["gpu"]), versions=str(fields["versions"]), row=Row(**values))


def write(path: Path, kept: Iterable[Kept]) -> None:
    """Write the rows, a line for each, atomically."""
    put(path, f'{{"schema": {SCHEMA}, "rows": [\n ' + ",\n ".join(map(line_of, kept)) + "\n]}\n")


def line_of(kept: Kept) -> str:
    """A row as JSON in one line, which ``kept_of`` reads."""
    row = kept.row
    fields = {"gpu": kept.gpu, "versions": kept.versions, **dataclasses.asdict(row)}
    fields["us"] = {name: [round(half, 3) for half in halves] for name, halves in row.us.items()}
    for name in ("auto_us", "best_us"):
        fields[name] = None if fields[name] is None else round(fields[name], 3)
    return json.dumps(fields, ensure_ascii=False)


def summary(rows: Sequence[Row]) -> list[str]:
    """A line for each op and world size: geometric mean of the regrets, and the worst row."""
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.op, row.world_size), []).append(row)
    return [_line(op, world_size, of) for (op, world_size), of in groups.items()]


def _line(op: str, world_size: int, rows: Sequence[Row]) -> str:
    measured = [row for row in rows if row.regret is not None]
    head, lost = f"{op} W={world_size}: ", len(rows) - len(measured)
    without = f"; {lost} without a time" if lost else ""
    if not measured:
        return f"{head}no shape was measured{without}"
    mean = math.exp(sum(math.log(row.regret) for row in measured) / len(measured))
    worst = max(measured, key=lambda row: row.regret)
    above = sum(row.regret > 1.1 for row in measured)
    return (
        f"{head}{len(measured)} shapes, geometric mean {mean:.3f}, {above} above 1.10, worst {worst.regret:.3f}: "
        f"{worst.label}, {worst.auto} {worst.auto_us:.4g} µs, {worst.best} {worst.best_us:.4g}{without}"
    )
