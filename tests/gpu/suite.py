"""Everything about ops that only real GPUs can show: ``python -m tests.gpu.suite --world-size 2 [--json FILE]``.

Groups, each over the cases of every registered op:

FAMILY        a family's cases (collectives, gemm, overlap, …), three calls in a row each; the same bits on all ranks and in a
              second run
large         sizes that go round a bounded workspace many times
graph         captured once, replayed 20 times, each with other inputs than the one before, eager calls of the same op in
              between; the same bits for the same inputs, in replays and eager calls
long          large all-reduces in a row, all the same: for errors of one exchange in very many
back-to-back  200 calls without a host barrier, random delays on random ranks, every result checked
load          2,000 calls of each op, other data each time, random delays on random ranks, the bits of the first call of
              the same data; and the same in CUDA graphs of 100 calls, delays among them (only with --load)
experts       200 calls (2,000 with --load) of a layer of experts by each way, with other tokens, numbers of them and routing
              each time, random delays, no wait of the host (torch's sync debug mode "error"); the bits of the first call of the
              same tokens
gradients     two layers of experts over the ranks, forward and backward, against one model in fp64; up to 4 ranks
compile       torch.compile(fullgraph=True) of a function of several ops

``--share-gpus``: more ranks than GPUs (``weft.launch``). ``--node-size``: several logical nodes, with groups of their own:
"over nodes", "large", "back-to-back", "graph" and "load".

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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton

import weft
from tests.gpu.attempts import Attempts, Desynchronised, Suite
from tests.ops import checking
from tests.ops import nodes as over_nodes
from tests.ops.checking import assert_close, assert_identical, bits, call_op, everyone_of
from tests.ops.moe import changing, trained
from weft import ops
from weft.bench.harness.machine import revision
from weft.ops.case import BF16, Case, Inputs
from weft.ops.collectives.multimem import Multimem
from weft.ops.moe.moe_op import MoeOp
from weft.ops.op import Op, find_op, registered
from weft.runtime.files import put

REPLAYS = 20
CALLS = 200
LOAD_CALLS = 2000
GRAPH_CALLS = 100
# Different inputs of the back-to-back calls: stale data of a buffer's last use always differ.
DATASETS = 10
# Of the replays of a graph: their references take most of the time.
GRAPH_DATASETS = 4
# For all ranks of a GPU, and for one; workspaces of all cases stay until the end.
GPU_HEAP_BYTES, HEAP_BYTES = 16 << 30, 8 << 30
LONGEST_DELAY = 400_000  # cycles, about 0.2 ms


# --- a case on this rank ---------------------------------------------------------------------------------------------


def rank_in(case: Case, team: Any) -> int:
    """The rank that this rank plays in a case: rank 0 of a case for one rank."""
    return team.rank if case.world_size == team.size else 0


def inputs_of(case: Case, team: Any, call: int) -> Inputs:
    return checking.inputs_of(case, rank_in(case, team), call, team.device)


def run(case: Case, team: Any, call: int) -> Any:
    return call_op(case, team, inputs_of(case, team, call))


def check(case: Case, team: Any, call: int, result: Any) -> None:
    checking.check(case, rank_in(case, team), everyone_of(case, call, team.device), result, what=f"call {call}")


def tensors_of(result: Any) -> tuple[torch.Tensor, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def assert_same(result: Any, expected: Any, what: str) -> None:
    for one, other in zip(tensors_of(result), tensors_of(expected), strict=True):
        assert_identical(one, other, what=what)


def different(result: Any, expected: Any) -> torch.Tensor:
    """The number of elements whose bits differ, on the device."""
    pairs = zip(tensors_of(result), tensors_of(expected), strict=True)
    return torch.stack([(bits(one) != bits(other)).sum() for one, other in pairs]).sum()


def delay(team: Any, draw: random.Random, share: float) -> None:
    """Keep the GPU busy for a while, at a ``share`` of the calls."""
    if draw.random() < share and team.device.type == "cuda":
        torch.cuda._sleep(int(draw.random() * LONGEST_DELAY))


# --- groups ----------------------------------------------------------------------------------------------------------


def table(team: Any, chosen: Iterable[Case], again: bool = True) -> Attempts:
    """Three calls in a row; then the first two once more, which must give the same bits."""

    def attempt(case: Case):
        def launch():
            return [run(case, team, call) for call in ((0, 1, 2, 0, 1) if again else (0, 1))]

        def verify(results):
            for call, result in enumerate(results[:3]):
                check(case, team, call, result)
            for call, result in enumerate(results[3:]):
                assert_same(result, results[call], f"{case} run again")
            if not find_op(case.op).accuracy(case).replicated:
                return None
            return hashlib.sha256(b"".join(bits(x).cpu().numpy().tobytes() for x in tensors_of(results[0]))).hexdigest()

        return str(case), launch, verify

    return map(attempt, chosen)


def graphs(team: Any, chosen: Iterable[Case]) -> Attempts:
    def attempt(case: Case):
        def launch():
            op, static = find_op(case.op), inputs_of(case, team, 0)
            call_op(case, team, static)  # makes the workspace, compiles
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = _captured(op, case, team, static)
            results = []
            datasets = [inputs_of(case, team, dataset) for dataset in range(GRAPH_DATASETS)]
            for call in range(REPLAYS):
                dataset = call * 3 % GRAPH_DATASETS
                for old, new in zip(static, datasets[dataset], strict=True):
                    old.copy_(new)
                graph.replay()
                defined = op.defined(case, team, out, *static) if isinstance(op, MoeOp) else out
                results.append((f"replay {call}", dataset, [x.clone() for x in tensors_of(defined)]))
                if call % 5 == 4:
                    other = (dataset + 1) % GRAPH_DATASETS
                    results.append((f"call behind replay {call}", other, tensors_of(run(case, team, other))))
            return graph, results

        def verify(made):
            checked: dict[int, Any] = {}
            for what, dataset, result in made[1]:
                if dataset in checked:
                    assert_same(result, checked[dataset], f"{case} data {dataset} in {what}")
                else:
                    check(case, team, dataset, result if len(result) > 1 else result[0])
                    checked[dataset] = result

        return str(case), launch, verify

    return map(attempt, chosen)


def _captured(op: Op, case: Case, team: Any, inputs: Inputs) -> Any:
    """``op.call``; of a MoeOp without ``defined``, which may ask the GPU for a count."""
    if isinstance(op, MoeOp):
        return op.results(case, team, *op.arguments(case, team, *inputs))
    return call_op(case, team, inputs)


def back_to_back(team: Any, mixes: dict[str, list[Case]]) -> Attempts:
    """``mixes``: label -> the cases that the calls are drawn from, the same draw on every rank."""

    def attempt(item: tuple[str, list[Case]]):
        label, mix = item
        draw = random.Random(label)
        count = CALLS if team.device.type == "cuda" else CALLS // 10
        calls = [(draw.choice(mix), draw.randrange(DATASETS)) for _ in range(count)]

        def launch():
            mine = {key: inputs_of(key[0], team, key[1]) for key in set(calls)}
            for case in mix:  # compiled and with a workspace before the delays begin
                run(case, team, 0)
            team.barrier()
            delays = random.Random(f"{label} {team.rank}")
            results = []
            for case, dataset in calls:
                delay(team, delays, 0.3)
                results.append(call_op(case, team, mine[case, dataset]))
            return results

        def verify(results):
            checked: dict[tuple[Case, int], Any] = {}
            for number, (key, result) in enumerate(zip(calls, results, strict=True)):
                if key in checked:
                    assert_same(result, checked[key], f"{key[0]} data {key[1]} in call {number}")
                else:
                    check(key[0], team, key[1], result)
                    checked[key] = result

        return label, launch, verify

    return map(attempt, mixes.items())


def load(team: Any, chosen: Iterable[Case], count: int, datasets: int = DATASETS, in_graphs: bool = False) -> Attempts:
    """``count`` calls of a case. Compared on the GPU, so that the host never waits between two of them."""

    def attempt(case: Case):
        def launch():
            inputs = [inputs_of(case, team, dataset) for dataset in range(datasets)]
            first = [call_op(case, team, mine) for mine in inputs]
            wrong = torch.zeros((), dtype=torch.int64, device=team.device)
            team.synchronize()
            delays = random.Random(f"{case} {team.rank}")

            def calls(numbers: range) -> None:
                for number in numbers:
                    dataset = number * 7 % datasets
                    wrong.add_(different(call_op(case, team, inputs[dataset]), first[dataset]))
                    delay(team, delays, 0.1)

            if not in_graphs:
                calls(range(count))
                return first, wrong, None
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                calls(range(GRAPH_CALLS))
            for _ in range(count // GRAPH_CALLS):
                delay(team, delays, 0.5)
                graph.replay()
            return first, wrong, graph

        def verify(made):
            first, wrong, _ = made
            for dataset, result in enumerate(first):
                check(case, team, dataset, result)
            assert wrong.item() == 0, f"{wrong.item()} elements differ from the first call's"

        return f"{case}, {count} calls" + (" in graphs" if in_graphs else ""), launch, verify

    return map(attempt, chosen)


def long_runs(team: Any) -> Attempts:
    """An all-reduce of 256 MiB is 10**5 exchanges, each of which clears what a peer will write to two exchanges later."""
    elements, count = (128 << 20, 40) if team.device.type == "cuda" else (3000, 2)
    chosen = (
        Case(op="all_reduce", world_size=team.size, dtype=BF16, sizes=(elements,), design=design)
        for design in ("one_shot", "two_shot", "copy_engine")
    )
    return load(team, chosen, count, datasets=1)


def several(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, team: Any) -> torch.Tensor:
    h = ops.all_gather_matmul(x, up, team)
    x = ops.matmul_reduce_scatter(torch.relu(h), down, team) + x
    y = ops.all_reduce(x * 2, team)
    z = ops.all_gather(y[:2] + 1, team)
    z = ops.all_to_all(z.float() * 0.5, team)
    return ops.reduce_scatter(z, team) + ops.all_reduce(y, team, "two_shot")[:2]


def compiled(team: Any) -> Attempts:
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


def gradients(team: Any) -> Attempts:
    of_both = ((one, one) for one in ("push", "pipelined", "lamport", "auto"))
    for algorithms in (("lamport", "sum_then_scatter"), *of_both):

        def launch(algorithms=algorithms):
            return [trained.over_ranks(team, False, *algorithms) for _ in range(2)]

        def verify(calls):
            for one, other in zip(*calls, strict=True):
                assert_identical(one, other)
            by_rank = team.exchange([tensor.cpu() for tensor in calls[0]])
            trained.check(by_rank, trained.on_one(team.size))

        yield " and ".join(algorithms), launch, verify


def experts(team: Any, count: int) -> Attempts:
    datasets, *sizes = (DATASETS, 256, 64, 96) if team.device.type == "cuda" else (4, 16, 8, 6)

    for way in changing.WAYS:

        def launch(way=way):
            delays = random.Random(f"{way} {team.rank}")
            return changing.run(team, way, count, datasets, *sizes, lambda: delay(team, delays, 0.1))

        yield f"{way}, {count} calls", launch, lambda made: changing.check(team, made, *sizes)


# --- what runs -------------------------------------------------------------------------------------------------------


def family_of(op: Op) -> str:
    """The folder of weft/ops that the op's file lies in."""
    return type(op).__module__.split(".")[-2]


def of_size(cases: Iterable[Case], team: Any) -> Iterator[Case]:
    """The cases for this number of ranks; all of an op of one rank, which each rank then runs by itself."""
    found = list(cases)
    alone = all(case.world_size == 1 for case in found)
    return (case for case in found if (alone or case.world_size == team.size) and can_run(case, team))


def can_run(case: Case, team: Any) -> bool:
    """False for a design that needs multicast on a team without."""
    design = find_op(case.op).designs.get(case.design) if isinstance(case.design, str) else type(case.design)
    return team.caps.multicast or design is None or not issubclass(design, Multimem)


def first_of_each(cases: Iterable[Case]) -> list[Case]:
    """The first case of each op, design, dtype and names of further fields: for graphs, back-to-back calls and loads."""
    found: dict[Any, Case] = {}
    for case in cases:
        if (case.data, case.layout) == ("random", "contiguous"):
            design = case.design if isinstance(case.design, str) else type(case.design)
            found.setdefault((case.op, design, case.dtype, *sorted(name for name, _ in case.fields)), case)
    return list(found.values())


def groups_for(team: Any, with_load: bool, chosen: list[Op]) -> dict[str, Callable[[], Attempts]]:
    """Name -> what makes its attempts; those that need a GPU only where there is one."""
    on_gpu = team.device.type == "cuda"
    small: dict[str, list[Case]] = {}
    large: list[Case] = []
    for op in chosen:
        small.setdefault(family_of(op), []).extend(of_size(op.cases(), team))
        large += of_size(op.large_cases(), team)
    plain = first_of_each(large if on_gpu else (case for cases in small.values() for case in cases))
    mixes = {**{str(case): [case] for case in plain}, **({"all of them mixed": plain} if plain else {})}
    groups: dict[str, Callable[[], Attempts]] = {
        **{family: lambda cases=cases: table(team, cases) for family, cases in small.items() if cases},
        "back-to-back": lambda: back_to_back(team, mixes),
        "compile": lambda: compiled(team),
        "long": lambda: long_runs(team),
        "experts": lambda: experts(team, LOAD_CALLS if with_load else CALLS if on_gpu else 5),
    }
    if team.size <= 4:
        groups["gradients"] = lambda: gradients(team)
    if on_gpu:
        groups["graph"] = lambda: graphs(team, plain)
        groups["large"] = lambda: table(team, large, again=False)
    if on_gpu and with_load:
        groups["load"] = lambda: load(team, plain, LOAD_CALLS)
        groups["load, graphs"] = lambda: load(team, plain, LOAD_CALLS, in_graphs=True)
    return groups


def groups_over_nodes(team: Any) -> dict[str, Callable[[], Attempts]]:
    """The groups of a team of several nodes, of the ops that work over them."""
    nodes, on_gpu = team.shape.nodes, team.device.type == "cuda"
    small = [*over_nodes.collectives(nodes, team.size), *over_nodes.gemms(team.size)]
    small += [*over_nodes.norms(nodes, team.size), *over_nodes.experts(nodes, team.size)]
    small += over_nodes.attentions(nodes, team.size)
    large = list(over_nodes.large(nodes, team.size))
    plain = first_of_each(large if on_gpu else small)
    groups: dict[str, Callable[[], Attempts]] = {
        "over nodes": lambda: table(team, small),
        "back-to-back": lambda: back_to_back(team, {"all of them mixed": plain}),
    }
    if on_gpu:
        groups["large"] = lambda: table(team, large)
        groups["graph"] = lambda: graphs(team, plain)
        groups["load"] = lambda: load(team, plain, LOAD_CALLS // 2)
    return groups


def main(
    team: Any,
    with_load: bool = False,
    only: tuple[str, ...] = (),
    named: tuple[str, ...] = (),
    target: str | None = None,
    head: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Run the groups and return them as rank 0 writes them to ``target``.

    named  the ops whose cases are taken; none: all
    head   of the file, which is written after every group, so that a run that is ended leaves its results
    """
    suite = Suite(team)
    suite.say(f"{team.size} ranks on {team.device.type}, torch {torch.__version__}, Triton {triton.__version__}")
    ops_of = [find_op(name) for name in named] or list(registered())
    groups = groups_for(team, with_load, ops_of) if team.rail is None else groups_over_nodes(team)
    if unknown := [name for name in only if name not in groups]:
        raise ValueError(f"--only {';'.join(unknown)}: not among {', '.join(groups)}")

    def save() -> None:
        if target is not None and team.rank == 0:
            write(target, {**head, "gpu": team.caps.device_name}, team.size, suite.groups)

    try:
        for name, attempts in groups.items():
            if not only or name in only:
                suite.group(name, attempts())
                save()
    except Desynchronised as failure:
        suite.groups[-1].failures.append(f"given up: {failure}")
        suite.say(f"  GIVEN UP, later groups did not run: {failure}")
        save()
    return [vars(group) for group in suite.groups]


def counted(groups: list[dict[str, Any]]) -> tuple[int, int]:
    """Numbers of attempts that passed and that failed."""
    return sum(group["passed"] for group in groups), sum(len(group["failures"]) for group in groups)


def write(target: str, head: dict[str, Any], world_size: int, made: list[Any]) -> None:
    groups = [vars(group) for group in made]
    passed, failed = counted(groups)
    counts = {"world_size": world_size, "passed": passed, "failed": failed, "groups": groups}
    put(Path(target), json.dumps(head | counts, indent=1) + "\n")


def command(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "sim"), default="cuda", help="sim: the groups that need no GPU")
    parser.add_argument("--load", action="store_true", help="2,000 calls of each op too")
    parser.add_argument("--only", default="", help="names of groups, with semicolons between")
    parser.add_argument("--ops", default="", help="names of ops, with semicolons between; compile and long have none")
    parser.add_argument("--json", metavar="FILE", help="write the groups there")
    parser.add_argument("--share-gpus", action="store_true", help="ranks take turns on fewer GPUs; slow")
    parser.add_argument(
        "--node-size", type=int, help="logical nodes of this number of ranks: the ops over nodes, all of them"
    )
    chosen = parser.parse_args(arguments)
    started = time.perf_counter()
    only, of_ops = (tuple(name for name in names.split(";") if name) for names in (chosen.only, chosen.ops))
    for name in of_ops:
        try:
            find_op(name)
        except ValueError as unknown:
            parser.error(f"--ops: {unknown}")
    head = {
        "command": shlex.join(["python", "-m", "tests.gpu.suite", *(sys.argv[1:] if arguments is None else arguments)]),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M"),
        "gpus": min(torch.cuda.device_count(), chosen.world_size),
        "revision": revision(Path(weft.__file__).parent),
        "versions": {module.__name__: module.__version__ for module in (torch, triton)},
    }
    ranks_of_a_gpu = -(-chosen.world_size // max(1, torch.cuda.device_count()))
    groups = weft.launch(
        main,
        chosen.world_size,
        device=chosen.device,
        args=(chosen.load, only, of_ops, chosen.json, head),
        heap_bytes=min(HEAP_BYTES, GPU_HEAP_BYTES // ranks_of_a_gpu) if chosen.device == "cuda" else None,
        share_gpus=chosen.share_gpus,
        node_size=chosen.node_size,
    )[0]
    passed, failed = counted(groups)
    print(f"{passed} passed, {failed} failed in {time.perf_counter() - started:.0f} s, world size {chosen.world_size}")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(command())
