"""Errors of predicted steps on the committed steps of models, and the fit of the costs of whole steps.

    python -m benchmarks.step_errors         # a line for each committed row, and the errors by kind
    python -m benchmarks.step_errors --fit   # fits weft/models/step_costs.json to the dense rows of two H200s first

Rows of other world sizes, GPUs and models with experts are not seen by the fit.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from weft.bench.harness.report import from_json
from weft.bench.models.steps import config_of
from weft.bench.models.workload import EXPERTS, LAYERS, QUANTIZED
from weft.costs.gemms import sequential_rows
from weft.costs.recipes import FUSED_NORM, REPLICATED, SEQUENCE_PARALLEL
from weft.models.config import DecoderConfig
from weft.models.step_costs import FILE, StepCosts, fitted, write
from weft.models.steps import Layout, kind_of, step_time, tokens_of
from weft.ops.gemm.small_m_rule import MAX_ROWS

RESULTS = Path(__file__).resolve().parent / "results"
GOAL = 0.10
GPUS = {"NVIDIA H200": "h200", "NVIDIA H100 80GB HBM3": "h100"}
# A prompt of 128 tokens of random weights chooses few experts, since its tokens are alike: no cost of experts shows in it.
ALIKE = 128
# Tokens from which the measured plans split a pass, and up to which their norms added up over the ranks, by world size.
SPLIT_FROM, FUSED_UP_TO = 2048, {1: 128, 2: 1024, 4: 512}
# Providers by which a step was measured by each recipe -> the recipe that the mode took.
MODES = {"weft.replicated": FUSED_NORM, "weft.sequence_parallel": SEQUENCE_PARALLEL}
# Commit whose prompts by "sequence_parallel" of few tokens, with GEMMs in sequence, are left out: MLPs turned rows, as plans no
# longer do.
TURNED = "285370a5ee1fdc0374e1f6f1586a81ff3b238d18"
# Commit whose steps of more rows than small GEMMs have are left out: torch's operations, six a layer, applied a norm's scale.
SCALED = "9db60856e441bcd2bd244a5613a8b3e7a282cd84"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Measured step (batch, length, new).

    layout  of the model on the ranks
    mode    recipe that was asked for; "": the plan's
    layers  the first ones of the model; None: all
    """

    gpu: str
    model: str
    layout: Layout
    step: tuple[int, int, int]
    us: float
    folder: str
    mode: str = ""
    layers: int | None = None

    @property
    def config(self) -> DecoderConfig:
        return config_of(self.model, self.layers)

    @property
    def kind(self) -> str:
        return kind_of(self.config, self.step)

    @property
    def recipe(self) -> str:
        """Recipe by which it was measured."""
        tokens, world_size = tokens_of(self.step), self.layout.world_size
        if self.mode:
            return self.mode
        if world_size > 1 and tokens >= SPLIT_FROM:
            return SEQUENCE_PARALLEL
        return FUSED_NORM if tokens <= FUSED_UP_TO[world_size] else REPLICATED

    @property
    def is_fitted(self) -> bool:
        """True for the rows of the fit: dense models on two H200s."""
        return self.gpu == "h200" and self.layout.world_size == 2 and self.config.experts is None

    @property
    def is_alike(self) -> bool:
        batch, _, new = self.step
        return self.config.experts is not None and batch == 1 and new > 1 and new <= ALIKE

    def __str__(self) -> str:
        batch, length, new = self.step
        step = f"decode {batch}x{length}" if new == 1 else f"prefill {batch}x{length}"
        how = [f"W={self.layout.world_size}"]
        how += [f"{self.layers}{LAYERS}"] if self.layers else []
        how += [self.layout.quantization] if self.layout.quantization else []
        how += ["slices"] if self.layout.slices else []
        how += ["spread"] if self.layout.spread else []
        how += [self.mode] if self.mode else []
        return f"{self.gpu} {self.model} {', '.join(how)}: {step}"


def rows(results: Path = RESULTS) -> list[Row]:
    """Committed steps; of a step in several folders the last one."""
    by_step: dict[tuple, Row] = {}
    for row in _rows(results):
        by_step[row.gpu, row.model, row.layers, row.layout, row.step, row.recipe] = row
    return list(by_step.values())


def _rows(results: Path) -> Iterator[Row]:
    for file in sorted(results.glob("h*/model.w*.json")):
        for report in from_json(file.read_text()):
            model, *parts = report.subject.split(", ")
            layout, layers = Layout(world_size=report.world_size), None
            for part in parts:
                if part.startswith(QUANTIZED):
                    layout = replace(layout, quantization=part.removeprefix(QUANTIZED))
                elif part == f"{EXPERTS}slices":
                    layout = replace(layout, slices=True)
                elif part.endswith(LAYERS):
                    layers = int(part.removesuffix(LAYERS))
            for row in report.rows:
                mode, step = MODES.get(row.provider, ""), tuple(row.shape)
                few = tokens_of(step) <= sequential_rows(layout.world_size)
                commit = report.machine.get("commit")
                turned = mode == SEQUENCE_PARALLEL and few and commit == TURNED
                scaled = row.provider == "weft.auto" and tokens_of(step) > MAX_ROWS and commit == SCALED
                known = mode or row.provider in ("weft.auto", "weft.context_parallel")
                if known and row.median_us is not None and not (turned or scaled):
                    spread = row.provider == "weft.context_parallel"
                    yield Row(
                        gpu=GPUS[report.machine["gpu"]], model=model, layout=replace(layout, spread=spread),
                        step=step, us=row.median_us, folder=file.parent.name, mode=mode, layers=layers,
                    )  # fmt: skip


def error(row: Row, costs: StepCosts | None = None) -> float:
    made = step_time(row.config, row.step, row.layout, row.gpu, costs, row.recipe)
    return made.seconds * 1e6 / row.us - 1


def fit(seen: Sequence[Row]) -> StepCosts:
    """Costs with the least squares of log errors, by steps along each cost that halve."""
    costs = StepCosts()
    steps = {"attention": 4.0, "sustained": 0.1, "fp8": 0.2, "fp8_few": 0.05}
    best = _loss(costs, seen)
    for _ in range(8):
        moved = True
        while moved:
            moved = False
            for name, step in steps.items():
                for sign in (step, -step):
                    other = replace(costs, **{name: getattr(costs, name) + sign})
                    if (loss := _loss(other, seen)) < best - 1e-9:
                        best, costs, moved = loss, other, True
        steps = {name: step / 2 for name, step in steps.items()}
    return costs


def _loss(costs: StepCosts, seen: Sequence[Row]) -> float:
    return sum(math.log(1 + error(row, costs)) ** 2 for row in seen)


def error_bars(costs: StepCosts, every: Sequence[Row]) -> tuple[tuple[str, float], ...]:
    """Root mean square of the errors of each kind, of rows that the fit has not seen."""
    kinds: dict[str, list[float]] = {}
    for row in every:
        if not row.is_fitted and not row.is_alike:
            kinds.setdefault(row.kind, []).append(error(row, costs))
    return tuple(
        (kind, round(math.sqrt(statistics.mean(e * e for e in one)), 3)) for kind, one in sorted(kinds.items())
    )


def table(every: Sequence[Row]) -> str:
    """Table of all rows, as docs/step-errors.md has it."""
    lines = ["| step | measured, ms | predicted | error | |", "|---|---:|---:|---:|---|"]
    for row in sorted(every, key=lambda row: (row.gpu != "h200", str(row))):
        wrong = error(row)
        note = "fitted" if row.is_fitted else "random weights choose few experts" if row.is_alike else ""
        lines.append(f"| {row} | {row.us / 1e3:.2f} | {row.us * (1 + wrong) / 1e3:.2f} | {wrong:+.0%} | {note} |")
    return "\n".join(lines)


def summary(every: Sequence[Row]) -> str:
    """Table of errors by kind of step."""
    lines = ["| steps | rows | mean error | largest | within 10 % |", "|---|---:|---:|---:|---:|"]
    groups = {
        "fitted: dense, two H200s": [row for row in every if row.is_fitted],
        "dense, one and four H200s, H100s": [r for r in every if not r.is_fitted and r.config.experts is None],
        "experts": [row for row in every if row.config.experts is not None and not row.is_alike],
        "experts, one prompt of 128 tokens of random weights": [row for row in every if row.is_alike],
    }
    for name, group in groups.items():
        errors = [error(row) for row in group]
        within = sum(abs(one) <= GOAL for one in errors)
        mean = statistics.mean(map(abs, errors))
        lines.append(f"| {name} | {len(errors)} | {mean:.1%} | {max(errors, key=abs):+.0%} | {within} |")
    return "\n".join(lines)


def main() -> None:
    every = rows()
    if "--fit" in sys.argv[1:]:
        costs = fit([row for row in every if row.is_fitted])
        write(replace(costs, errors=error_bars(costs, every)))
        fitted.cache_clear()
        print(f"{FILE.name}: {costs}\n")
    print(f"{summary(every)}\n\n{table(every)}")


if __name__ == "__main__":
    main()
