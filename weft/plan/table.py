"""Tables of measured designs: a JSON file in tables/ per GPU and world size, written by ``weft tune``.

{"schema": 2, "gpu": "NVIDIA H200", "world_size": 4, "simulated": false, "rows": [
 {"op": "all_gather_matmul", "dtype": "bfloat16", "shape": [2048, 2560, 5120], "design": "pipelined",
  "config": {"chunks": 1, …}, "us": 71.2, …},
]}

A row was measured at ``shape`` and stands for its bucket: the same N and K, and M, or the bytes of a collective, rounded to
the nearest power of two. A call gets the nearest row, by the logarithms of its sizes, that is at most a factor of two away in
each size. Where the GPU's table has none, the table of a GPU with the same processor decides (``SAME_PROCESSOR``). Plans
without a row, as on unknown GPUs, follow rules. A row of design "cublas" names an algorithm of cuBLAS and stands for one
shape only. Rows of a search on this machine (``use``) come before the tables where they are exact, and after the
tables elsewhere. Rows come from ``weft tune``, except rows whose ``versions`` name a file in
benchmarks/lab and the commit that has it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

import torch

from weft.arguments import check_bool, check_instance, check_int, check_number, check_optional, is_integer, quoted
from weft.plan.memo import forget, remembered
from weft.runtime.codec import exchangeable
from weft.runtime.files import put
from weft.runtime.logs import logger_of

if TYPE_CHECKING:
    from weft.runtime.capabilities import Capabilities

logger = logger_of(__name__)
T = TypeVar("T")
SCHEMA = 2
# Smaller gains over the default are noise: it stays.
LEAST_GAIN = 0.02
# Largest distance of a row in each dimension, in powers of two: beyond it another tile or algorithm is as likely.
REACH = 1.0
# A wrong N or K costs more than a wrong M: they decide the number of tiles and the time of one.
COLUMN_WEIGHT = 2.0
# GPUs without tables of every op, and the one with the same processor and links whose rows they take: an H200 is an H100 with
# faster memory.
SAME_PROCESSOR = {"NVIDIA H100 80GB HBM3": "NVIDIA H200"}
# Designs whose rows stand for their shape alone; rows of SMALL_M for their N and K.
EXACT, SMALL_M = "cublas", "small_m"
# The rows for which a row of SMALL_M stands, by its M: the ones that fill its tile, of 128 at least three quarters of it. The
# nearest decides.
SMALL_M_ROWS = {16: (1, 16), 32: (17, 32), 64: (33, 64), 96: (96, 128), 128: (128, 128)}


@exchangeable
@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Best of the candidates at one shape.

    shape       (M, N, K) of one rank's GEMM with the M of the whole GEMM, or (bytes,) of the whole tensor
    design      name in ``Op.designs``
    config      fields of the design
    us          time: the maximum over the ranks of the median (for a collective, the geometric mean of an isolated call and
                of one in a series), None if it was chosen in whole steps of a model; default_us: time without this row
    candidates  number of designs timed
    versions    of weft, torch and Triton
    """

    op: str
    dtype: str
    shape: tuple[int, ...]
    design: str
    config: dict[str, Any]
    us: float | None
    default_us: float | None = None
    candidates: int = 0
    date: str = ""
    versions: str = ""

    def __post_init__(self) -> None:
        for name in ("op", "dtype", "design", "date", "versions"):
            check_instance(name, getattr(self, name), str, "a string")
        shape, positive = self.shape, "a positive number of microseconds"
        if not isinstance(shape, tuple) or not shape or not all(is_integer(size) and size > 0 for size in shape):
            raise ValueError(f"shape={quoted(shape)} is not a list of positive integers")
        check_instance("config", self.config, dict, "an object of the design's fields")
        for name in ("us", "default_us"):
            check_optional(check_number, name, getattr(self, name), sys.float_info.min, sys.float_info.max, positive)

    @property
    def key(self) -> str:
        """Bucket of the row as text: all_gather_matmul bfloat16 2048x2560x5120."""
        shape = self.shape if self.design in (EXACT, SMALL_M) else bucket(self.shape)
        return f"{self.op} {self.dtype} {'x'.join(map(str, shape))}"

    def as_design(self, designs: Mapping[str, type]) -> Any:
        """Instance of one of ``designs``. ValueError if its fields have changed since."""
        try:
            return built(designs[self.design], self.config)
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"tuned row {self.key} does not fit design {self.design!r} ({error}); run weft tune again"
            ) from None


def built(kind: type[T], fields: Mapping[str, Any]) -> T:
    """Dataclass ``kind`` from ``fields`` in JSON's form: nested dataclasses are dicts, tuples are lists."""
    types = _types_of(kind)
    values = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            # The dataclass, of "Algorithm | None" for instance.
            value = built(next(kind for kind in (*get_args(types[name]), types[name]) if is_dataclass(kind)), value)
        values[name] = tuple(value) if isinstance(value, list) else value
    return kind(**values)


_types_of = cache(get_type_hints)


def agreed_of(row: Row) -> tuple:
    """Choices of a row that ranks with different shares of K must share: how the output is divided."""
    tile = row.config.get("tile", {})
    return row.design, *(tile.get(name) for name in ("block_m", "block_n", "group")), row.config.get("chunks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One file."""

    gpu: str
    world_size: int
    rows: tuple[Row, ...] = ()
    simulated: bool = False

    def __post_init__(self) -> None:
        check_instance("gpu", self.gpu, str, "a GPU's name")
        check_int("world_size", self.world_size, 1)
        check_bool("simulated", self.simulated)

    def with_rows(self, rows: Iterable[Row]) -> Table:
        """This table with ``rows`` in place of rows of the same buckets, sorted by op, dtype and shape."""
        by_key = {row.key: row for row in (*self.rows, *rows)}
        ordered = sorted(by_key.values(), key=lambda row: (row.op, row.dtype, *row.shape[1:], row.shape[0]))
        return dataclasses.replace(self, rows=tuple(ordered))


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Row that was found for a shape. ``exact``: the shape lies in the row's bucket."""

    row: Row
    file: Path
    exact: bool

    @property
    def reason(self) -> str:
        """Text to find the row by: file, key, microseconds, and whether it is exact."""
        row = self.row
        time = "chosen in whole steps" if row.us is None else f"{row.us:.4g} µs"
        gain = f", the default {row.default_us:.4g}" if row.default_us else ""
        near = "" if self.exact else ", the nearest row"
        return f"{self.file.name}: {row.key}: {time}{gain}{near} ({row.date}, {row.versions})"


def find(
    op: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    world_size: int,
    caps: Capabilities,
    ranks_differ_in_k: bool = False,
) -> Found | None:
    """Row for one call, or None. ``op``: the op's name, or name+variant.

    ranks_differ_in_k  as in ``nearest``
    """
    place = caps.device_name, world_size, caps.is_simulated
    return lookup(*place, op, name_of(dtype), tuple(shape), ranks_differ_in_k)


# Rows of searches on this machine, and their file, by (GPU, world size, simulated).
_searched: dict[tuple[str, int, bool], tuple[Path, tuple[Row, ...]]] = {}


def use(rows: Iterable[Row], file: Path, world_size: int, caps: Capabilities) -> None:
    """Let plans of this GPU and world size read ``rows`` as well, from now on; equal on all ranks."""
    place = caps.device_name, world_size, caps.is_simulated
    known = {row.key: row for row in (*_searched.get(place, (file, ()))[1], *rows)}
    _searched[place] = file, tuple(known.values())
    forget()


@remembered
def lookup(
    gpu: str,
    world_size: int,
    simulated: bool,
    op: str,
    dtype: str,
    shape: tuple[int, ...],
    ranks_differ_in_k: bool = False,
) -> Found | None:
    """Nearest row for ``op`` and ``dtype``; None beyond REACH.

    Of the rows of ``use`` if it is exact, else of the tables for ``gpu`` at ``world_size``, else of the rows of ``use``. Where
    no row of ``dtype`` is near in a table, a bf16 row of as many bytes is taken: for collectives, and for fp16 GEMMs unless the
    row names an algorithm of cuBLAS.
    """
    searched = None
    if (known := _searched.get((gpu, world_size, simulated))) is not None:
        searched = nearest(known[1], op, dtype, shape, known[0], ranks_differ_in_k)
    if searched is not None:
        # Ranks with other shares of K must take the same row.
        same = bucket(searched.row.shape)[:2] == bucket(shape)[:2]
        if searched.exact or (ranks_differ_in_k and same):
            return searched
    return _in_tables(gpu, world_size, op, dtype, shape, ranks_differ_in_k) or searched


def _in_tables(
    gpu: str, world_size: int, op: str, dtype: str, shape: tuple[int, ...], ranks_differ_in_k: bool
) -> Found | None:
    """Nearest row in the tables."""
    for file in files_for(gpu, world_size):
        hit = nearest(_shipped_rows(file, op, dtype), op, dtype, shape, file, ranks_differ_in_k)
        if hit is None and (len(shape) == 1 or dtype == "float16"):
            scalable = (row for row in _shipped_rows(file, op, "bfloat16") if row.design != EXACT)
            hit = nearest(scalable, op, "bfloat16", shape, file, ranks_differ_in_k)
        if hit is not None:
            return hit
    return None


def nearest(
    rows: Iterable[Row], op: str, dtype: str, shape: tuple[int, ...], file: Path, ranks_differ_in_k: bool = False
) -> Found | None:
    """Nearest of ``rows``, or None.

    If ranks_differ_in_k, only M and N decide ``agreed_of`` the row: among rows of that M and N, the one with the largest
    K, which loses most from a wrong choice. K then chooses among the rows that agree with it.
    """
    deciding = 2 if ranks_differ_in_k else len(shape)
    near = [
        (far, tuple(-size for size in row.shape[deciding:]), row.shape, row)
        for row in rows
        if (row.op, row.dtype, len(row.shape)) == (op, dtype, len(shape))
        and (far := distance_of(row, shape, deciding)) is not None
    ]
    if not near:
        return None
    row = min(near, key=lambda one: one[:3])[3]
    if ranks_differ_in_k:
        alike = [one for one in near if agreed_of(one[3]) == agreed_of(row)]
        row = min(alike, key=lambda one: (abs(math.log2(one[3].shape[2] / max(shape[2], 1))), *one[:3]))[3]
    exact = row.design in (EXACT, SMALL_M) or bucket(row.shape) == bucket(shape)
    return Found(row=row, file=file, exact=exact)


@remembered
def warn_of_design(file: str, key: str, design: str) -> None:
    """Warn, once for a row, that weft has no such ``design`` for its op."""
    logger.warning(
        "%s: row %s has design %s, which is unknown, so a rule decides; run weft tune again", file, key, quoted(design)
    )


def distance_of(row: Row, shape: tuple[int, ...], deciding: int) -> float | None:
    """Distance of ``row`` from a call's shape in its first ``deciding`` sizes; None: no match."""
    if row.design == SMALL_M and row.shape[1:] == shape[1:]:
        least, most = SMALL_M_ROWS[row.shape[0]]
        return abs(math.log2(row.shape[0] / shape[0])) if least <= shape[0] <= most else None
    if row.design in (EXACT, SMALL_M):
        return 0.0 if row.shape == shape else None
    return distance(row.shape[:deciding], shape[:deciding])


def row_shape(design: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a row for ``design`` that was measured at ``shape``."""
    rows = small_m_rows(shape[0]) if design == SMALL_M else None
    return shape if rows is None else (rows, *shape[1:])


def small_m_rows(M: int) -> int | None:
    """The M of a row of a small-M design that was measured with ``M`` rows; None: no row can hold it."""
    fitting = [rows for rows, (least, most) in SMALL_M_ROWS.items() if least <= M <= most]
    return fitting[-1] if fitting else None


def distance(one: Sequence[int], other: Sequence[int]) -> float | None:
    """Distance of two shapes in powers of two; None beyond REACH."""
    if 0 in one or 0 in other:
        return None
    steps = [abs(math.log2(a / b)) for a, b in zip(one, other, strict=True)]
    return steps[0] + COLUMN_WEIGHT * sum(steps[1:]) if max(steps) <= REACH + 1e-9 else None


def bucket(shape: Sequence[int]) -> tuple[int, ...]:
    """Bucket of ``shape``: M or bytes rounded to the nearest power of two, the same N and K."""
    return (2 ** round(math.log2(shape[0])), *shape[1:])


def file_for(gpu: str, world_size: int, folder: Path = Path(__file__).parent / "tables") -> Path:
    """Path of the table, such as nvidia-h200.w4.json."""
    return folder / f"{re.sub(r'[^a-z0-9]+', '-', gpu.lower()).strip('-')}.w{world_size}.json"


@remembered
def files_for(gpu: str, world_size: int) -> list[Path]:
    """Existing tables for ``gpu``: its table, then that of the GPU with the same processor."""
    names = (gpu, SAME_PROCESSOR[gpu]) if gpu in SAME_PROCESSOR else (gpu,)
    return [file for name in names if (file := file_for(name, world_size)).is_file()]


def why_none(
    op: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    world_size: int,
    caps: Capabilities,
    ranks_differ_in_k: bool = False,
) -> str:
    """Reason why no row decided a call, as the end of a sentence."""
    files = files_for(caps.device_name, world_size)
    if not files:
        return f" (no {file_for(caps.device_name, world_size).name}: run weft tune)"
    hit = find(op, shape, dtype, world_size, caps, ranks_differ_in_k)
    if hit is None:
        verb = "has" if len(files) == 1 else "have"
        names = " and ".join(file.name for file in files)
        return f" ({names} {verb} no row of {name_of(dtype)} near this shape)"
    return f" (the row of {hit.file.name} is for another design, alignment or size)"


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def read(path: Path) -> Table:
    """Read a table. ValueError, with the file's name, unless it is one of this schema."""
    try:
        document = json.loads(path.read_text())
        if not isinstance(document, dict) or document.pop("schema", None) != SCHEMA:
            raise ValueError("schema is another")
        rows = tuple(_row(number, fields) for number, fields in enumerate(document.pop("rows")))
        return Table(rows=rows, **document)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: not a file of weft tune, schema {SCHEMA}: {error}") from error


def _row(number: int, fields: dict[str, Any]) -> Row:
    shape = fields["shape"]
    try:
        return Row(**{**fields, "shape": tuple(shape) if isinstance(shape, list) else shape})
    except (ValueError, TypeError) as error:
        raise ValueError(f"rows[{number}]: {error}") from None


def write(path: Path, table: Table) -> None:
    """Write ``table``, a line for each row, atomically."""
    head = {"schema": SCHEMA, "gpu": table.gpu, "world_size": table.world_size, "simulated": table.simulated}
    rows = [json.dumps(dataclasses.asdict(row), ensure_ascii=False) for row in table.rows]
    text = json.dumps(head)[:-1] + ', "rows": [\n ' + ",\n ".join(rows) + "\n]}\n"
    put(path, text)
    forget()


@remembered
def _shipped(path: Path) -> Table:
    return read(path)


@remembered
def _shipped_rows(path: Path, op: str, dtype: str) -> tuple[Row, ...]:
    return tuple(row for row in _shipped(path).rows if (row.op, row.dtype) == (op, dtype))
