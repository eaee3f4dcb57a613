"""Model of decode attention over a cache that is spread over 1 to 32 GPUs: ``python -m benchmarks.sharded_decode``.

It prints the section of docs/performance.md that ``python -m benchmarks.performance`` writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from weft.bench.harness.limits import GPUS
from weft.bench.harness.report import from_json

RESULTS = Path(__file__).resolve().parent / "results"
GPU = "NVIDIA H200"
OP = "sharded-decode-attention"
WORLD_SIZES = (1, 2, 4, 8, 16, 32)
# GPUs whose memory a rank's stores reach.
NODE = 8


class Shape(NamedTuple):
    """One layer's attention of ``batch`` new tokens, each after ``context`` others."""

    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    context: int

    def __str__(self) -> str:
        size = f"{self.context >> 20}M" if self.context >> 20 else f"{self.context >> 10}k"
        return f"{self.kv_heads} KV heads x {self.head_dim}, {size}, batch {self.batch}"


SHAPES = (
    *(Shape(1, 32, 4, 128, context) for context in (32 << 10, 128 << 10, 1 << 20)),
    *(Shape(1, 96, 12, 128, context) for context in (64 << 10, 1 << 20)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rails:
    """Assumptions on the network between nodes; none of it was measured here.

    link     bytes/s in one direction: one card of 400 Gbit/s for each GPU
    latency  seconds from a store on one GPU to its arrival on another
    """

    link: float = 50e9
    latency: float = 5e-6


RAILS = Rails()
LIMITS = GPUS[GPU]
TEXT = f"""## Decode attention on 1 to 32 GPUs, a model

Time of one layer over a cache that is spread over the ranks = local + the longer of exchange and rails. `python -m
benchmarks.sharded_decode` prints this section.

- *local*: a rank's share of the keys and values, in 16 bits, at {LIMITS.memory / 1e12:.1f} TB/s
  (`weft/bench/harness/limits.py`).
- *exchange*: outputs and log-sum-exps in fp32, to each rank of a node those of its heads. Measured: weft's all-to-all of the
  next larger size, in a row, at W = 2 and 4 (tables above); it contains a launch, which an op that sends from its attention
  kernel saves. Assumed: among {NODE} GPUs as long as among 4, and the bytes to the others at {LIMITS.link / 1e9:.0f} GB/s.
- *rails*: the same to the ranks of other nodes. Assumed: {RAILS.link / 1e9:.0f} GB/s, one card of 400 Gbit/s a GPU, and
  {RAILS.latency * 1e6:.0f} µs.

Keys are read once, without a pause and evenly by all ranks. Microseconds on {GPU}s; published for 12 KV heads on 8 H800s by
Triton-distributed are 38 at 64k tokens and 300 at 1M.
"""


def exchanges(results: Path) -> dict[int, list[tuple[int, float]]]:
    """(bytes of each rank, µs) of weft's all-to-all in a row by world size, ascending, from results on ``GPU``."""
    found: dict[int, list[tuple[int, float]]] = {}
    for world_size in (2, 4):
        file = results / f"h200-x{world_size}" / f"all-to-all.w{world_size}.json"
        [report] = from_json(file.read_text())
        rows = [row for row in report.rows if row.provider == "weft.auto" and row.chain_us is not None]
        found[world_size] = sorted((row.shape[0], row.chain_us) for row in rows)
    return found


def modelled(shape: Shape, world_size: int, measured: dict[int, list[tuple[int, float]]]) -> float:
    """Microseconds of the model."""
    elements = 2 * shape.batch * shape.context * shape.kv_heads * shape.head_dim
    local = 2 * elements / world_size / LIMITS.memory
    part = 4 * shape.batch * shape.q_heads / world_size * (shape.head_dim + 1)
    near = min(world_size, NODE)
    exchange = 0.0
    if near > 1:
        rows = measured[2 if near == 2 else 4]
        exchange = next((us for nbytes, us in rows if nbytes >= near * part), rows[-1][1]) * 1e-6
    if near > 4:  # not measured: the bytes to more peers take the link's time
        exchange += (near - 4) * part / LIMITS.link
    far = RAILS.latency + (world_size - near) * part / RAILS.link if world_size > near else 0.0
    return (local + max(exchange, far)) * 1e6


def errors(results: Path, measured: dict[int, list[tuple[int, float]]]) -> Iterator[str]:
    """Rows of a table, one for each measurement of the op in ``results``."""
    for file in sorted(results.glob(f"*/{OP}.w*.json")):
        for report in from_json(file.read_text()):
            for row in report.rows:
                us = row.chain_us or row.median_us
                if row.provider == "weft.auto" and us is not None:
                    shape = Shape(*row.shape[:5])
                    model = modelled(shape, report.world_size, measured)
                    yield f"| {shape} | {report.world_size} | {us:.1f} | {model:.1f} | {us / model - 1:+.0%} |"


def section(results: Path = RESULTS) -> str:
    """Section of docs/performance.md. results: folder of measurements to compare with."""
    measured = exchanges(RESULTS)
    lines = [TEXT, f"| W = | {' | '.join(map(str, WORLD_SIZES))} |", "|---" + "|---:" * len(WORLD_SIZES) + "|"]
    for shape in SHAPES:
        lines.append(f"| {shape} | {' | '.join(f'{modelled(shape, w, measured):.1f}' for w in WORLD_SIZES)} |")
    if found := list(errors(results, measured)):
        lines += ["", "| measured | W | µs | model | error |", "|---|---:|---:|---:|---:|", *found]
    else:
        lines += ["", "No row of the op has been measured yet, so the model has no error to show."]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    print(section())
