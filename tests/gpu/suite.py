"""Everything about ops that only real GPUs can show: ``python -m tests.gpu.suite --world-size 2 [--json FILE]``.

table         the case table (tests/ops/cases.py), three calls in a row each; the same bits on all ranks
              and in a second run
large         sizes that go round a bounded workspace many times
graph         captured once, replayed 20 times with new inputs, eager calls of the same op in between
long          large all-reduces in a row, all the same: what goes wrong once in very many exchanges
back-to-back  200 calls without a host barrier, random delays on random ranks, every result checked
load          2,000 calls of each op, other data each time, random delays on random ranks, the bits of the first call of
              the same data; and the same in CUDA graphs of 100 calls, delays among them (only with --load)
compile       torch.compile(fullgraph=True) of a function of several ops

``--share-gpus``: more ranks than GPUs, for world sizes that nobody has the GPUs for (``weft.launch``).

A failure is noted and the suite goes on; ranks agree on every verdict, so that they stay together. Exit status 1 if
any failed.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import random
import shlex
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton

import weft
from tests.ops.cases import BF16, COLLECTIVES, FP16, FP32, LARGE, OPERATIONS, Case, check, inputs_of
from tests.ops.closeness import assert_close, assert_identical, bits
from tests.ops.matmul_cases import LARGE_MATMULS, MATMUL_OPS, MATMULS, OWN_FIRST, config
from weft import ops
from weft.bench.machine import revision
from weft.runtime.files import put

DESIGNS = ("fused", "segments", "library")

REPLAYS = 20
CALLS = 200
LOAD_CALLS = 2000
GRAPH_CALLS = 100
# Different inputs of the back-to-back calls: stale data of the last buffers is always somebody else's.
DATASETS = 10
HEAP_BYTES = {"cuda": 8 << 30, "sim": None}  # workspaces of all cases stay until the end
LONGEST_DELAY = 400_000  # cycles, about 0.2 ms


class Desynchronised(Exception):
    """Some ranks gave work to their GPUs and others could not: kernels wait for peers that will not come."""


@dataclass
class Group:
    name: str
    cases: list[str] = field(default_factory=list)
    passed: int = 0
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Suite:
    """One rank's end of the run."""

    def __init__(self, team: Any) -> None:
        self.team = team
        self.groups: list[Group] = []

    def group(self, name: str, attempts: Iterable[tuple[str, Callable[[], Any], Callable[[Any], Any]]]) -> None:
        """Attempts are (label, launch, verify): ``launch()`` gives the GPU work, ``verify(made)`` judges it and
        returns what must be equal on all ranks, or None."""
        group = Group(name)
        self.groups.append(group)
        started = time.perf_counter()
        for label, launch, verify in attempts:
            group.cases.append(label)
            wrong = self.attempt(launch, verify)
            if wrong:
                group.failures.append(f"{label}: {wrong}")
                self.say(f"  FAILED {name}: {label}: {wrong}")
            else:
                group.passed += 1
        group.seconds = time.perf_counter() - started
        self.say(f"{name:14} {group.passed:4} passed, {len(group.failures)} failed   {group.seconds:6.1f} s")

    def attempt(self, launch: Callable[[], Any], verify: Callable[[Any], Any]) -> str:
        """What went wrong on any rank, the same text on all; empty if nothing."""
        made, error = None, ""
        try:
            made = launch()
        except Exception as failure:  # noqa: BLE001  every failure is a verdict
            error = one_line(failure)
        errors = self.team.exchange(error)
        if any(errors):
            if not all(errors):
                raise Desynchronised(first_of(errors))
            return first_of(errors)
        self.team.synchronize()
        token = None
        try:
            token = verify(made)
        except Exception as failure:  # noqa: BLE001
            error = one_line(failure)
        verdicts = self.team.exchange((error, token))
        if any(error for error, _ in verdicts):
            return first_of([error for error, _ in verdicts])
        if len({token for _, token in verdicts}) > 1:
            return "ranks that should have the same bits differ"
        return ""

    def say(self, line: str) -> None:
        if self.team.rank == 0:
            print(line, flush=True)


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:600]


def first_of(errors: list[str]) -> str:
    return next(f"rank {rank}: {error}" for rank, error in enumerate(errors) if error)


def place(case: Case, team: Any) -> int:
    """The rank that this rank plays in a case: rank 0 of a case for one rank."""
    return team.rank if case.world_size == team.size else 0


def run(case: Case, team: Any, call: int) -> torch.Tensor:
    return OPERATIONS[case.op].run(case, team, *inputs_of(case, place(case, team), call, team.device))


def digest(results: Iterable[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for result in results:
        found.update(bits(result).cpu().numpy().tobytes())
    return found.hexdigest()


def table(team: Any, chosen: Iterable[Case], again: bool = True):
    """Three calls in a row; then the first two once more, which must give the same bits."""

    def attempt(case: Case):
        def launch():
            return [run(case, team, call) for call in ((0, 1, 2, 0, 1) if again else (0, 1))]

        def verify(results):
            for call, result in enumerate(results[:3]):
                check(case, place(case, team), call, result)
            for call, result in enumerate(results[3:]):
                assert_identical(result, results[call], what=f"{case} run again")
            return digest(results[:1]) if OPERATIONS[case.op].replicated else None

        return str(case), launch, verify

    return map(attempt, chosen)


def graphs(team: Any, chosen: Iterable[Case]):
    def attempt(case: Case):
        def launch():
            static = inputs_of(case, place(case, team), 0, team.device)
            OPERATIONS[case.op].run(case, team, *static)  # makes the workspace, compiles
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = OPERATIONS[case.op].run(case, team, *static)
            results = []
            for call in range(REPLAYS):
                for old, new in zip(static, inputs_of(case, place(case, team), call, team.device), strict=True):
                    old.copy_(new)
                graph.replay()
                results.append((call, out.clone()))
                if call % 5 == 4:
                    results.append((100 + call, run(case, team, 100 + call)))
            return graph, results

        def verify(made):
            for call, result in made[1]:
                check(case, place(case, team), call, result)

        return str(case), launch, verify

    return map(attempt, chosen)


def back_to_back(team: Any, mixes: dict[str, list[Case]]):
    """``mixes``: label -> the cases that the calls are drawn from, the same draw on every rank."""

    def attempt(item: tuple[str, list[Case]]):
        label, mix = item
        draw = random.Random(label)
        plan = [
            (draw.choice(mix), draw.randrange(DATASETS))
            for _ in range(CALLS if team.device.type == "cuda" else CALLS // 10)
        ]

        def launch():
            mine = {key: inputs_of(key[0], place(key[0], team), key[1], team.device) for key in set(plan)}
            for case in mix:  # compiled and with a workspace before the delays begin
                run(case, team, 0)
            team.barrier()
            delay = random.Random(f"{label} {team.rank}")
            results = []
            for case, dataset in plan:
                if team.device.type == "cuda" and delay.random() < 0.3:
                    torch.cuda._sleep(int(delay.random() * LONGEST_DELAY))
                results.append(OPERATIONS[case.op].run(case, team, *mine[case, dataset]))
            return results

        def verify(results):
            checked: dict[tuple[Case, int], torch.Tensor] = {}
            for number, (key, result) in enumerate(zip(plan, results, strict=True)):
                if key in checked:
                    assert_identical(result, checked[key], what=f"{key[0]} data {key[1]} in call {number}")
                else:
                    check(key[0], place(key[0], team), key[1], result)
                    checked[key] = result

        return label, launch, verify

    return map(attempt, mixes.items())


def load(team: Any, chosen: Iterable[Case], in_graphs: bool):
    """Compared on the GPU, so that the host never waits between two calls."""

    def attempt(case: Case):
        def launch():
            inputs = [inputs_of(case, place(case, team), dataset, team.device) for dataset in range(DATASETS)]
            first = [OPERATIONS[case.op].run(case, team, *mine) for mine in inputs]
            wrong = torch.zeros((), dtype=torch.int64, device=team.device)
            torch.cuda.synchronize()
            delay = random.Random(f"{case} {team.rank}")

            def calls(numbers: range) -> None:
                for number in numbers:
                    dataset = number * 7 % DATASETS
                    result = OPERATIONS[case.op].run(case, team, *inputs[dataset])
                    wrong.add_((bits(result) != bits(first[dataset])).sum())
                    if delay.random() < 0.1:
                        torch.cuda._sleep(int(delay.random() * LONGEST_DELAY))

            if not in_graphs:
                calls(range(LOAD_CALLS))
                return first, wrong, None
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                calls(range(GRAPH_CALLS))
            for _ in range(LOAD_CALLS // GRAPH_CALLS):
                if delay.random() < 0.5:
                    torch.cuda._sleep(int(delay.random() * LONGEST_DELAY))
                graph.replay()
            return first, wrong, graph

        def verify(made):
            first, wrong, _ = made
            for dataset, result in enumerate(first):
                check(case, place(case, team), dataset, result)
            assert wrong.item() == 0, f"{wrong.item()} elements differ from the first call's"

        return f"{case}, {LOAD_CALLS} calls" + (" in graphs" if in_graphs else ""), launch, verify

    return map(attempt, chosen)


def long_runs(team: Any, elements: int = 128 << 20, calls: int = 40):
    """Every call must end, with the bits of the first. An all-reduce of 256 MiB is 10**5 exchanges, each of which clears
    what a peer will write to two exchanges later."""

    def attempt(algorithm: str):
        def launch():
            generator = torch.Generator(team.device).manual_seed(team.rank)
            x = torch.randn(elements, generator=generator, device=team.device, dtype=BF16)
            first = ops.all_reduce(x, team, algorithm)
            wrong = torch.zeros((), dtype=torch.int64, device=team.device)
            for _ in range(calls):
                wrong += (ops.all_reduce(x, team, algorithm) != first).sum()
            return first, wrong

        def verify(made):
            first, wrong = made
            assert wrong.item() == 0, f"{wrong.item()} elements differ from the first call's"
            return digest([first[: 1 << 20]])

        return f"all_reduce {algorithm} of {elements} elements, {calls} calls", launch, verify

    return map(attempt, ("one_shot", "two_shot", "copy_engine"))


def several(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, team: Any) -> torch.Tensor:
    h = ops.all_gather_matmul(x, up, team)
    x = ops.matmul_reduce_scatter(torch.relu(h), down, team) + x
    y = ops.all_reduce(x * 2, team)
    z = ops.all_gather(y[:2] + 1, team)
    z = ops.all_to_all(z.float() * 0.5, team)
    return ops.reduce_scatter(z, team) + ops.all_reduce(y, team, "two_shot")[:2]


def compiled(team: Any):
    def launch():
        function = torch.compile(lambda *tensors: several(*tensors, team), fullgraph=True)
        results = []
        for call in range(3):
            generator = torch.Generator(team.device).manual_seed(call * 100 + team.rank)
            where = {"generator": generator, "device": team.device}
            x, up, down = (torch.randn(*shape, **where).to(BF16) / 8 for shape in ((8, 256), (128, 256), (256, 128)))
            results.append((function(x, up, down), several(x, up, down, team)))
        return results

    def verify(results):
        for call, (actual, expected) in enumerate(results):
            # Inductor may keep an intermediate wider than eager does: bf16 steps of the parts, not of their sum.
            assert_close(actual.to(BF16), expected.float(), team.size, partials=team.size, what=f"call {call}")

    yield "several ops in one function", launch, verify


def of_size(table_of_cases: Iterable[Case], world_size: int) -> list[Case]:
    """The cases for so many ranks, and the products of one rank, which each rank then makes for itself."""
    return [case for case in table_of_cases if case.world_size == world_size or case.op == "matmul"]


def representative(world_size: int, on_gpu: bool) -> list[Case]:
    """One case of each algorithm and design: what graphs, back-to-back calls and loads are tried with. Of each product also one
    as dispatch has it."""
    w = world_size
    wide = (("transport", "lamport"), ("row_bytes", 2048), ("num_warps", 2))
    in_blocks = config(16, 16, 32, design="segments", chunks=3, lanes=1)
    tiles, shape = (config(64, 128, 64), (w * 128, 776, 520)) if on_gpu else (config(16, 16, 32), (w * 20, 40, 48))
    by_design = [
        Case(op=op, world_size=w, dtype=BF16, shape=shape, config=(*tiles, ("design", design)))
        for op in (*MATMUL_OPS[1:], *OWN_FIRST)
        for design in DESIGNS
    ]
    matmuls = {
        case.op: case for case in reversed(of_size(LARGE_MATMULS if on_gpu else MATMULS, w)) if case.dtype == BF16
    }
    return [
        Case(op="all_reduce", world_size=w, dtype=BF16, shape=(16, 512), algorithm="one_shot"),
        Case(op="all_reduce", world_size=w, dtype=FP32, shape=(1001,), algorithm="one_shot"),
        Case(op="all_reduce", world_size=w, dtype=BF16, shape=(70000,), algorithm="two_shot"),
        Case(op="all_reduce", world_size=w, dtype=FP16, shape=(70000,), algorithm="two_shot", config=wide),
        Case(op="reduce_scatter", world_size=w, dtype=BF16, shape=(w * 8, 1000)),
        Case(op="reduce_scatter", world_size=w, dtype=FP32, shape=(w, 9000), config=wide),
        Case(op="all_reduce_rms_norm", world_size=w, dtype=BF16, shape=(7, 5120), algorithm="one_shot"),
        Case(op="all_reduce_rms_norm", world_size=w, dtype=BF16, shape=(50, 1024), algorithm="two_shot"),
        Case(op="all_reduce_factored_norm", world_size=w, dtype=BF16, shape=(7, 5120), algorithm="one_shot"),
        Case(op="all_reduce_factored_norm", world_size=w, dtype=BF16, shape=(50, 1024), algorithm="two_shot"),
        Case(op="all_reduce_norm_of_parts", world_size=w, dtype=BF16, shape=(7, 5120), algorithm="one_shot"),
        Case(op="all_reduce_norm_of_parts", world_size=w, dtype=BF16, shape=(50, 1024), algorithm="two_shot"),
        Case(op="all_reduce_of_parts", world_size=w, dtype=BF16, shape=(16, 5120)),
        Case(op="all_gather", world_size=w, dtype=BF16, shape=(5, 1001)),
        Case(op="all_to_all", world_size=w, dtype=FP32, shape=(w * 3, 800)),
        Case(op="all_reduce", world_size=w, dtype=BF16, shape=(70001,), algorithm="copy_engine"),
        Case(op="reduce_scatter", world_size=w, dtype=BF16, shape=(w * 8, 1000), algorithm="copy_engine"),
        Case(op="all_gather", world_size=w, dtype=BF16, shape=(5, 1001), algorithm="copy_engine"),
        Case(op="all_to_all", world_size=w, dtype=FP32, shape=(w * 3, 800), algorithm="copy_engine"),
        Case(op="matmul_all_reduce", world_size=w, dtype=BF16, shape=(w * 96 - 1, 520, 264), config=in_blocks),
        *by_design,
        *matmuls.values(),
    ]


def groups_for(team: Any, with_load: bool, named: tuple[str, ...] = ()) -> dict[str, Callable[[], Iterable[Any]]]:
    """Name -> what makes its attempts; those that need a GPU only where there is one. named: the operations whose cases are
    taken; none: all."""
    w, on_gpu = team.size, team.device.type == "cuda"

    def picked(table_of_cases: Iterable[Case]) -> list[Case]:
        return [case for case in of_size(table_of_cases, w) if not named or case.op in named]

    chosen = picked(representative(w, on_gpu))
    mixed = {"all of them mixed": chosen} if chosen else {}
    groups: dict[str, Callable[[], Iterable[Any]]] = {
        "collectives": lambda: table(team, picked(COLLECTIVES)),
        "matmuls": lambda: table(team, picked(MATMULS)),
        "back-to-back": lambda: back_to_back(team, {**{str(c): [c] for c in chosen}, **mixed}),
        "compile": lambda: compiled(team),
        "long": lambda: long_runs(team) if on_gpu else long_runs(team, elements=3000, calls=2),
    }
    if on_gpu:
        groups["graph"] = lambda: graphs(team, chosen)
        groups["large"] = lambda: table(team, picked([*LARGE, *LARGE_MATMULS]), again=False)
    if on_gpu and with_load:
        groups["load"] = lambda: load(team, chosen, in_graphs=False)
        groups["load, graphs"] = lambda: load(team, chosen, in_graphs=True)
    return groups


def main(
    team: Any, with_load: bool = False, only: tuple[str, ...] = (), named: tuple[str, ...] = ()
) -> list[dict[str, Any]]:
    suite = Suite(team)
    suite.say(f"{team.size} ranks on {team.device.type}, torch {torch.__version__}, Triton {triton.__version__}")
    try:
        for name, attempts in groups_for(team, with_load, named).items():
            if not only or name in only:
                suite.group(name, attempts())
    except Desynchronised as failure:
        suite.groups[-1].failures.append(f"given up: {failure}")
        suite.say(f"  GIVEN UP, later groups did not run: {failure}")
    return [vars(group) for group in suite.groups]


def command(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "sim"), default="cuda", help="sim: the groups that need no GPU")
    parser.add_argument("--load", action="store_true", help="2,000 calls of each op too")
    parser.add_argument("--only", default="", help="names of groups, with semicolons between")
    parser.add_argument(
        "--ops", default="", help="operations of the cases, with semicolons between; compile and long have none"
    )
    parser.add_argument("--json", metavar="FILE", help="write the groups there")
    parser.add_argument("--share-gpus", action="store_true", help="ranks take turns on fewer GPUs; slow")
    chosen = parser.parse_args(arguments)
    started = time.perf_counter()
    only, of_ops = (tuple(name for name in names.split(";") if name) for names in (chosen.only, chosen.ops))
    if unknown := sorted(set(of_ops) - set(OPERATIONS)):
        parser.error(f"--ops {';'.join(unknown)}: not among {', '.join(OPERATIONS)}")
    heap_bytes = HEAP_BYTES[chosen.device]
    groups = weft.launch(
        main,
        chosen.world_size,
        device=chosen.device,
        args=(chosen.load, only, of_ops),
        heap_bytes=heap_bytes,
        share_gpus=chosen.share_gpus,
    )[0]
    passed, failed = sum(g["passed"] for g in groups), sum(len(g["failures"]) for g in groups)
    print(f"{passed} passed, {failed} failed in {time.perf_counter() - started:.0f} s, world size {chosen.world_size}")
    if chosen.json:
        head = {
            "command": shlex.join(
                ["python", "-m", "tests.gpu.suite", *(sys.argv[1:] if arguments is None else arguments)]
            ),
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M"),
            "gpu": torch.cuda.get_device_name() if chosen.device == "cuda" else "simulated",
            "gpus": min(torch.cuda.device_count(), chosen.world_size),
            "revision": revision(Path(weft.__file__).parent),
            "versions": {module.__name__: module.__version__ for module in (torch, triton)},
        }
        counts = {"world_size": chosen.world_size, "passed": passed, "failed": failed, "groups": groups}
        put(Path(chosen.json), json.dumps(head | counts, indent=1) + "\n")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(command())
