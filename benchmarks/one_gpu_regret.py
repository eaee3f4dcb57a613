"""Regret at 60 shapes of each op that plans on one GPU, in as few seconds as its method allows.

    python -m benchmarks.one_gpu_regret OUT.json --seconds 530 [--seed 54] [--ops gemm moe-route] [--known FILE]

Rows are those of ``weft bench --regret``, with the same choice in even rounds and times in odd ones. What differs:

- Kernels are compiled first, in COMPILERS processes, each once: by design and by what a kernel may depend on.
- Shapes are prepared, and their answers checked, in MEASURERS processes at once. All stop before one of them times its shape.
- Designs that take more than SLOW times the fastest one's time in a first round are timed no further: ``dropped`` says so.
- All rounds of a shape take some SECONDS, at least four of each half, two of rounds of more than 40 ms.

- Sets of inputs after the first one are copies of it; tokens then choose other experts.

Ops come one after the other, the ones that models call most first, so that a limit of seconds leaves whole ops. OUT has all
rows so far at any time, and rows of ``--known``: of these it measures the ones again whose plan is another design today, or
whose regret is above ``--above`` (of a mended kernel, say), and before all other shapes. ``--plan`` prints what would be done,
without a GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.locks import Budget, Room, claimed
from benchmarks.regret_shapes import OPS, SEARCH, bytes_of, merged, work_of
from weft.bench.harness import machine as sources
from weft.bench.harness.bench import Bench, Options, free
from weft.bench.harness.compiling import compile_only
from weft.bench.harness.runner import started
from weft.bench.harness.workload import Shape
from weft.bench.ops.problem import OpProblem
from weft.bench.ops.workload import OpWorkload
from weft.bench.regret.file import Kept, kept_of, line_of, read, summary, write
from weft.bench.regret.measure import (
    Row,
    blank,
    entered,
    halves,
    leave,
    run_once,
    told,
    with_times,
    without_slow,
)
from weft.ops import warm_up
from weft.ops.case import Inputs
from weft.ops.moe.moe_op import MoeShape
from weft.runtime.files import put
from weft.runtime.launch import launch
from weft.runtime.team.team import Team

COMPILERS, MEASURERS = 14, 6
SLOW, SECONDS = 3.0, 0.12
# Bytes of all shapes that are prepared at once, about.
MEMORY = 112 << 30
# Most seconds of the compilation; kernels that are left are compiled as they are measured.
COMPILE_SECONDS = 150.0
HEAP = 256 << 20


# --- the processes ------------------------------------------------------------------------------------------------------


class CopiedSets(OpProblem):
    """Problem whose sets of inputs are copies of the first one, with ids of other experts."""

    def inputs(self, rank: int, number: int) -> Inputs:
        if number == 0:
            return super().inputs(rank, 0)
        tensors = [x.clone() for x in self.sets[0]]
        if self.op.form == "moe" and self.op.alias != "moe-route":
            tensors[0] = (tensors[0] + 37 * number) % MoeShape(*self.shape.size).experts
        return tuple(tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied(OpWorkload):
    """Workload of ``CopiedSets``."""

    def problem(self, shape: Shape, team: Team, **fields: bool) -> OpProblem:
        return CopiedSets(self.op, shape, self.dtype, team, **self.fields, **fields)


class OneSet(OpProblem):
    """Problem with one set of inputs."""

    def _count(self) -> int:
        return 1


def compile_jobs(team: Team, folder: Path) -> None:
    """Compile jobs that no further process has taken."""
    for number, (workload, shape, design) in enumerate(_loaded(folder / "jobs")):
        if (folder / "ready").exists():
            break
        if claimed(folder / "claims" / f"job-{number}"):
            begin = time.perf_counter()
            try:
                problem = OneSet(workload.op, shape, workload.dtype, team, **workload.fields)
                compile_only(partial(run_once, problem, design), team)
                problem = None
                outcome = f"{time.perf_counter() - begin:.2f} s"
            except Exception as error:  # it fails again where it is measured, and is dropped with its reason
                outcome = f"failed: {type(error).__name__}: {str(error)[:120]}"
            free(team)
            print(f"compiled {workload.name} {shape.label} {design}: {outcome}", flush=True)


def measure_shapes(team: Team, folder: Path, place: int, deadline: float, kind: str) -> None:
    """Measure shapes that no further process has taken. Exit status 3: the GPU has failed in this process."""
    warm_up(team)
    empty_us, versions, gpu, room = started(team), sources.versions(), team.caps.device_name, Room(folder)
    options, every = Options(quick=True), _loaded(folder / "shapes")
    numbers = range(len(every)) if kind == "shape" else sorted(int(one.name) for one in (folder / "again").iterdir())
    gc.collect()
    gc.freeze()  # a collection after each shape has less to look at
    while not (folder / "ready").exists():
        time.sleep(0.05)
    budget = Budget(folder, MEMORY)
    for number in numbers:
        if time.time() > deadline:
            break
        if not claimed(folder / "claims" / f"{kind}-{number}"):
            continue
        workload, shape = every[number]
        bench = Bench(team, Copied(name=workload.name, shapes=(), dtype=workload.dtype), options, empty_us)
        with budget.part(bytes_of(workload, shape)):
            row, said = _measured(bench, shape, room)
        print(f"{workload.name} {told(row)}: {said}", flush=True)
        text = " ".join((row.reason, *row.dropped.values()))
        if "out of memory" in text.lower() and kind == "shape":
            (folder / "again" / str(number)).touch()
            continue
        with open(folder / f"rows-{place}.jsonl", "a") as rows:
            rows.write(line_of(Kept(gpu=gpu, versions=versions, row=row)) + "\n")
        if "CUDA error" in text:
            os._exit(3)


def _measured(bench: Bench, shape: Shape, room: Room) -> tuple[Row, str]:
    """Row of a shape, and the seconds of its steps."""
    begin, timed = time.perf_counter(), 0.0
    with room.beside():
        row, entrants = entered(bench, shape, SEARCH, blank(bench.workload, shape, 1))
        bench.team.synchronize()
    prepared = time.perf_counter() - begin
    if row.auto in entrants:
        with room.alone():
            begin = time.perf_counter()
            row = without_slow(bench, row, entrants, SLOW)
            row = with_times(row, halves(bench, entrants, SECONDS))
            timed = time.perf_counter() - begin
    with room.beside():
        leave(bench.team, entrants)
    return row, f"prepared in {prepared:.2f} s, timed in {timed:.2f} s"


def _loaded(file: Path) -> Any:
    while not file.exists():
        time.sleep(0.05)
    return pickle.loads(file.read_bytes())


def role(options: argparse.Namespace) -> None:
    """Work of one process, a team of one rank."""
    os.environ |= {
        "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(23000 + options.place),
    }  # fmt: skip
    if options.role == "compile":
        launch(compile_jobs, 1, options.device, args=(options.out,), heap_bytes=HEAP)
    else:
        kind = "again" if options.role == "again" else "shape"
        given = options.out, options.place, options.deadline, kind
        launch(measure_shapes, 1, options.device, args=given, heap_bytes=HEAP)


# --- the run ------------------------------------------------------------------------------------------------------------


class Processes:
    """Processes of this script in ``folder``, with their output in its logs."""

    def __init__(self, folder: Path, deadline: float, device: str) -> None:
        self.folder, self.deadline, self.device, self.running = folder, deadline, device, {}
        self.started: Counter[tuple[str, int]] = Counter()

    def start(self, kind: str, place: int) -> None:
        command = [sys.executable, "-m", "benchmarks.one_gpu_regret", str(self.folder), "--role", kind]
        command += ["--place", str(place), "--deadline", str(self.deadline), "--device", self.device]
        with open(self.folder / f"{kind}-{place}.log", "a") as log:
            self.running[kind, place] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        self.started[kind, place] += 1

    def left(self, kind: str) -> int:
        """Number of processes of a kind that run. A measurer that failed begins again, at most four times."""
        for (what, place), process in list(self.running.items()):
            if what == kind and process.poll() is not None:
                del self.running[what, place]
                if process.returncode and what != "compile" and self.started[what, place] < 5:
                    if time.time() < self.deadline - 15:
                        self.start(what, place)
        return sum(what == kind for what, _ in self.running)

    def end(self) -> None:
        for process in self.running.values():
            process.kill()


def rows_in(folder: Path) -> list[Kept]:
    lines = [line for file in sorted(folder.glob("rows-*.jsonl")) for line in file.read_text().splitlines()]
    return [kept_of(json.loads(line)) for line in lines if line.endswith("}")]


@contextmanager
def phase(what: str) -> Iterator[None]:
    begin = time.time()
    yield
    print(f"{what}: {time.time() - begin:.0f} s", flush=True)


def main(options: argparse.Namespace) -> None:
    begin = time.time()
    deadline, known = begin + options.seconds, [] if options.known is None else read(options.known)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for one in ("claims", "again"):
            (folder / one).mkdir()
        processes, compilers, measurers = Processes(folder, deadline, options.device), *options.processes
        for place in range(compilers):
            processes.start("compile", place)
        try:
            every, jobs = work_of(options, known)
            for file, made in (("shapes", every), ("jobs", jobs)):
                with open(folder / "part", "wb") as part:
                    part.write(pickle.dumps(made))
                (folder / "part").rename(folder / file)
            for place in range(compilers, compilers + measurers):
                processes.start("measure", place)
            with phase(f"{len(jobs)} kernels compiled"):
                while processes.left("compile") and time.time() < min(begin + COMPILE_SECONDS, deadline):
                    time.sleep(0.2)
                (folder / "ready").touch()
            with phase(f"{len(every)} shapes measured"):
                _watch(processes, "measure", folder, known, options.out)
            if any((folder / "again").iterdir()) and time.time() < deadline - 20:
                processes.start("again", compilers + measurers)
                _watch(processes, "again", folder, known, options.out)
        finally:
            processes.end()
            new = rows_in(folder)
            rows = merged(known, new)
            write(options.out, rows)
            logs = [f"== {log.name}\n{log.read_text(errors='replace')}" for log in sorted(folder.glob("*.log"))]
            put(options.out.with_suffix(".log"), "\n".join(logs))
    print("\n".join(summary([kept.row for kept in rows])))
    print(f"{len(new)} of {len(every)} shapes in {time.time() - begin:.0f} s")


def _watch(processes: Processes, kind: str, folder: Path, known: list[Kept], out: Path) -> None:
    """Wait for processes, some seconds beyond the deadline, and write the rows meanwhile."""
    last = time.time()
    while processes.left(kind) and time.time() < processes.deadline + 12:
        time.sleep(0.3)
        if time.time() > last + 20:
            last = time.time()
            write(out, merged(known, rows_in(folder)))


def show_plan(options: argparse.Namespace) -> None:
    """Print the numbers of shapes and kernels of each op."""
    every, jobs = work_of(options, [] if options.known is None else read(options.known))
    kernels = Counter(job.workload.name for job in jobs)
    for name, count in Counter(workload.name for workload, _ in every).items():
        most = max(bytes_of(workload, shape) for workload, shape in every if workload.name == name)
        print(f"{name}: {count} shapes, {kernels[name]} kernels, at most {most / 2**30:.0f} GiB")
    print(f"in all {len(every)} shapes, {len(jobs)} kernels")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=530.0, help="begin nothing more after this time")
    parser.add_argument("--seed", type=int, default=54, help="of the drawn shapes")
    parser.add_argument("--ops", nargs="+", default=list(OPS), choices=OPS)
    parser.add_argument("--known", type=Path, help="file of rows, kept where today's plan is theirs")
    parser.add_argument(
        "--above", type=float, default=math.inf, help="regret from which on a known row is measured again"
    )
    parser.add_argument("--plan", action="store_true", help="print the numbers of shapes and kernels alone")
    parser.add_argument(
        "--processes", type=int, nargs=2, default=(COMPILERS, MEASURERS), help="that compile, and that measure"
    )
    parser.add_argument("--device", choices=("cuda", "sim"), default="cuda", help="sim: small shapes on virtual ranks")
    parser.add_argument("--role", choices=("compile", "measure", "again"), help=argparse.SUPPRESS)
    parser.add_argument("--place", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, default=0.0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    role(given) if given.role else show_plan(given) if given.plan else main(given)
