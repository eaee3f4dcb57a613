"""``weft.check``: runs of a main under many schedules, and the report on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from weft.arguments import (
    check_args,
    check_bool,
    check_callable,
    check_choice,
    check_heap_bytes,
    check_instance,
    check_optional,
    check_seed,
    check_sequence,
    check_virtual_ranks,
    is_integer,
    positive,
)
from weft.check.exhaustive import explore
from weft.check.gathered import Gathered
from weft.check.report import DEFAULT_GPU, DEFAULT_LINK, DEFAULT_SMS, Report, Schedule
from weft.check.runner import Outcome, Runner
from weft.check.shrinking import Shrinking
from weft.check.strategies import STRATEGIES, strategy_of
from weft.runtime.capabilities import GPUS, LINKS
from weft.runtime.mains import check_main, check_takes
from weft.runtime.team.shape import check_node_size

DEFAULT_SCHEDULES = 20
# Resident programs of a rank, for mains that size kernels by them; each for as many runs as "mix" has strategies.
_SMS_IN_TURN = (DEFAULT_SMS, 2, 4, 1)
_RUNS_OF_ONE = 4
Progress = Callable[[int, int, int], None]


def check(
    main: Callable[..., Any],
    world_size: int | Sequence[int] = 4,
    *,
    schedules: int = DEFAULT_SCHEDULES,
    strategy: str = "mix",
    seed: int = 0,
    depth: int = 3,
    sms: int | None = None,
    like: str = DEFAULT_GPU,
    heap_bytes: int | None = 8 << 20,
    node_size: int | None = None,
    link: str = DEFAULT_LINK,
    args: Sequence[Any] = (),
    compile: bool = True,
    deterministic: bool = True,
    script: str = "",
    progress: Progress | None = None,
    on_results: Callable[[list[Any]], None] | None = None,
) -> Report:
    """Run ``main(team, *args)`` under ``schedules`` schedules for each world size, and report errors.

    world_size     one or several
    strategy       "mix" (all in turn), "uniform", "pct", "slow", "delay" or "exhaustive" (at most ``schedules`` runs; the
                   report says "exhausted" or "bounded")
    seed           of the first schedule; the i-th has seed + i
    depth          number of ordering constraints for pct
    sms            programs of a rank that can be resident at once. None: 8, or for a main that asks (``team.max_programs``)
                   8, 2, 4 and 1 in turn, each for four schedules; where programs that wait for each other need more, the SMs of
                   ``like``
    like           the GPU that ranks plan as, as in ``weft.simulate``
    node_size      ranks of each node, for each world size a divisor of it; None: one node
    link           kind of the links within a node: "nvlink", or "pcie", on which a peer's memory has no atomics
    compile        take each kernel to Triton IR for sm_90, once for all schedules; one that Triton refuses is a finding
    deterministic  require bitwise equal results of main under all schedules
    script         name of the checked script in replay commands; these are Python calls if it is empty
    progress       called with (finished runs, total runs, findings so far)
    on_results     called with main's results, in rank order, after every run that completes

    An error that main raises is a finding too. ValueError for invalid arguments.
    """
    check_callable("main", main, "main(team, *args)")
    check_main(main)
    sizes = check_sizes("world_size", world_size)
    schedules, depth = positive("schedules", schedules), positive("depth", depth)
    sms = check_optional(positive, "sms", sms)
    check_choice("like", like, tuple(GPUS))
    check_choice("strategy", strategy, STRATEGIES)
    for size in sizes:
        node_size = check_node_size(node_size, size)
    check_choice("link", link, LINKS)
    seed = check_seed(seed)
    check_bool("compile", compile)
    check_bool("deterministic", deterministic)
    check_instance("script", script, str, "a string")
    check_optional(check_callable, "progress", progress, "progress(runs, total, findings)")
    check_optional(check_callable, "on_results", on_results, "on_results(results)")
    args = check_args(args)
    check_takes(main, args)
    runner = Runner(main, check_heap_bytes(heap_bytes), args, compile)
    gathered = Gathered(strategy, deterministic, on_results)
    total, exhaustive = schedules * len(sizes), ""

    def tell() -> None:
        if progress is not None:
            progress(gathered.runs, total, len(gathered.findings()))

    for size in sizes:
        first = Schedule(
            world_size=size, strategy=strategy, seed=seed, depth=depth, sms=sms or DEFAULT_SMS, like=like,
            node_size=node_size, link=link,
        )  # fmt: skip
        if strategy == "exhaustive":
            exhausted = explore(runner, replace(first, seed=0), schedules, gathered, tell)
            exhaustive = "bounded" if not exhausted or exhaustive == "bounded" else "exhausted"
            continue
        for chosen, outcome in _runs(runner, first, schedules, fixed=sms is not None):
            gathered.add(chosen, outcome)
            tell()
    merged = gathered.findings()
    if strategy != "exhaustive":
        shrinking = Shrinking(runner, {f.finding.cause for f in merged})
        merged = [replace(f, replay=shrinking.shrunk(f)) for f in merged]
    return Report(
        findings=tuple(merged), schedules=gathered.runs, world_sizes=sizes, exhaustive=exhaustive, script=script,
        notes=() if gathered.has_kernels or merged else ("no kernel ran, so only operations of hosts were checked",),
    )  # fmt: skip


def _runs(runner: Runner, first: Schedule, count: int, *, fixed: bool) -> Iterator[tuple[Schedule, Outcome]]:
    """Runs of ``count`` schedules with consecutive seeds, each as it was run.

    ``fixed``: with the first one's number of resident programs; otherwise in turn with several, where main asks for it.
    """
    usual, varies, helps = first, False, True
    for number in range(count):
        seed = first.seed + number
        schedule = replace(usual, strategy=strategy_of(first.strategy, seed), seed=seed)
        if varies:
            schedule = replace(schedule, sms=_SMS_IN_TURN[number // _RUNS_OF_ONE % len(_SMS_IN_TURN)])
        outcome = runner.run(schedule)
        if number == 0:
            varies = not fixed and outcome.is_sized
        if not fixed and helps and outcome.needs_more_sms:
            schedule, outcome, helps = _with_enough(runner, schedule, outcome)
            if schedule.sms >= usual.sms:
                varies, usual = False, replace(usual, sms=schedule.sms)
        yield schedule, outcome


def _with_enough(runner: Runner, schedule: Schedule, outcome: Outcome) -> tuple[Schedule, Outcome, bool]:
    """The run with enough resident programs and True, else the one with the default number.

    Kernels of a fixed size may wait for each other; then smaller GPUs do not count.
    """
    usual = schedule, outcome, False
    for sms in (DEFAULT_SMS, GPUS[schedule.like].sms):
        if sms > schedule.sms:
            larger = replace(schedule, sms=sms)
            outcome = runner.run(larger)
            if not outcome.needs_more_sms:
                return larger, outcome, True
            if sms == DEFAULT_SMS:
                usual = larger, outcome, False
    return usual


def check_sizes(name: str, world_size: object) -> tuple[int, ...]:
    """World sizes as a tuple. ValueError unless they are one or several numbers of virtual ranks."""
    if is_integer(world_size):
        return (check_virtual_ranks(name, world_size),)
    sizes = check_sequence(name, world_size, "an integer or a list of integers")
    if not sizes:
        raise ValueError(f"{name}={world_size!r} is empty; name at least one world size")
    return tuple(check_virtual_ranks(f"{name}[{index}]", size) for index, size in enumerate(sizes))
