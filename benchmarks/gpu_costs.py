"""Fit of a GPU's constants (weft/costs/gpus) to the committed rows measured on it, and the errors before and after.

    python -m benchmarks.gpu_costs h100            # prints the constants and the errors by op
    python -m benchmarks.gpu_costs h100 --write    # writes weft/costs/gpus/h100.json and weft/costs/errors.json

Rows are those of ``benchmarks.costs``, of benchmarks/results/h100-x1, h100-x2, h100-x4 and the like. The constants of weft's
kernels stay. A third of the rows is held out, by their shapes; constants by which these err more are not taken.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from benchmarks.costs import Row, descended, errors, loss_of, predicted, rows, weights_of
from weft.costs.fitted import read
from weft.costs.gpu import FOLDER, Gpu, named
from weft.costs.predicted import ERRORS
from weft.runtime.files import put

# Constants that rows tell: memory and multiplications, then transport. Those of the driver and of an empty kernel stay.
FITTED = ("flops", "memory"), ("hop", "stores", "link", "copy")
# Ops whose time is one kernel's on one rank: by them the first constants are fitted.
LOCAL = ("cublas", "matmul", "sharded_decode_attention", "grouped_matmul", "grouped_matmul_silu_mul")


def fit(measured: Sequence[Row], gpu: Gpu) -> Gpu:
    """Constants with the least squares of log errors: of local ops, then of all other ones."""
    for names in FITTED:
        local = names == FITTED[0]
        of_step = sorted((row for row in measured if (row.op in LOCAL) == local), key=lambda row: row.place)
        seen, unseen = ([row for row in of_step if row.held_out == held_out] for held_out in (False, True))
        if seen:
            moved = descended(gpu, _loss_on(seen), names)
            loss = _loss_on(unseen)
            gpu = moved if not unseen or loss(moved) < loss(gpu) else gpu
    return gpu


def _loss_on(ordered: Sequence[Row]) -> Callable[[Gpu], float]:
    """Loss of a GPU's constants on rows in the order of their places."""
    kernels, weights = read(), weights_of(ordered)
    return lambda gpu: loss_of(kernels, [_on(row, gpu) for row in ordered], weights)


def _on(row: Row, gpu: Gpu) -> Row:
    """The row with these constants; stores to one peer are as fast as to all, as NVSwitch has it."""
    return replace(row, gpu_constants=replace(gpu, one_link=gpu.stores))


def table(measured: Sequence[Row], before: Gpu, after: Gpu) -> Iterator[str]:
    """Mean absolute errors by op and number of ranks, of rows that the fit has seen and has not."""
    kernels = read()
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in measured:
        groups.setdefault((row.name, row.world_size), []).append(row)
    for (name, world_size), group in sorted(groups.items()):
        parts = []
        for title, gpu in (("before", before), ("after", after)):
            for held_out in (False, True):
                of_part = [row for row in group if row.held_out == held_out]
                wrong = [abs(predicted(kernels, _on(row, gpu)) / row.us - 1) for row in of_part]
                parts.append(f"{title} {statistics.mean(wrong):6.1%}" if wrong else f"{title}      -")
        fitted, held = f"{parts[0]} {parts[2]}", f"{parts[1]} {parts[3]}"
        yield f"{name:38} W={world_size} {len(group):4} rows  fitted: {fitted}  held out: {held}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("gpu", choices=sorted(file.stem for file in FOLDER.glob("*.json")))
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    before = named(asked.gpu)
    measured = [row for row in rows() if row.gpu == before.gpu and predicted(read(), row) is not None]
    if not measured:
        raise SystemExit(f"no committed row of {before.gpu}: put results into benchmarks/results/{asked.gpu}-x2 first")
    after = fit(measured, before)
    after = replace(after, one_link=after.stores)
    names = [name for step in FITTED for name in step]
    for name in names:
        print(f"{name:7} {getattr(before, name):12.5g} -> {getattr(after, name):12.5g}")
    print(*table(measured, before, after), sep="\n")
    if asked.write:
        folders = sorted({row.source for row in measured})
        source = f"fitted to {len(measured)} rows of {', '.join(folders)} by python -m benchmarks.gpu_costs {asked.gpu} --write"
        file = FOLDER / f"{asked.gpu}.json"
        document = json.loads(file.read_text())
        for name in (name for name in names if getattr(after, name) != getattr(before, name)):
            document["constants"][name] = {"value": float(f"{getattr(after, name):.4g}"), "source": source}
        document["constants"]["one_link"]["value"] = document["constants"]["stores"]["value"]
        put(file, json.dumps(document, indent=1, ensure_ascii=False) + "\n")
        on_gpu = [_on(row, after) if row.gpu == before.gpu else row for row in rows()]
        put(ERRORS, json.dumps(errors(read(), on_gpu), indent=1) + "\n")


if __name__ == "__main__":
    main()
