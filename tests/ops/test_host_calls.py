"""What an eager call costs the host: calls of the driver, and Python frames (about 0.1 us each).

Times are measured by ``weft bench --eager``. On a host of H200s torch.add takes 9 us, a launch of Triton's 4, an event 2.
"""

from functools import partial

import pytest
import torch

from tests.ops.host_calls import counted_team
from weft import ops
from weft.errors import TeamClosed
from weft.kernels.fp8 import Fp8, RowFormat
from weft.ops.collectives.all_reduce import ALL_REDUCE
from weft.plan.memo import forget
from weft.runtime import virtual_rank
from weft.transport.replays import Replays, all_halves


def empty(*shape):
    return torch.empty(shape, dtype=torch.bfloat16)


@pytest.fixture
def counted(monkeypatch):
    monkeypatch.setattr(virtual_rank, "is_running", lambda: True)  # ops without a team ask for a device's capabilities
    return counted_team(monkeypatch)


COLLECTIVES = {
    "all_reduce": lambda team: ops.all_reduce(empty(32 << 10), team),
    "all_gather": lambda team: ops.all_gather(empty(32 << 10), team),
    "reduce_scatter": lambda team: ops.reduce_scatter(empty(32 << 10), team),
    "all_to_all": lambda team: ops.all_to_all(empty(32 << 10), team),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_small_collective_is_one_launch_and_few_frames(counted, name):
    team, host = counted
    for _ in range(3):
        COLLECTIVES[name](team)
    counts = host.counted(lambda: COLLECTIVES[name](team))
    frames = counts.pop("frames")
    assert counts == {"launches": 1}
    assert frames <= (16 if name == "all_reduce" else 20), frames


def changed(team, changes):
    """True if after `changes` a call of all_reduce is none like the calls before."""
    x = empty(32 << 10)
    for _ in range(2):
        ops.all_reduce(x, team)
    assert ALL_REDUCE.again(x, team, "auto") is not None
    other = changes(x, team)
    return ALL_REDUCE.again(x if other is None else other, team, "auto") is None


@pytest.mark.parametrize(
    "changes",
    [
        lambda x, team: x.clone().requires_grad_(),
        lambda x, team: x.float(),
        lambda x, team: x[1:],
        lambda x, team: torch.nn.Parameter(x, requires_grad=False),
        lambda x, team: setattr(team, "is_traced", True),
        lambda x, team: setattr(team, "heap_changes", team.heap_changes + 1),
        lambda x, team: forget(),
    ],
)
def test_a_call_is_another_one_where_its_plan_or_its_gradient_may_be(counted, changes):
    team, _ = counted
    assert changed(team, changes)


def test_a_call_on_a_closed_team_is_refused(counted):
    team, _ = counted
    team.barrier = lambda: None
    team._platform.close = lambda: None
    ops.all_reduce(empty(8), team)
    team.close()
    with pytest.raises(TeamClosed):
        ops.all_reduce(empty(8), team)


def test_profilers_and_modes_see_a_call(counted):
    """Of torch's dispatcher, and of kernels' launches."""
    team, _ = counted
    x = empty(32 << 10)
    for _ in range(2):
        ops.all_reduce(x, team)
    with torch.profiler.profile() as profile:
        ops.all_reduce(x, team)
    assert any("weft::all_reduce" in event.key for event in profile.key_averages())


# M, N and K of a rank; the most driver calls of a launched call, and Python frames.
OVERLAPPED = {
    "all_gather_matmul 512": (lambda team, a, b: ops.all_gather_matmul(a[: len(a) // 2], b, team), 512, 2, 85),
    "all_gather_matmul 4096": (lambda team, a, b: ops.all_gather_matmul(a[: len(a) // 2], b, team), 4096, 25, 240),
    "matmul_reduce_scatter 512": (lambda team, a, b: ops.matmul_reduce_scatter(a, b, team), 512, 2, 75),
    "matmul_reduce_scatter 4096": (lambda team, a, b: ops.matmul_reduce_scatter(a, b, team), 4096, 40, 420),
    "matmul_all_reduce 512": (lambda team, a, b: ops.matmul_all_reduce(a, b, team), 512, 2, 110),
    "matmul_all_reduce 4096": (lambda team, a, b: ops.matmul_all_reduce(a, b, team), 4096, 55, 520),
}


@pytest.mark.parametrize("weights", ["16 bits", "fp8"])
@pytest.mark.parametrize("name", OVERLAPPED)
def test_an_overlapped_call_that_comes_again_is_one_launch_of_a_graph(counted, name, weights):
    team, host = counted
    call, M, driver_calls, most_frames = OVERLAPPED[name]
    a, b = empty(M, 512), fp8_weight() if weights == "fp8" else empty(1024, 512)
    team._workspaces["replays"] = None
    for _ in range(3):
        call(team, a, b)
    if weights == "16 bits":
        launched = host.counted(lambda: call(team, a, b))
        assert launched.pop("frames") <= most_frames
        assert 1 <= sum(launched.values()) <= driver_calls, launched

    replayed = []

    def record(run):
        run()
        return lambda: replayed.append(1)

    team._workspaces["replays"] = graphs = Replays(record, all_halves(team), lambda: None)
    held = torch.empty  # results at the same address again and again, as an allocator gives them out in a loop
    results = {}

    def again(*shape, **options):
        return results.setdefault(str(shape), held(*shape, **options))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch, "empty", again)
        for _ in range(6):
            call(team, a, b)
        replayed.clear()
        counts = host.counted(lambda: call(team, a, b))
    frames = counts.pop("frames")
    assert frames <= (84 if weights == "fp8" else 38)
    assert not counts and len(replayed) == 4 and not graphs.failures


def fp8_weight():
    return Fp8(torch.zeros(1024, 512).to(torch.float8_e4m3fn), torch.ones(8, 4))


def paged(**options):
    cache, pages = empty(8, 2, 64, 64), torch.zeros(4, 2, dtype=torch.int32)
    return lambda: ops.paged_attention(
        empty(4, 8, 64), cache, cache, pages, torch.ones(4, dtype=torch.int32), **options
    )


# Ops of one rank; the most Python frames of a call.
ALONE = {
    "matmul": (lambda: partial(ops.matmul, empty(64, 512), empty(1024, 512)), 41),
    "matmul fp8": (lambda: partial(ops.matmul, empty(8, 512), fp8_weight()), 204),
    "matmul_silu_mul fp8": (
        lambda: partial(ops.matmul_silu_mul, empty(8, 512), fp8_weight(), fp8=RowFormat("group")),
        230,
    ),
    "paged_attention": (paged, 106),
    "paged_attention invariant": (partial(paged, invariant=True), 110),
}


@pytest.mark.parametrize("name", ALONE)
def test_a_call_of_one_rank_takes_few_frames(counted, name):
    _, host = counted
    make, most_frames = ALONE[name]
    call = make()
    for _ in range(3):
        call()
    assert host.counted(call)["frames"] <= most_frames
