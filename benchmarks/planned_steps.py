"""Steps as planned beside measured ones, on GPUs: twelve cells of model, world size and load, three configurations each.

    python -m benchmarks.planned_steps                     # names of the cells, with predictions; needs no GPU
    python -m benchmarks.planned_steps 32b-one 8b-many     # measures these cells, and prints predicted, measured, their ratio
    python -m benchmarks.planned_steps --world-size 2 --seconds 130 --json cells.json
                                                           # cells of this world size that the file lacks, for so long
    python -m benchmarks.planned_steps --page              # the table of docs/planning.md, of the committed file

Weights are random, so acceptance of drafts is set: as many tokens a step as the load says. A decode step is the median of the
steps between which no prompt was read; the best of three configurations is the one with the most tokens a second in such steps.
The first token is one prompt's alone, the median of three after WARM that capture its graph.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import weft
from weft.bench.harness.machine import versions
from weft.bench.models.steps import config_of
from weft.engine import EngineConfig
from weft.engine.followed import Measured, ServingPlan
from weft.engine.speculation.options import SpeculativeConfig
from weft.models import DecoderConfig
from weft.models.steps import Layout
from weft.predict.load import Drafts
from weft.predict.serving import Candidate, decode_step, prompt_seconds
from weft.runtime.codec import exchangeable
from weft.runtime.files import put

if TYPE_CHECKING:
    from weft.runtime.team.team import Team

ALLOWED = Drafts(method="ngram", acceptance=0.6)
# Tokens of an answer: the steps in its middle are at the context that is predicted.
ANSWER = 96
# Prompts alone before the timed ones: the second one of a length captures its graph, or the fifth of a ragged shape.
WARM, TIMED = 5, 3
GOAL = 0.10
# Share of tokens a second within which configurations are equal.
CLOSE = 0.02
FILE = Path(__file__).resolve().parent / "lab" / "h200-planned-steps.json"


class Cell(NamedTuple):
    """One load of one model. ways: three configurations, as changes of ``Layout``, with ``drafts`` and ``batch``."""

    name: str
    model: str
    world_size: int
    batch: int
    prompt: int
    ways: tuple[dict[str, Any], ...]


DRAFTED = ({}, {"drafts": 2}, {"drafts": 4})
CELLS = (
    Cell("0.6b-many", "qwen3-0.6b", 1, 64, 256, ({}, {"batch": 32}, {"batch": 16})),
    Cell("8b-one", "qwen3-8b", 1, 1, 1024, DRAFTED),
    Cell("8b-many", "qwen3-8b", 1, 32, 512, DRAFTED),
    Cell("8b-fp8", "qwen3-8b", 1, 8, 1024, ({}, {"quantization": "fp8"}, {"quantization": "fp8_per_channel"})),
    Cell("30b-one", "qwen3-30b-a3b", 1, 1, 1024, DRAFTED),
    Cell("30b-many", "qwen3-30b-a3b", 1, 32, 512, ({}, {"batch": 16}, {"drafts": 2})),
    Cell("32b-one-x2", "qwen3-32b", 2, 1, 1024, ({}, {"spread": True}, {"drafts": 2})),
    Cell("32b-many-x2", "qwen3-32b", 2, 32, 512, ({}, {"spread": True}, {"drafts": 2})),
    Cell("32b-long-x2", "qwen3-32b", 2, 4, 16384, ({}, {"spread": True}, {"stages": 2})),
    Cell("8b-many-x2", "qwen3-8b", 2, 64, 512, ({}, {"spread": True}, {"stages": 2})),
    Cell("30b-one-x2", "qwen3-30b-a3b", 2, 1, 1024, ({}, {"slices": True}, {"drafts": 2})),
    Cell("30b-many-x2", "qwen3-30b-a3b", 2, 32, 512, ({}, {"slices": True}, {"stages": 2})),
)


@exchangeable
@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One configuration of a cell, with its times; measured ones are 0 before they are measured."""

    label: str
    tokens: float
    predicted: float
    first_predicted: float
    measured: float = 0.0
    first_measured: float = 0.0
    error: str = ""

    def rate(self, seconds: float) -> float:
        """Tokens a second of a step that takes ``seconds``."""
        return self.tokens / seconds if seconds else 0.0


def split(cell: Cell, way: dict[str, Any]) -> tuple[Candidate, int]:
    """Candidate of a configuration, and its sequences."""
    changes = {name: value for name, value in way.items() if name not in ("drafts", "batch")}
    ranks = cell.world_size // changes.get("stages", 1)
    layout = Layout(world_size=ranks, **changes)
    return Candidate(layout=layout, drafts=way.get("drafts", 0)), way.get("batch", cell.batch)


def options(cell: Cell, way: dict[str, Any]) -> EngineConfig:
    """Engine of a configuration."""
    candidate, batch = split(cell, way)
    layout, drafts = candidate.layout, candidate.drafts
    speculative = None
    if drafts:
        tokens = ALLOWED.tokens(drafts)
        speculative = SpeculativeConfig(
            num_speculative_tokens=drafts, adaptive=False, rejection_sample_method="synthetic",
            synthetic_acceptance_length=tokens,
        )  # fmt: skip
    experts = config_of(cell.model).experts is not None and layout.world_size > 1
    return EngineConfig(
        max_seq_len=cell.prompt + ANSWER + 8,
        max_batch=batch,
        expert_layout=("slices" if layout.slices else "whole") if experts else None,
        context_parallel=layout.spread if layout.world_size > 1 else None,
        pipeline_parallel=layout.stages,
        quantization=layout.quantization,
        speculative=speculative,
        prefix_caching=False,
    )


def predicted(cell: Cell, gpu: str) -> list[Way]:
    """The cell's configurations as predicted."""
    config, ways = config_of(cell.model), []
    for way in cell.ways:
        candidate, batch = split(cell, way)
        _, seconds = decode_step(config, candidate, gpu, batch, cell.prompt + ANSWER // 2)
        first = prompt_seconds(config, candidate, gpu, cell.prompt, 0, EngineConfig().chunk_tokens)
        tokens = batch * ALLOWED.tokens(candidate.drafts)
        label = ", ".join(f"{name} {value}" for name, value in way.items()) or "plain"
        ways.append(Way(label=label, tokens=tokens, predicted=seconds, first_predicted=first))
    return ways


def measure_all(team: Team, cells: Sequence[Cell], seconds: float, file: Path | None) -> None:
    """Measure cells until ``seconds`` have passed; rank 0 prints each one and adds it to the file."""
    begin = time.monotonic()
    for cell in cells:
        if not team.exchange(time.monotonic() - begin < seconds)[0]:
            return
        ways = measure(team, cell)
        if team.rank == 0:
            print("\n".join(report(cell, ways)), flush=True)
            if file is not None:
                kept = {"gpu": team.caps.device_name, "versions": versions(), "cell": cell.name, "ways": ways}
                write(file, [*read(file), kept])


def read(file: Path) -> list[dict[str, Any]]:
    """Measured cells of a file, each with its ``Way``s; none without a file."""
    cells = json.loads(file.read_text())["cells"] if file.is_file() else []
    return [{**cell, "ways": [Way(**way) for way in cell["ways"]]} for cell in cells]


def write(file: Path, cells: Sequence[dict[str, Any]]) -> None:
    """Write cells, a line for each."""
    lines = [json.dumps({**cell, "ways": [dataclasses.asdict(way) for way in cell["ways"]]}) for cell in cells]
    put(file, '{"cells": [\n ' + ",\n ".join(lines) + "\n]}\n")


def page(cells: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Lines of the table of measured cells, and their count within GOAL and with the best configuration named."""
    by_name = {cell.name: cell for cell in CELLS}
    head = "| cell | configuration | predicted, ms | measured | measured / predicted | tokens/s predicted, measured |"
    yield f"{head} first token predicted, measured, ms |"
    yield "|---|---|---:|---:|---:|---:|---:|"
    within, named = 0, 0
    for kept in cells:
        cell, ways = by_name[kept["cell"]], kept["ways"]
        for way in ways:
            head = f"| {cell.name}, W={cell.world_size} | {way.label}"
            if way.error:
                yield f"{head} | {way.predicted * 1e3:.2f} | {way.error} | – | – | – |"
                continue
            rates = f"{way.rate(way.predicted):.0f}, {way.rate(way.measured):.0f}"
            times = f"{way.predicted * 1e3:.2f} | {way.measured * 1e3:.2f} | {way.measured / way.predicted:.2f}"
            first = f"{way.first_predicted * 1e3:.1f}, {way.first_measured * 1e3:.1f}"
            yield f"{head} | {times} | {rates} | {first} |"
        plain = ways[0]
        within += bool(plain.measured) and abs(plain.predicted / plain.measured - 1) <= GOAL
        named += share_of_best(ways) >= 1 - CLOSE
    yield ""
    yield (
        f"Of {len(cells)} cells the first configuration's step is predicted within {GOAL:.0%} in {within}; the configuration "
        f"with the most predicted tokens a second has the most measured ones, or is within {CLOSE:.0%} of the most, in {named}."
    )


def measure(team: Team, cell: Cell) -> list[Way]:
    """The cell's configurations, measured on all ranks; rank 0's times count."""
    made = []
    for way, told in zip(cell.ways, predicted(cell, team.caps.device_name), strict=True):
        try:
            step, first = _measured(team, config_of(cell.model), options(cell, way), cell, way)
            made.append(replace(told, measured=step, first_measured=first))
        except (weft.errors.WeftError, ValueError) as error:
            made.append(replace(told, error=str(error).splitlines()[0][:160]))
        gc.collect()
        if team.device.type == "cuda":
            torch.cuda.empty_cache()
    return team.exchange(made)[0]


def _measured(
    team: Team, config: DecoderConfig, engine_config: EngineConfig, cell: Cell, way: dict[str, Any]
) -> tuple[float, float]:
    """(median of decode steps, time of the first token of a prompt alone), after runs that capture graphs."""
    engine = weft.Engine(config, team, config=engine_config)
    batch, draw = split(cell, way)[1], random.Random(0)
    prompts = [draw.choices(range(config.vocab_size), k=cell.prompt) for _ in range(batch)]
    engine.generate(prompts, max_tokens=12, ignore_eos=True)
    nothing = ServingPlan(file="", model="", sizes=(), gpu="", world_size=team.size, options=(), steps=())
    engine.measured = Measured(nothing)
    engine.generate(prompts, max_tokens=ANSWER, ignore_eos=True)
    step = engine.measured.median(engine.batch.runner.bucket(batch))
    first = []
    for _ in range(WARM + TIMED):
        engine.generate(prompts[:1], max_tokens=2, ignore_eos=True)
        first.append(engine.stats.time_to_first_token)
    return step, statistics.median(first[WARM:])


def report(cell: Cell, ways: Sequence[Way]) -> Iterator[str]:
    """Lines of a cell: predicted, measured, ratio; and whether the best configuration was named."""
    for way in ways:
        if way.error:
            yield f"{cell.name:12} W={cell.world_size} {way.label:18} {way.error}"
            continue
        ratio = f"{way.measured / way.predicted:.2f}" if way.measured else "-"
        step = f"step predicted {way.predicted * 1e3:7.2f} ms, measured {way.measured * 1e3:7.2f}, ratio {ratio}"
        rate = f"tokens/s {way.rate(way.predicted):7.0f}, {way.rate(way.measured):7.0f}"
        first = f"first token {way.first_predicted * 1e3:6.1f} ms, {way.first_measured * 1e3:6.1f}"
        yield f"{cell.name:12} W={cell.world_size} {way.label:30} {step}; {rate}; {first}"
    ran = [way for way in ways if way.measured]
    if ran:
        best = max(ran, key=lambda way: way.rate(way.predicted))
        fastest = max(ran, key=lambda way: way.rate(way.measured))
        share = f"the predicted one has {share_of_best(ways):.0%} of it"
        yield f"{cell.name:12} best: predicted {best.label}, measured {fastest.label} ({share})"


def share_of_best(ways: Sequence[Way]) -> float:
    """Measured tokens a second of the configuration that is predicted to be the best, over the most measured ones."""
    ran = [way for way in ways if way.measured]
    if not ran:
        return 0.0
    best = max(ran, key=lambda way: way.rate(way.predicted))
    return best.rate(best.measured) / max(way.rate(way.measured) for way in ran)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cells", nargs="*", help="names; without any nothing is measured")
    parser.add_argument("--world-size", type=int, help="all cells of this world size")
    parser.add_argument("--gpu", default="h200", help="of predictions without GPUs")
    parser.add_argument("--json", type=Path, help="file of cells, of which none is measured twice")
    parser.add_argument("--seconds", type=float, default=600, help="begin no further cell after this time")
    parser.add_argument("--page", action="store_true", help="print the table of the committed file")
    flags = parser.parse_args()
    if flags.page:
        print("\n".join(page(read(FILE))))
        return
    names = [cell.name for cell in CELLS]
    if unknown := [name for name in flags.cells if name not in names]:
        sys.exit(f"cell {unknown[0]} is not one of {', '.join(names)}")
    chosen = [cell for cell in CELLS if cell.name in flags.cells or cell.world_size == flags.world_size]
    if not chosen:
        print("\n".join(line for cell in CELLS for line in report(cell, predicted(cell, flags.gpu))))
    done = {kept["cell"] for kept in read(flags.json)} if flags.json is not None else set()
    for world_size in sorted({cell.world_size for cell in chosen}):
        left = [cell for cell in chosen if cell.world_size == world_size and cell.name not in done]
        if left:
            weft.launch(measure_all, world_size, "cuda", args=(left, flags.seconds, flags.json))


if __name__ == "__main__":
    main()
