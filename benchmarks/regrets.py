"""Regret of today's plans on committed rows of ``weft bench --regret``: the tables of docs/costs.md.

    python -m benchmarks.regrets            # prints the tables; --write puts them into the page

A row has the times of all designs at one shape. The best design is the fastest one of the even rounds; its time and the one
of today's plan are taken in the odd rounds. Rows that an earlier plan chose count too, with the design that today's plan takes.
benchmarks.costs fits costs to the rows of FILES, never to those of UNSEEN, whose shapes that FILES have are left out.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import latent_regret, pages
from benchmarks.costs import machine_of
from weft.bench.harness.workload import DTYPES
from weft.bench.names import REGRET
from weft.bench.ops.labels import label
from weft.bench.regret.file import read
from weft.bench.regret.measure import Row, best_of
from weft.ops.attention.mla_decode_attention import MLA_DECODE_ATTENTION
from weft.ops.op import Op, find_op
from weft.plan.planned import Machine

LAB = Path(__file__).resolve().parent / "lab"
FILES = (*sorted((LAB / "h200-regret").glob("*.json")), LAB / "h200-x4-regret-moe-rs.json")
UNSEEN = tuple(sorted((LAB / "h200-regret-unseen").glob("*.json")))
# Numbers of ranks whose ops without a row are named.
RANKS = (1, 2, 4)
# Regret above which a row is named.
HIGH = 1.10


class Regret(NamedTuple):
    """One shape. chosen: label of the design of today's plan; regret: None, if that was not measured."""

    row: Row
    chosen: str
    best: str
    regret: float | None


def regrets(files: Sequence[Path]) -> Iterator[Regret]:
    """Rows of ``files`` with times, by today's plans."""
    for file in files:
        for kept in read(file):
            row = kept.row
            if not row.us:
                continue
            op, here = find_op(row.op.partition("+")[0]), machine_of(kept.gpu, row.world_size)
            chosen = label(op, op.plan(_call_of(op, row, here), here).design)
            if chosen not in row.us:
                yield Regret(row, chosen, "", None)
                continue
            best, chosen_us, best_us = best_of(row.us, chosen)
            yield Regret(row, chosen, best, chosen_us / best_us)


def _call_of(op: Op, row: Row, here: Machine) -> Any:
    if op is MLA_DECODE_ATTENTION:
        return latent_regret.call_of(row.shape)
    variants = dict.fromkeys(row.op.split("+")[1:], True)
    return op.call_of_case(op.case_of(row.shape, DTYPES[row.dtype], row.world_size, **variants), here)


def table(rows: list[Regret]) -> Iterator[str]:
    """Markdown lines: each op and number of ranks, then the rows above HIGH."""
    groups: dict[tuple[str, int], list[Regret]] = {}
    for one in rows:
        groups.setdefault((one.row.op, one.row.world_size), []).append(one)
    yield "| op | W | shapes | geometric mean | worst | above 1.10 | not measured |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for (op, world_size), of in sorted(groups.items()):
        measured = [one.regret for one in of if one.regret is not None]
        lost = len(of) - len(measured)
        if not measured:
            yield f"| {op} | {world_size} | 0 | – | – | – | {lost} |"
            continue
        mean = math.exp(sum(map(math.log, measured)) / len(measured))
        above = sum(regret > HIGH for regret in measured)
        yield f"| {op} | {world_size} | {len(measured)} | {mean:.3f} | {max(measured):.3f} | {above} | {lost} |"
    high = [one for one in rows if one.regret is not None and one.regret > HIGH]
    if high:
        yield ""
    for one in sorted(high, key=lambda one: -one.regret):
        shape = "x".join(map(str, one.row.shape))
        us, best_us = one.row.us[one.chosen][1], one.row.us[one.best][1]
        yield f"- {one.row.op} {shape}, W={one.row.world_size}: {one.chosen} {us:.4g} µs, {one.best} {best_us:.4g}"


def unseen() -> list[Regret]:
    """Rows of shapes that the fit has not seen."""
    seen = {(one.row.op, one.row.world_size, one.row.shape) for one in regrets(FILES)}
    return [one for one in regrets(UNSEEN) if (one.row.op, one.row.world_size, one.row.shape) not in seen]


def page() -> Iterator[str]:
    """Lines of both tables, and the ops that no table has."""
    every, new = list(regrets(FILES)), unseen()
    yield from table(every)
    if new:
        yield from ("", "Shapes outside the fit:", "")
        yield from table(new)
    known = {(one.row.op, one.row.world_size) for one in (*every, *new)}
    yield ""
    for world_size in RANKS:
        every_op = (*REGRET, MLA_DECODE_ATTENTION.alias)
        of_size = (op for op in every_op if find_op(op.partition("+")[0]).collective == (world_size > 1))
        if lost := [op for op in of_size if (op, world_size) not in known]:
            yield f"- No row at W={world_size}: {', '.join(lost)}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the tables into docs/costs.md")
    made = "\n".join(page())
    if parser.parse_args().write:
        pages.write(pages.DOCS / "costs.md", {"regret": f"\n{made}\n\n"})
    else:
        print(made)


if __name__ == "__main__":
    main()
