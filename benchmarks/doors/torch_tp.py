"""PyTorch's tensor parallelism with and without weft: the fused ops, and the styles forward and backward.

    python -m benchmarks.doors.torch_tp --world-size 2 --json RUNS/torch.json [--only ops,styles,compiled]

Prints µs a call [of the host] in a row, before (torch) and after (weft): `ops` torch's fused symm_mem ops, eager and in CUDA
graphs; `styles` a feed-forward layer by ColwiseParallel and RowwiseParallel, forward and backward, eager; `compiled` the same
by torch.compile: torch's styles as they are, with async TP on torch's fused ops and on weft's, and weft's styles. Answers of
all are compared. An eager call of weft's door is torch's where it would not pay (docs/pytorch.md): `on weft` in the file says
what it was, and the times' counts how many of the timed calls were replays of a graph, and how many were launched one by one.
`fused ops` names torch's ops that a compiled call holds.
"""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.profiler import ProfilerActivity, profile

import weft
from benchmarks.doors.timing import captured, distance, in_a_row, tell, write
from weft.integrations import torch as door
from weft.integrations.fallback import Fallback

# M of all ranks; N and K of one rank.
GATHERS = ((512, 2048, 4096), (4096, 4096, 4096), (4096, 3584, 5120), (8192, 7168, 4096))
SCATTERS = ((512, 4096, 2048), (4096, 4096, 4096), (8192, 4096, 7168))
# Tokens, hidden size and features of all ranks.
LAYERS = ((2048, 4096, 14336), (8192, 4096, 14336))
LIMIT = 0.02  # relative RMS between two results in bf16


@contextmanager
def on_weft(mesh: Any) -> Iterator[None]:
    """Scope in which torch's fused ops run on weft."""
    assert door.install(mesh)
    try:
        yield
    finally:
        door.uninstall()


def ops_of(mesh: Any, team: Any, gathers: Sequence[tuple], scatters: Sequence[tuple]) -> Iterator[tuple[str, Callable]]:
    """Calls of torch's fused ops by what they compute."""
    name, fused = mesh.get_group().group_name, torch.ops.symm_mem
    make = {"device": team.device, "dtype": torch.bfloat16}
    for M, N, K in gathers:
        a, b = torch.randn(M // team.size, K, **make), torch.randn(N, K, **make) * K**-0.5
        yield f"AG-GEMM {M}x{N}x{K}", lambda a=a, b=b: fused.fused_all_gather_matmul(a, [b.T], 0, name)[1][0]
        two = [b[: N // 2].T, b[N // 2 :].T]
        if N >= 2048:
            yield (
                f"AG-GEMM of two B {M}x{N}x{K}",
                lambda a=a, two=two: fused.fused_all_gather_matmul(a, two, 0, name)[1][1],
            )
    for M, N, K in scatters:
        a, b = torch.randn(M, K, **make), torch.randn(N, K, **make) * K**-0.5
        yield f"GEMM-RS {M}x{N}x{K}", lambda a=a, b=b: fused.fused_matmul_reduce_scatter(a, b.T, "sum", 0, name)


def kinds_of_calls(mesh: Any) -> dict[Any, bool | None]:
    """What is decided of each kind of call: True if it runs on weft where it is eager."""
    return Fallback.of(mesh)._pays


def ops_rows(mesh: Any, team: Any, gathers: Sequence[tuple], scatters: Sequence[tuple]) -> list[dict[str, Any]]:
    rows = []
    for what, call in ops_of(mesh, team, gathers, scatters):
        theirs, row = (
            call().clone(),
            {"what": what, "torch": in_a_row(team, call), "torch, graph": captured(team, call)},
        )
        kinds_of_calls(mesh).clear()  # other operands can be of the same kind
        with on_weft(mesh):
            away = distance(call(), theirs)
            assert away < LIMIT, f"{what}: relative RMS {away:.3g}"
            row |= {
                "on weft": any(kinds_of_calls(mesh).values()),
                "weft, graph": captured(team, call),
                "weft": in_a_row(team, call),
            }
        rows.append(row)
    return rows


class FeedForward(nn.Module):
    def __init__(self, hidden: int, features: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, features, bias=False), nn.Linear(features, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.up(x)))


def layer_of(
    mesh: Any, team: Any, hidden: int, features: int, styles: tuple[type, type], replicated: bool
) -> nn.Module:
    torch.manual_seed(0)
    with torch.device(team.device):
        model = FeedForward(hidden, features).to(torch.bfloat16)
    column, row = styles
    given, wanted = (Replicate(), Replicate()) if replicated else (Shard(0), Shard(0))
    plan = {"up": column(input_layouts=given), "down": row(output_layouts=wanted)}
    return parallelize_module(model, mesh, plan)


def step_of(
    model: nn.Module, team: Any, tokens: int, hidden: int, replicated: bool, compiles: bool
) -> tuple[Callable, Callable]:
    """Forward, and forward with backward, of random tokens."""
    torch.manual_seed(1 if replicated else 1 + team.rank)
    rows = tokens if replicated else tokens // team.size
    x = torch.randn(rows, hidden, device=team.device, dtype=torch.bfloat16)
    run = torch.compile(model) if compiles else model

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return run(x)

    def both() -> list[torch.Tensor]:
        loss = run(x).float().square().mean()
        return list(torch.autograd.grad(loss, list(model.parameters())))

    return forward, both


class Way(NamedTuple):
    """The styles of a layer, column-wise and row-wise, and the scope in which it is compiled and called."""

    styles: tuple[type, type]
    scope: Callable[[], AbstractContextManager[object]] = nullcontext


def ways_of(mesh: Any, team: Any, compiles: bool) -> dict[str, Way]:
    torchs, wefts = (ColwiseParallel, RowwiseParallel), (door.WeftColwiseParallel, door.WeftRowwiseParallel)
    fused = {
        "torch, async TP": Way(torchs, lambda: async_tp(mesh, team)),
        "torch, async TP on weft": Way(torchs, lambda: async_tp(mesh, team, on_weft)),
    }
    return {"torch": Way(torchs), **(fused if compiles else {}), "weft": Way(wefts)}


def fused_ops(call: Callable[[], object]) -> list[str]:
    """Names of torch's fused ops in a call."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        call()
    return sorted({event.key for event in profiled.key_averages() if event.key.startswith("symm_mem::fused")})


def styles_rows(mesh: Any, team: Any, layers: Sequence[tuple], compiles: bool) -> list[dict[str, Any]]:
    rows = []
    for tokens, hidden, features in layers:
        for replicated in (False,) if compiles else (False, True):
            how = "replicated" if replicated else "sharded tokens"
            times: dict[str, dict[str, Any]] = {"forward": {}, "forward and backward": {}}
            answers = {}
            for way, (styles, scope) in ways_of(mesh, team, compiles).items():
                torch._dynamo.reset()
                model = layer_of(mesh, team, hidden, features, styles, replicated)
                forward, both = step_of(model, team, tokens, hidden, replicated, compiles)
                with scope():
                    grads = [g.to_local() if hasattr(g, "to_local") else g for g in both()]
                    answers[way] = [forward(), *grads]
                    for name, call in {"forward": forward, "forward and backward": both}.items():
                        times[name][way] = in_a_row(team, call)
                        if compiles and team.device.type == "cuda":  # virtual ranks share one profiler
                            times[name][f"{way}: fused ops"] = fused_ops(call)
                worst = max(map(distance, answers[way], answers["torch"]))
                assert worst < 2 * LIMIT, f"{tokens} tokens, {how}, {way}: relative RMS {worst:.3g}"
            label = f"{tokens}x{hidden}x{features}, {how}"
            rows += [{"what": f"{label}, {pass_}", **of} for pass_, of in times.items()]
    return rows


@contextmanager
def async_tp(
    mesh: Any, team: Any, of_ops: Callable[[Any], AbstractContextManager[object]] = nullcontext
) -> Iterator[None]:
    """Scope in which torch.compile fuses collectives and GEMMs of torch's own styles. of_ops: that of the fused ops."""
    from torch._inductor import config

    before = config._micro_pipeline_tp
    config._micro_pipeline_tp = team.device.type == "cuda"
    if team.device.type == "cuda":
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        enable_symm_mem_for_group(mesh.get_group().group_name)
    try:
        with of_ops(mesh):
            yield
    finally:
        config._micro_pipeline_tp = before


def measure(
    team: Any, mesh: Any, only: Sequence[str], sizes: dict[str, Sequence[tuple]], file: Path | None
) -> list[dict]:
    """All rows; rank 0 prints each table as it is done. A part that fails leaves the others; RuntimeError at the end."""
    every: list[dict[str, Any]] = []
    failed = []

    def done(title: str, rows: list[dict[str, Any]], ways: Sequence[str]) -> None:
        every.extend({"part": title, **row} for row in rows)
        if team.rank == 0:
            print(tell(f"{title}, W={team.size}, µs a call [of the host]", rows, ways), end="\n\n", flush=True)
        write(file, team, "torch", every)

    def ops() -> None:
        rows = ops_rows(mesh, team, sizes["gathers"], sizes["scatters"])
        done("fused ops, eager", rows, ("torch", "weft"))
        if team.device.type == "cuda":
            done("fused ops, in CUDA graphs", rows, ("torch, graph", "weft, graph"))

    def styles() -> None:
        for layer in sizes["layers"]:
            done("styles, eager", styles_rows(mesh, team, [layer], compiles=False), ("torch", "weft"))

    def compiled() -> None:
        for layer in sizes["layers"]:
            rows = styles_rows(mesh, team, [layer], compiles=True)
            done("styles, compiled", rows, [*ways_of(mesh, team, compiles=True)])

    for part in (ops, styles, compiled):
        if part.__name__ in only:
            try:
                part()
            except Exception:
                traceback.print_exc()
                failed.append(part.__name__)
    if failed:
        raise RuntimeError(f"failed: {', '.join(failed)}")
    return every


def main(team: Any, only: list[str], file: str | None) -> None:
    mesh = init_device_mesh("cuda", (team.size,), mesh_dim_names=("tp",))["tp"]
    sizes = {"gathers": GATHERS, "scatters": SCATTERS, "layers": LAYERS}
    measure(weft.Team.of(mesh), mesh, only, sizes, Path(file) if file else None)


def command() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--only", default="ops,styles,compiled")
    parser.add_argument("--json")
    options = parser.parse_args()
    weft.launch(main, options.world_size, "cuda", args=(options.only.split(","), options.json))


if __name__ == "__main__":
    command()
