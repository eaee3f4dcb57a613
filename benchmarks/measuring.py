"""What scripts that measure on GPUs share: files of rows with a head, compilation in parallel, times of CUDA graphs."""

from __future__ import annotations

import datetime
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton

import weft
from weft.bench.harness.machine import revision
from weft.runtime.arithmetic import cdiv
from weft.runtime.capabilities import COLD_BYTES
from weft.runtime.files import put

# Time of a graph in µs.
GRAPH_US = 600.0
# Largest error, relative to an element's size plus the reference's standard deviation.
MOST_ERROR = 0.02


def head(**more: object) -> dict[str, Any]:
    """GPU, versions, sources, date and command of a file of results."""
    spec = sys.modules["__main__"].__spec__
    command = sys.argv if spec is None else ["-m", spec.name, *sys.argv[1:]]
    # Files by their names alone: folders are of the machine that measured.
    command = [Path(one).name if Path(one).is_absolute() else one for one in command]
    return {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "cuda": torch.version.cuda, "revision": revision(Path(weft.__file__).parent),
        "date": datetime.date.today().isoformat(), "command": shlex.join(["python", *command]), **more,
    }  # fmt: skip


class Rows:
    """File of results with a head, written and printed row by row."""

    def __init__(self, out: Path, **more: object) -> None:
        self._out, self._start = out, time.monotonic()
        self.document: dict[str, Any] = head(**more) | {"rows": []}

    def add(self, row: dict[str, Any]) -> None:
        print(json.dumps(row), flush=True)
        self.document["rows"].append(row)
        self.write()

    def write(self) -> None:
        self.document["seconds"] = round(time.monotonic() - self._start, 1)
        put(self._out, json.dumps(self.document, indent=1) + "\n")


def captured(steps: Iterable[Callable[[], object]], stream: torch.cuda.Stream | None = None) -> torch.cuda.CUDAGraph:
    """CUDA graph of steps that have run before."""
    graph = torch.cuda.CUDAGraph()
    # thread_local: CUDA calls of NCCL's watchdog thread must not invalidate the capture.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for step in steps:
            step()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, calls: int = 1, rounds: int = 5, warm_up: int = 1) -> float:
    """Median time in µs of one of the graph's calls, with the start of a graph in it: replays do not follow each other."""
    begin, end, times = *(torch.cuda.Event(enable_timing=True) for _ in range(2)), []
    for _ in range(warm_up + rounds):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / calls)
    return round(statistics.median(times[warm_up:]), 2)


def copies(make: Callable[[], Any], nbytes: int, most: int = 64) -> list[Any]:
    """Inputs of ``nbytes`` each, more than the L2 holds."""
    return [make() for _ in range(min(most, max(2, cdiv(int(COLD_BYTES), nbytes))))]


def timed(call: Callable[[Any], torch.Tensor], given: list[Any], reference: torch.Tensor | None) -> dict[str, Any]:
    """Median time of a call in µs, in a graph that takes the inputs in turn, and its error; or why it failed."""
    try:
        out, error = call(given[0]), 0.0
        torch.cuda.synchronize()
        if reference is not None:
            error = ((out.double() - reference).abs() / (reference.abs() + reference.std())).max().item()
        if not error < MOST_ERROR:
            return {"failed": f"error {error}"}
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call(given[-1])
        end.record()
        torch.cuda.synchronize()
        once = max(5.0, 1e3 * begin.elapsed_time(end))
        rounds = max(1, round(GRAPH_US / min(once, GRAPH_US) / len(given)))
        graph = captured(lambda x=x: call(x) for x in given * rounds)
        return {"us": replay_us(graph, len(given) * rounds), "error": round(error, 4)}
    except Exception as failure:
        return {"failed": said(failure)}


def said(failure: Exception) -> str:
    return f"{type(failure).__name__}: {str(failure)[:200]}"


def compile_all(compile: Callable[[Any], object], jobs: Iterable[Any], seconds: float = 600.0) -> list[str]:
    """Fill Triton's cache by ``compile(job)`` of each job, in parallel; the errors."""
    deadline, errors = time.monotonic() + seconds, []
    with ProcessPoolExecutor(12, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(_error_of, compile, job): job for job in jobs}
        for future, job in futures.items():
            try:
                error = future.result(timeout=max(0.1, deadline - time.monotonic()))
            except Exception as failure:
                error = type(failure).__name__
            errors += [f"{job}: {error}"] if error else []
        pool.shutdown(wait=False, cancel_futures=True)
    return errors


def _error_of(compile: Callable[[Any], object], job: Any) -> str:
    try:
        compile(job)
        torch.cuda.synchronize()
    except Exception as error:
        return said(error)
    return ""
