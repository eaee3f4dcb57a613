"""Program of a user, which mypy reads in `make lint`: the types of weft's public names are there, and mistakes are seen.

A line with `# type: ignore[...]` is a mistake on purpose: mypy fails if it does not see it (`warn_unused_ignores`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from typing_extensions import assert_type

import weft
from weft import errors, layers, models, ops
from weft.check import Report
from weft.engine import Completion, EngineConfig


def main(team: weft.Team, rows: int) -> torch.Tensor:
    """Collectives, GEMMs with the communication under them, symmetric memory and a trace."""
    x = team.zeros((rows, 64), dtype=torch.bfloat16)
    signals = team.signals(team.size)
    assert_type(x, torch.Tensor)
    assert_type(signals, torch.Tensor)
    with weft.trace("trace.json", team):
        gathered = ops.all_gather(x, team)
        assert_type(ops.all_reduce(gathered, team), torch.Tensor)
        assert_type(ops.matmul_reduce_scatter(gathered, x, team), torch.Tensor)
        assert_type(ops.matmul_all_reduce(gathered, x, team), torch.Tensor)
    ops.barrier(team)
    ops.all_reduce(x, 3)  # type: ignore[arg-type]
    ops.all_reduce(x, team, "one_shot", True)  # type: ignore[call-arg]
    team.zeros((rows,), dtypes=torch.bfloat16)  # type: ignore[call-arg]
    return gathered


def on_virtual_ranks() -> Report:
    """Starts of ranks, and the checker."""
    weft.launch(main, 4, args=(8,))
    weft.simulate(main, world_size=3, seed=7, args=(8,))
    weft.launch(main, world="four")  # type: ignore[call-arg]
    report = weft.check(main, [2, 4], schedules=50)
    assert_type(report, Report)
    assert_type(report.ok, bool)
    return report


def answers(prompts: Sequence[str]) -> Iterator[Completion]:
    """The engine."""
    params = weft.SamplingParams(temperature=0.7, max_tokens=100)
    weft.SamplingParams(temprature=0.7)  # type: ignore[call-arg]
    with weft.LLM("path/of/a/model", world_size=2, config=EngineConfig(warm_up=True)) as llm:
        assert_type(llm, weft.LLM)
        yield from llm.generate(prompts, params)


def layer(team: weft.Team) -> layers.Mode:
    """Layers, models and errors."""
    assert_type(models.DecoderConfig.named("qwen3-8b"), models.DecoderConfig)
    assert_type(errors.NoTeam(), errors.NoTeam)
    layers.TPMLP.from_module(torch.nn.Linear(1, 1), 5)  # type: ignore[call-arg, arg-type]
    return "replicated"
