"""Traces of GPUs: a fused GEMM-RS and a pipelined AG-GEMM, eager and in a CUDA graph, and what records cost."""

import statistics
from collections import Counter

import pytest
import torch

import weft
from weft.ops.gemm.gemm_op import GemmCall
from weft.ops.overlap.all_gather_matmul import ALL_GATHER_MATMUL
from weft.ops.overlap.matmul_reduce_scatter import MATMUL_REDUCE_SCATTER
from weft.plan.planned import machine_of
from weft.trace.chrome import read
from weft.trace.summary import summarize, summary
from weft.trace.timeline import MEASURED

REPLAYS = 2


def operands(team, rows, N, K):
    generator = torch.Generator(device=team.device).manual_seed(team.rank)
    sizes = (rows, K), (N, K)
    return [torch.randn(size, generator=generator, device=team.device, dtype=torch.bfloat16) for size in sizes]


def running(team, design, M):
    """A function that runs an AG-GEMM or, with design fused, a GEMM-RS."""
    if design == "fused":
        op, (a, b) = MATMUL_REDUCE_SCATTER, operands(team, M, 5120, 6400)
    else:
        op, (a, b) = ALL_GATHER_MATMUL, operands(team, M // team.size, 6400, 5120)
    chosen = op.default(design, GemmCall(M, len(b), b.shape[1], b.dtype), machine_of(team))
    return lambda: op.run(chosen, team, a, b)


def trace_eager_and_graph(team, design, folder):
    run = running(team, design, 2048)
    expected = run()
    with weft.trace(folder / "compiled.json", team):
        run()
    with weft.trace(folder / "eager.json", team):
        eager = run()
    with weft.trace(folder / "graph.json", team):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run()
        for _ in range(REPLAYS):
            graph.replay()
    equal = [torch.equal(expected, other) for other in (eager, captured, run())]
    graph.replay()  # its records go on to a ring that lives as long as the team
    torch.cuda.synchronize()
    return equal


@pytest.mark.gpu(2)
@pytest.mark.parametrize("design", ["fused", "pipelined"])
def test_a_trace_of_gpus_fits_together(design, tmp_path):
    results = weft.launch(trace_eager_and_graph, 2, "cuda", args=(design, tmp_path))
    assert results == [[True] * 3] * 2
    shared = torch.cuda.device_count() < 2
    for name, calls in (("eager", 1), ("graph", REPLAYS)):
        timeline = read(tmp_path / f"{name}.json")
        print(summary(timeline))
        assert (timeline.clock, timeline.world_size, timeline.lost) == (MEASURED, 2, 0)
        # Of streams on an idle machine a few microseconds; the host of a busy one is interrupted.
        assert timeline.residual_ns < 500 and (shared or timeline.streams_ns < 100_000)
        kinds = Counter((event.rank, event.kind) for event in timeline.events)
        for rank in range(2):
            assert kinds[rank, "notify"]  # of a graph those of the last replay
            if design == "fused":
                assert kinds[rank, "tile"] % calls == 0 and kinds[rank, "tile"] >= calls * 200
            else:
                assert kinds[rank, "copy"] and kinds[rank, "gemm"] >= 2
        # The waits of an eager call may find all there: its host takes longer than the copies.
        assert timeline.arrows or name == "eager"
        for arrow in timeline.arrows:
            notify, wait = timeline.events[arrow.notify], timeline.events[arrow.wait]
            assert notify.end <= wait.end + timeline.residual_ns + timeline.streams_ns + 200, (notify, wait)
        for one in summarize(timeline):
            assert 0 < one.gemm <= one.time


def time_records(team, M):
    """Microseconds of the fused kernel's call, [without, with] records."""
    run, found = running(team, "fused", M), []
    rings = team.workspace("trace rings of a test", lambda: ring_of(team))
    for traced in (None, rings):
        team.record_into(traced)
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        found.append(graph)
    team.record_into(None)
    times = [[], []]
    for _ in range(40):
        for graph, samples in zip(found, times, strict=True):
            team.barrier()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(4):
                graph.replay()
            end.record()
            end.synchronize()
            samples.append(begin.elapsed_time(end) * 250)
    return [statistics.median(samples) for samples in times]


def ring_of(team):
    from weft.runtime.team.trace_rings import RING_BYTES, RINGS

    return team.local((RINGS, RING_BYTES), torch.uint8)


@pytest.mark.gpu(2)
def test_records_cost_three_percent_at_most():
    if torch.cuda.device_count() < 2:
        pytest.skip("ranks that take turns on one GPU have no times to compare")
    by_rank = weft.launch(time_records, 2, "cuda", args=(8192,))
    without, with_records = (max(times) for times in zip(*by_rank, strict=True))
    print(f"GEMM-RS 8192x5120x6400: {without:.1f} us, with records {with_records:.1f} us")
    assert with_records <= 1.03 * without
