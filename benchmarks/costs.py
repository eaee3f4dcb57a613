"""Fit of weft.costs to committed rows, its errors on rows that the fit has seen and has not, and the regret of its choices.

``python -m benchmarks.costs`` prints them; with --write it writes weft/costs/fitted.json and errors.json first, with --groups
of these groups alone (fp8 fp8_experts mxfp4 int4: of quantized weights), with --fields of these constants of a group alone;
with --errors only errors.json, of shipped constants.
``python -m benchmarks.gpu_costs`` fits the constants of a GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from weft.bench.harness.report import from_json
from weft.bench.ops.labels import label
from weft.bench.ops.shapes import computes, op_of
from weft.bench.regret.file import read
from weft.costs.choice import chosen
from weft.costs.fitted import FILE, FP8_VARIANTS, Fitted, to_json
from weft.costs.fitted import read as read_fitted
from weft.costs.gemms import FEW_ROWS
from weft.costs.gpu import Gpu, named
from weft.costs.predicted import ERRORS, OPS, WEIGHTS, Asked, costs
from weft.ops.op import Op
from weft.plan.planned import Machine, machine
from weft.runtime import capabilities
from weft.runtime.files import put

ROOT = Path(__file__).resolve().parent
# Folders of results that ask something else: other machines, eager calls, other trees.
OTHER = ("-machines", "-eager", "-recorded", "-peers", "-grouped")
# Names of designs in lab files of earlier trees.
RENAMED = {"segments": "pipelined", "library": "sequential"}
# A call alone takes so many us more than one in a row (committed rows of exchanges: 4.6 to 7).
ALONE = 5.5
# Times over the fastest design's up to which a row counts more in the fit.
NEAR, NEAR_WEIGHT = 1.25, 5.0
# Rows of experts that a skewed or recorded routing had are left out: costs are of tokens that choose alike.
# Rows of designs that calls of their sizes no longer have: one shot of two ranks, all parts of rows of 512 bytes.
EARLIER = {("h100-x2", "all_reduce_rms_norm", (128, 5120)), ("h200-x2", "all_reduce_rms_norm", (128, 5120))}
DENSE = ("cublas", "matmul", "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
EXPERTS = (
    "grouped_matmul", "grouped_matmul_silu_mul", "all_gather_grouped_matmul_silu_mul", "grouped_matmul_reduce_scatter",
)  # fmt: skip
# Op of experts over the ranks -> its grouped GEMM, which results have as "weft.gemm_alone".
ALONE_OF = {EXPERTS[2]: EXPERTS[1], EXPERTS[3]: EXPERTS[0]}
# Group of constants -> the rows that it is fitted to, ops and, of quantized weights, variants.
GROUPS = {
    "gemms": DENSE,
    "pushes": ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"),
    "norms": ("all_reduce_rms_norm",),
    "exchanges": ("moe_dispatch", "moe_combine"),
    "grouped": EXPERTS,
    "attention": ("sharded_decode_attention",),
    "fp8": (*DENSE, "matmul_silu_mul"),
    "fp8_experts": EXPERTS,
    "mxfp4": ("matmul", "grouped_matmul_silu_mul", "grouped_matmul"),
    "int4": ("matmul",),
}
FORMS = {"fp8": FP8_VARIANTS, "fp8_experts": FP8_VARIANTS, "mxfp4": ("four_bit",), "int4": ("int4",)}
# (hidden, features) of the experts of Qwen3-30B-A3B.
QWEN, GPT_OSS = (2048, 768), (2880, 2880)
# (experts, hidden) of routers.
ROUTERS = {"qwen3-30b-a3b": (128, 2048), "deepseek-v3": (256, 7168)}
FP8_GEMMS = {"gate_up": "grouped_matmul_silu_mul", "down": "grouped_matmul"}
# File of these in fp8 -> its rows, and the tokens at which they ran today's kernels: gate_up's, down's. The loop of down of few
# pairs was flattened last; gate and up of many pairs are two products since the first file.
FP8_GROUPED = {
    "h200-fp8-grouped": ("design", (1, 8, 32, 128), (1,)),
    "h200-fp8-grouped-4096": ("design", (4096,), (4096,)),
    "h200-fp8-grouped-deep-gemm": ("fp8", (1, 32, 4096), (1, 4096)),
    "h200-fp8-grouped-flattened": ("flattened", (), (8, 32, 128, 4096)),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """Measured time of one design at one shape. us: of a call in a row, where that was measured.

    gpu_constants  None: the shipped ones of ``gpu``
    gemm_us  of an op of experts over the ranks: its GEMM alone in the same table
    """

    op: str
    variant: str
    shape: tuple[int, ...]
    world_size: int
    gpu: str
    design: str
    us: float
    source: str
    gpu_constants: Gpu | None = None
    gemm_us: float | None = None

    @cached_property
    def asked(self) -> Asked:
        return Asked(self.variant, self.shape, 2, self.world_size)

    @cached_property
    def constants(self) -> Gpu:
        return self.gpu_constants or named(self.gpu)

    @property
    def name(self) -> str:
        """Op, with the variant of quantized weights."""
        return f"{self.op}+{self.variant}" if self.variant in WEIGHTS else self.op

    @property
    def held_out(self) -> bool:
        """True for a third of the rows, of quantized weights for half of them, by their shapes."""
        drawn = zlib.crc32(f"{self.name} {self.shape} {self.world_size}".encode())
        # By bits with which both halves have all sizes of weights, and experts of few and of many pairs.
        bit = 27 if self.op in EXPERTS else 20
        return (drawn >> bit) % 2 == 1 if self.variant in WEIGHTS else drawn % 3 == 0

    @cached_property
    def place(self) -> tuple:
        return self.op, self.variant, self.shape, self.world_size, self.gpu, self.source


def rows() -> list[Row]:
    """Committed rows of weft's designs and of cuBLAS alone."""
    return [*_results(), *_candidates(), *_choices(), *_regrets(), *_quantized(), *_fp8_experts(), *_routers()]


def _results() -> Iterator[Row]:
    for file in sorted(ROOT.glob("results/h?00-x*/*.json")):
        folder = file.parent.name
        if any(word in folder for word in OTHER):
            continue
        for report in from_json(file.read_text()):
            alias, _, variant = report.op.partition("+")
            try:
                op = op_of(alias)
            except ValueError:
                continue
            alone = {
                row.shape: row.chain_us or row.median_us for row in report.rows if row.provider == "weft.gemm_alone"
            }
            for row in report.rows:
                if row.median_us is None or (op.form == "moe" and row.shape[-1] != 0):
                    continue
                family, _, design = row.provider.partition(".")
                known = {"op": op.name, "design": design, "shape": row.shape}
                if row.provider == "cublas" and variant in WEIGHTS and row.shape[0] <= FEW_ROWS:
                    continue  # weft computes them by another kernel
                if row.provider == "cublas":
                    known = {"op": "cublas", "design": "", "shape": row.shape}
                elif family != "weft" or op.name not in OPS or design not in ("auto", *own_designs(op)):
                    continue
                if (folder, op.name, row.shape) in EARLIER and design != "two_shot":
                    continue
                if op.name == "all_gather_grouped_matmul_silu_mul" and design == "auto":
                    known["design"] = ruled(row.shape, report.world_size)
                if row.provider == "weft.gemm_alone":
                    known = {"op": ALONE_OF[op.name], "design": "", "shape": of_all(row.shape, report.world_size)}
                yield Row(
                    variant=variant, world_size=report.world_size, gpu=report.machine["gpu"],
                    us=row.chain_us or row.median_us, source=folder, gemm_us=alone.get(row.shape), **known,
                )  # fmt: skip


def own_designs(op: Op) -> tuple[str, ...]:
    """Designs of an op, and the name under which its GEMM is timed alone."""
    return (*op.designs, *("gemm_alone",) * (op.name in ALONE_OF))


def of_all(shape: Sequence[int], world_size: int) -> tuple[int, ...]:
    """Shape of the GEMM alone of experts over the ranks: all ranks' tokens."""
    return shape[0] * world_size, *shape[1:]


def ruled(shape: Sequence[int], world_size: int) -> str:
    """Design that AG-MoE of 16 bits took up to b2a077f2, of which all committed rows named "auto" are."""
    tokens, _, _, _, hidden = shape[:5]
    return "sequential" if 2 * world_size * tokens * hidden <= (4 if world_size == 2 else 2) << 20 else "fused"


def _candidates() -> Iterator[Row]:
    """The best of each design among the candidates of earlier searches."""
    for world_size in (2, 4):
        file = ROOT / "lab" / f"h200-x{world_size}-candidates.json"
        for row in json.loads(file.read_text())["rows"]:
            best: dict[str, float] = {}
            for words, us in row["us"].items():
                design = RENAMED.get(words.split()[0], words.split()[0])
                if design in ("pipelined", "sequential", "fused"):
                    best[design] = min(us, best.get(design, math.inf))
            # matmul_all_reduce's pipelined design of that day was another one.
            for design, us in best.items() if row["op"] != "gemm-ar" else ():
                yield Row(
                    op=op_of(row["op"]).name, variant="", shape=tuple(row["shape"]), world_size=world_size,
                    gpu="NVIDIA H200", design=design, us=us, source=file.stem,
                )  # fmt: skip


def _choices() -> Iterator[Row]:
    file = ROOT / "lab" / "h200-choices.json"
    for row in json.loads(file.read_text())["rows"]:
        for design, us in row["us"].items():
            yield Row(
                op=op_of(row["op"]).name, variant="", shape=tuple(row["shape"]), world_size=row["world_size"],
                gpu="NVIDIA H200", design=design, us=us - ALONE, source=file.stem,
            )  # fmt: skip


def _regrets() -> Iterator[Row]:
    """Designs with their default fields, of files of ``weft bench --regret``."""
    for file in sorted((ROOT / "lab" / "h200-regret").glob("*.json")):
        for kept in read(file):
            row, (alias, _, variant) = kept.row, kept.row.op.partition("+")
            op, here = op_of(alias), machine_of(kept.gpu, row.world_size)
            case = op.case_of(row.shape, torch.bfloat16, row.world_size, **({variant: True} if variant else {}))
            call = op.call_of_case(case, here)
            for name in op.designs:
                if name in op.internal or (halves := row.us.get(label(op, op.default(name, call, here)))) is None:
                    continue
                yield Row(
                    op=op.name, variant=variant, shape=row.shape, world_size=row.world_size, gpu=kept.gpu, design=name,
                    us=statistics.mean(halves) - ALONE if computes(op) else in_a_row(statistics.mean(halves)), source=file.stem,
                )  # fmt: skip


def _quantized() -> Iterator[Row]:
    """GEMMs of quantized weights on one GPU, of rows in fp8 with weights in fp8."""
    here = {"world_size": 1, "gpu": "NVIDIA H200", "design": ""}
    variants = {"x8": "block_fp8", "mxfp4": "four_bit", "int4": "int4"}
    for name in ("h200-fp8-gemm", "h200-four-bit-gemm"):
        for row in _lab_rows(name):
            kernel, _, form = row["provider"].partition(" ")
            # These took as long as 64 rows and half as long again as one, by the same design: not known why, so no cost.
            odd = form in ("mxfp4", "int4") and (row.get("M"), row.get("K")) == (16, 12800)
            if kernel == "auto" and form in variants and not odd:
                gated = row.get("gated", False)
                yield Row(
                    op="matmul_silu_mul" if gated else "matmul", variant=variants[form], us=row["us"],
                    shape=(row["M"], row["N"] // (2 if gated else 1), row["K"]), source=name, **here,
                )  # fmt: skip
    # Of Qwen3 one of two ranks' experts; swept rows name their design.
    for row in _lab_rows("h200-four-bit-gemm", "experts"):
        if row["provider"] == "mxfp4" and "design" not in row:
            sizes = (8, 128, 64, *QWEN) if row["model"] == "qwen3-30b-a3b" else (4, 128, 128, *GPT_OSS)
            yield Row(
                op="grouped_matmul_silu_mul" if row["gated"] else "grouped_matmul", variant="four_bit",
                shape=(row["T"], *sizes), us=row["us"], source="h200-four-bit-gemm", **here,
            )  # fmt: skip


def _fp8_experts() -> Iterator[Row]:
    """Grouped GEMMs of experts in fp8 on one GPU, by the designs that plans take."""
    for name, (kind, *measured) in FP8_GROUPED.items():
        file = json.loads((ROOT / "lab" / f"{name}.json").read_text())
        for (gemm, alias), tokens in zip(FP8_GEMMS.items(), measured, strict=True):
            op, here = op_of(alias), machine_of("NVIDIA H200", 1)
            for row in file["rows"]:
                if (row.get("gemm"), kind) != (gemm, row.get("form", row.get("provider"))) or row[
                    "tokens"
                ] not in tokens:
                    continue
                shape = row["tokens"], 8, 128, file["held"], *QWEN
                call = op.call_of_case(op.case_of((*shape, 0), torch.bfloat16, 1, block_fp8=True), here)
                design = op.plan(call._replace(written=op.gated), here).design
                planned = {"block": call.block, **asdict(design)}
                if all(row.get(field, value) == value for field, value in planned.items()):
                    yield Row(
                        op=op.name, variant="block_fp8", shape=shape, us=row["us"], source=name, world_size=1,
                        gpu="NVIDIA H200", design="",
                    )  # fmt: skip


def _routers() -> Iterator[Row]:
    """Router, choice and schedule in a row on one GPU, by design."""
    designs = {"three launches": "sequential", "parts": "split", "one launch": "fused"}
    for name in ("h200-route-parts", "h200-route"):
        for row in json.loads((ROOT / "lab" / f"{name}.json").read_text())["rows"]:
            experts, hidden = ROUTERS[row["model"]]
            for printed, design in designs.items():
                if printed in row["times"]:
                    yield Row(
                        op="matmul_route_schedule", variant="", shape=(row["tokens"], 8, experts, experts, hidden, 1),
                        us=row["times"][printed]["in_a_row_us"], source=name, world_size=1, gpu="NVIDIA H200", design=design,
                    )  # fmt: skip


def _lab_rows(name: str, rows: str = "rows") -> list[dict[str, Any]]:
    """Rows of a lab file with a time and its provider."""
    every = json.loads((ROOT / "lab" / f"{name}.json").read_text())[rows]
    return [row for row in every if "us" in row and "provider" in row]


def in_a_row(us: float) -> float:
    """Time in a row of a call whose geometric mean of that and of the time alone is ``us``."""
    return (math.sqrt(ALONE**2 + 4 * us**2) - ALONE) / 2


def machine_of(gpu: str, world_size: int) -> Machine:
    like = next(like for like, known in capabilities.GPUS.items() if known.device_name == gpu)
    return machine(capabilities.simulated(world_size, like=like), world_size)


def times(fitted: Fitted, row: Row) -> Mapping[str, float]:
    """Predicted µs by design at a row's shape."""
    return costs(row.constants, fitted, "matmul" if row.op == "cublas" else row.op, row.asked)


def predicted(fitted: Fitted, row: Row) -> float | None:
    """Predicted µs of a row; None for a design without costs."""
    of = times(fitted, row)
    if len(of) == 1 and "" in of:
        return of[""]
    return min(of.values()) if row.design == "auto" else of.get(row.design)


def fit(
    measured: Sequence[Row], start: Fitted, groups: Sequence[str] = tuple(GROUPS), fields: Sequence[str] = ()
) -> Fitted:
    """Constants of these groups with the least squares of log errors, group after group. fields: as of ``descended``."""
    for group in groups:
        ops, forms = GROUPS[group], FORMS.get(group)
        of_group = [
            row for row in measured if row.op in ops and _is_of(row, forms) and predicted(start, row) is not None
        ]
        if of_group:
            start = _fitted_group(group, of_group, start, fields)
    return start


def _fitted_group(group: str, measured: Sequence[Row], start: Fitted, fields: Sequence[str]) -> Fitted:
    ordered = sorted(measured, key=lambda row: row.place)
    weights = weights_of(ordered)

    def loss(constants: Any) -> float:
        return loss_of(replace(start, **{group: constants}), ordered, weights)

    return replace(start, **{group: descended(getattr(start, group), loss, fields)})


def descended(start: Any, loss: Callable[[Any], float], names: Sequence[str] = ()) -> Any:
    """Record with the least loss, by steps along each field that halve. names: of the fields; all of them if empty."""
    best, step = loss(start), 0.4
    while step > 0.005:
        before = best
        for name in names or start.__dataclass_fields__:
            for factor in (1 + step, 1 / (1 + step)):
                other = replace(start, **{name: getattr(start, name) * factor})
                if (found := loss(other)) < best:
                    best, start = found, other
        if best > before * 0.9995:
            step /= 2
    return start


def _is_of(row: Row, forms: Sequence[str] | None) -> bool:
    """True for a row of one of these forms of quantized weights; None: of weights of 16 bits."""
    return row.variant not in WEIGHTS if forms is None else row.variant in forms


def weights_of(measured: Sequence[Row]) -> list[float]:
    """Weight of each row: more of designs that are nearly the fastest at their shape, between which a choice is made."""
    fastest: dict[tuple, float] = {}
    for row in measured:
        fastest[row.place] = min(row.us, fastest.get(row.place, math.inf))
    return [NEAR_WEIGHT if row.us <= NEAR * fastest[row.place] else 1.0 for row in measured]


def loss_of(fitted: Fitted, measured: Sequence[Row], weights: Sequence[float]) -> float:
    """Sum of squares of log errors of rows in the order of their places."""
    total, at, of, errors = 0.0, None, {}, []
    for row, weight in zip(measured, weights, strict=True):  # rows of one shape follow each other
        if row.place != at:
            total, errors = total + _squares(at, errors), []
            at, of = row.place, of_measured_gemm(fitted, row)
        us = of[""] if "" in of else min(of.values()) if row.design == "auto" else of[row.design]
        errors.append((weight, math.log(us / row.us)))
    return total + _squares(at, errors)


def of_measured_gemm(fitted: Fitted, row: Row) -> Mapping[str, float]:
    """``times``, with the time of the GEMM alone as it was measured: what a design adds to it decides between designs."""
    of = times(fitted, row)
    if row.gemm_us is None or row.op not in ALONE_OF:
        return of
    alone = replace(row, op=ALONE_OF[row.op], shape=of_all(row.shape, row.world_size))
    more = row.gemm_us - min(times(fitted, alone).values())
    return {name: us + more for name, us in of.items()}


def _squares(place: tuple | None, errors: Sequence[tuple[float, float]]) -> float:
    """Sum of squares at one shape.

    Only ratios between designs count in a search, since the GPU's clocks were lower there, and of experts over the ranks where
    their GEMM was not timed alone.
    """
    shift = 0.0
    op, source = (place[0], place[-1]) if place else ("", "")
    if source.endswith("-candidates") or (op in ALONE_OF and source.startswith("regret")):
        shift = sum(weight * error for weight, error in errors) / sum(weight for weight, _ in errors)
    return sum(weight * min(1.0, abs(error - shift)) ** 2 for weight, error in errors)


# --- errors ------------------------------------------------------------------------------------------------------------


def errors(fitted: Fitted, measured: Sequence[Row]) -> dict[str, dict[str, tuple[int, float, float, float]]]:
    """As ``weft.costs.predicted.ERRORS`` has them."""
    by_op: dict[str, dict[str, list[tuple[bool, float]]]] = {}
    for row in measured:
        if (us := predicted(fitted, row)) is not None:
            by_op.setdefault(row.name, {}).setdefault(str(row.world_size), []).append((row.held_out, us / row.us - 1))
    return {
        op: {world: _errors(found) for world, found in sorted(worlds.items())} for op, worlds in sorted(by_op.items())
    }


def _errors(found: Sequence[tuple[bool, float]]) -> tuple[int, float, float, float]:
    every = [error for _, error in found]
    unseen = [abs(error) for held_out, error in found if held_out] or [abs(error) for error in every]
    seen = [abs(error) for held_out, error in found if not held_out] or unseen
    return (
        len(every), round(statistics.mean(seen), 4), round(statistics.mean(unseen), 4), round(max(every, key=abs), 4)
    )  # fmt: skip


def by_design(fitted: Fitted, measured: Sequence[Row]) -> Iterator[str]:
    """A line for each op, design and world size: mean errors of rows that the fit has seen and has not."""
    groups: dict[tuple, list[tuple[bool, float]]] = {}
    for row in measured:
        if (us := predicted(fitted, row)) is not None:
            key = f"{row.op}{'+' * bool(row.variant)}{row.variant}", row.design, row.world_size
            groups.setdefault(key, []).append((row.held_out, us / row.us - 1))
    for (op, design, world_size), found in sorted(groups.items()):
        count, seen, unseen, largest = _errors(found)
        head = f"{op:38} {design:17} W={world_size} {count:4} rows"
        yield f"{head}  {seen:6.1%} fitted {unseen:6.1%} held out {largest:+6.0%} at most"


# --- regret ------------------------------------------------------------------------------------------------------------


def regrets(fitted: Fitted, measured: Sequence[Row]) -> Iterator[tuple[Row, str, str, str, dict[str, float]]]:
    """(a row, design by the model, by the rule, the best, µs by design) of each shape with several designs."""
    by_place: dict[tuple, dict[str, float]] = {}
    some: dict[tuple, Row] = {}
    for row in measured:
        if row.op != "cublas" and row.design != "auto":
            by_place.setdefault(row.place, {})[row.design] = row.us
            some[row.place] = row
    for place, us in by_place.items():
        row = some[place]
        costs = {name: time for name, time in times(fitted, row).items() if name in us}
        if len(us) > 1 and costs:
            rule = rule_of(row)
            yield row, chosen(costs), rule, min(us, key=lambda name: us[name]), us


def rule_of(row: Row) -> str:
    """Name of the design by the op's rule, without rows of tables."""
    op, here = op_of(row.op), machine_of(row.gpu, row.world_size)
    shape = row.shape + (0,) * (op.form == "moe" and len(row.shape) == 6)
    case = op.case_of(shape, torch.bfloat16, row.world_size, **({row.variant: True} if row.variant else {}))
    return op.rule(op.call_of_case(case, here), here)[0]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--errors", action="store_true")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, help="the rest stays as shipped")
    parser.add_argument(
        "--fields", nargs="+", default=(), help="of the one group that is named; its rest stays as shipped"
    )
    asked = parser.parse_args()
    measured = rows()
    if asked.errors:
        put(ERRORS, json.dumps(errors(read_fitted(), measured), indent=1) + "\n")
        return
    shipped, new = read_fitted(), Fitted()
    groups = asked.groups or tuple(GROUPS)
    start = shipped if asked.fields else replace(shipped, **{group: getattr(new, group) for group in groups})
    fitted = fit([row for row in measured if not row.held_out], start, groups, asked.fields)
    if asked.write:
        put(FILE, to_json(fitted))
        put(ERRORS, json.dumps(errors(fitted, measured), indent=1) + "\n")
    for line in by_design(fitted, measured):
        print(line)
    print()
    by_op: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for row, model, rule, best, us in regrets(fitted, measured):
        of_model = us[model] / us[best]
        of_rule = us[rule] / us[best] if rule in us else math.nan
        by_op.setdefault((f"{row.op}{'+' * bool(row.variant)}{row.variant}", row.world_size), []).append(
            (of_model, of_rule)
        )
        if of_model > 1.03 or of_rule > 1.03:
            where = f"{row.op} {row.gpu} W={row.world_size} {row.shape}"
            print(f"{where}: model {model} {of_model:.2f}, rule {rule} {of_rule:.2f}, best {best}")
    for (op, world_size), found in sorted(by_op.items()):
        model = math.exp(statistics.mean(math.log(one) for one, _ in found))
        of_rule = [two for _, two in found if not math.isnan(two)]
        rule = math.exp(statistics.mean(map(math.log, of_rule))) if of_rule else math.nan
        worst, worst_rule = max(one for one, _ in found), max(of_rule, default=math.nan)
        print(
            f"{op:38} W={world_size} {len(found):3} shapes: regret of the model {model:.3f} (worst {worst:.2f}), "
            f"of the rule {rule:.3f} (worst {worst_rule:.2f})"
        )


if __name__ == "__main__":
    main()
