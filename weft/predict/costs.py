"""Costs of the parts of an op, fitted by ``python -m benchmarks.predict`` to rows of one and two GPUs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

FILE = Path(__file__).parent / "h200.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Costs on H200s: FITTED, ASSUMED, or measured apart (docs/trace.md).

    mac           femtoseconds of a multiplication and addition of a tile on one SM, in tiles of 128 x 256
    smaller       factor of that in tiles of half the size, and of a quarter its square
    tile          of a tile besides: its first loads and its epilogue
    memory        bytes of operands per microsecond, below which no GEMM goes
    call          of a call besides: the kernel that begins it, forks and joins
    copy, flag    start of a copy engine's copy, and its flag
    link          bytes per microsecond of a copy engine
    add           bytes per microsecond of the kernel that sums what was received
    push          all-reduce by stores: fixed part
    hop           of each further step of it
    push_link     bytes per microsecond that its programs send
    expert        factor of ``mac`` in a grouped GEMM, whose rows are gathered and whose tiles are ragged
    weights       bytes per microsecond of the weights that a grouped GEMM reads
    grouped       of a grouped GEMM besides
    cache         bytes per microsecond of the keys and values that decode attention reads; attention: of a call besides
    rail, rail_link  of a piece between nodes
    sms           of a GPU
    """

    mac: float = 390.0
    smaller: float = 1.1
    tile: float = 2.0
    memory: float = 4.3e6
    call: float = 6.0
    copy: float = 2.2
    flag: float = 2.3
    link: float = 375e3
    add: float = 3.0e6
    push: float = 1.7
    hop: float = 1.2
    push_link: float = 300e3
    expert: float = 1.3
    weights: float = 4.0e6
    grouped: float = 4.0
    cache: float = 4.3e6
    attention: float = 8.0
    rail: float = 10.0
    rail_link: float = 50e3
    sms: int = 132


# As `weft predict` prints them; the rest are factors and counts.
UNITS = {
    "mac": "fs",
    **dict.fromkeys(
        ("tile", "call", "copy", "flag", "push", "hop", "grouped", "attention", "rail"), "us"
    ),
    **dict.fromkeys(("memory", "link", "add", "push_link", "weights", "cache", "rail_link"), "GB/s"),
}  # fmt: skip


# A group is fitted to the rows of an op: of W = 1 or, overlap and collectives, of 2.
FITTED = {
    "gemm": ("mac", "smaller", "tile"),
    "overlap": ("call", "add"),
    "all-reduce": ("push", "push_link"),
    "grouped": ("expert", "weights", "grouped"),
    "decode": ("cache", "attention"),
}
# Measured nowhere.
ASSUMED = ("rail", "rail_link")
# Errors on committed rows: op -> world size -> (rows, mean of the absolute error, largest error).
ERRORS = Path(__file__).parent / "errors.json"


def read(file: Path = FILE) -> Costs:
    """The fitted costs that weft ships."""
    return Costs(**json.loads(file.read_text()))


def errors(file: Path = ERRORS) -> dict[str, dict[str, tuple[int, float, float]]]:
    """Errors of the shipped costs on committed rows."""
    return json.loads(file.read_text())


def shown(costs: Costs, name: str) -> str:
    """A cost as text with its unit, as in "link 375 GB/s"."""
    unit = UNITS.get(name, "")
    value = getattr(costs, name) / (1e3 if unit == "GB/s" else 1)  # bytes per microsecond
    return f"{name} {value:.4g} {unit}".rstrip()


def to_json(costs: Costs) -> str:
    """Text of ``FILE``, rounded to what a fit can tell."""
    known = asdict(costs)
    rounded = {name: value if isinstance(value, int) else float(f"{value:.4g}") for name, value in known.items()}
    return json.dumps(rounded, indent=2) + "\n"
