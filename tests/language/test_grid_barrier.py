"""The barrier of a grid's programs: order, grids of any size on one counter, launches that are refused."""

import re

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

import weft
import weft.language as wl
from tests.compiling import TARGETS, a_view, compiled
from tests.language.test_lowering import positions
from tests.language.test_signals import refused


@triton.jit
def scan(x, counter, team, ROUNDS: tl.constexpr, N: tl.constexpr):
    """In each round program p adds the row of program p - 2**round to its own: rows of sums of all rows up to p."""
    me = tl.program_id(0) + tl.num_programs(0) * tl.program_id(1)
    at = tl.arange(0, N)
    for step in tl.static_range(ROUNDS):
        shifted = tl.load(x + (me - (1 << step)) * N + at, mask=(at < N) & (me >= 1 << step), other=0)
        mine = tl.load(x + me * N + at)
        wl.grid_barrier(counter, team)
        tl.store(x + me * N + at, mine + shifted)
        wl.grid_barrier(counter, team)


def scans(team, grids):
    """Grids of several sizes, one after the other, on one counter; on a GPU also as replays of a CUDA graph."""
    counter, n = team.local((1,), torch.int64), 256
    for grid in grids:
        total = grid[0] * grid[1]
        x = torch.ones((total, n), dtype=torch.int32, device=team.device)
        expected = torch.arange(1, total + 1, dtype=torch.int32).repeat_interleave(n)
        rounds = (total - 1).bit_length()

        def run(grid=grid, x=x, rounds=rounds):
            scan[grid](x, counter, team.view, rounds, n, launch_cooperative_grid=True)

        run()
        assert torch.equal(x.cpu().flatten(), expected)
        if team.device.type == "cuda":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            for _ in range(20):
                x.fill_(1)
                graph.replay()
                assert torch.equal(x.cpu().flatten(), expected)
    return counter.item() & 0xFFFFFFFF


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_grids_of_any_size_share_a_counter(world_size):
    for seed in range(2):
        assert weft.simulate(scans, world_size, seed=seed, args=([(1, 1), (3, 1), (8, 1), (2, 3)],)) == [0] * world_size


def test_a_scan_is_clean():
    report = weft.check(scans, [1, 2], schedules=5, args=([(5, 1)],))
    assert report.ok, str(report)


@triton.jit
def exchange_tiles(source, target, landed, counter, team):
    """Each program stores a tile by descriptor; then the other reads it, and program 0 tells the peer."""
    me = tl.program_id(0)
    target.store([32 * me, 0], source.load([32 * me, 0]))
    wl.grid_barrier(counter, team)
    tile = target.load([32 * (1 - me), 0])
    if me == 0:
        wl.notify(landed, 1 - wl.rank(team), 1, team)
        wl.wait(landed, 1, team)
    wl.grid_barrier(counter, team)
    target.store([32 * (1 - me), 0], tile + 1)


def exchanged(team):
    target, landed = team.zeros((64, 32), torch.float32, name="target"), team.signals(1, name="landed")
    source = torch.arange(64 * 32, dtype=torch.float32, device=team.device).view(64, 32)
    counter = team.local((1,), torch.int64)
    tiles = [TensorDescriptor.from_tensor(x, [32, 32]) for x in (source, target)]
    exchange_tiles[(2,)](*tiles, landed, counter, team.view, launch_cooperative_grid=True)
    assert torch.equal(target, source + 1)
    team.barrier()


def test_descriptor_stores_are_visible_after_it():
    report = weft.check(exchanged, 2, schedules=12)
    assert report.ok, str(report)


@triton.jit
def meet(x, counter, team):
    me = tl.program_id(0)
    tl.store(x + me, 1)
    wl.grid_barrier(counter, team)
    tl.store(x + 2 + me, tl.load(x + 1 - me) + 1)


def test_every_schedule_of_two_programs_is_clean():
    def main(team):
        x = team.local((4,), torch.int32)
        meet[(2,)](x, team.local((1,), torch.int64), team.view)
        return x.tolist()

    results = []
    report = weft.check.check(main, 1, strategy="exhaustive", schedules=3000, on_results=results.append)
    assert report.ok and report.exhaustive == "exhausted", str(report)
    assert results == [[[1, 1, 2, 2]]] * len(results)


def test_a_cooperative_launch_of_too_many_programs_is_refused():
    with pytest.raises(weft.errors.WeftError, match="9 programs that wait for each other and this GPU holds 8"):
        weft.simulate(scans, 1, sms=8, args=([(9, 1)],))


@triton.jit
def store_and_meet(source, target, counter, team):
    target.store([0, 0], source.load([0, 0]))
    wl.grid_barrier(counter, team)
    target.store([0, 0], source.load([32, 0]))


@pytest.mark.parametrize("arch", TARGETS)
def test_all_threads_stores_are_released_and_all_threads_acquire(arch):
    tile, counter = TensorDescriptor.from_tensor(torch.zeros(64, 32), [32, 32]), torch.zeros(1, dtype=torch.int64)
    made = compiled(store_and_meet, tile, tile, counter, a_view(), arch=arch, num_warps=4).asm
    if arch == "gfx942":
        done = ("s_waitcnt vmcnt(0)", "buffer_wbl2 sc0 sc1", "s_waitcnt vmcnt(0)", "s_barrier")
        *_, met = positions(made["amdgcn"], "_store_dword", *done, "global_atomic_add_x2", "s_barrier")
        # Newer Triton keeps the poll, an atomic addition of 0, as it is; older ones make it a load.
        poll = r"(_load_dwordx2|_atomic_add_x2) .* sc0 sc1\n(.*\n)+?.*buffer_inv sc0 sc1"
        assert re.search(poll, made["amdgcn"][met:])
        return
    order = ["bar.sync", "atom.global.gpu.release.add.u64", "bar.sync", "ld.global.sys.acquire.b64", "bar.sync"]
    if arch != "sm_80":
        order = ["cp.async.bulk.tensor.2d.global", "cp.async.bulk.wait_group 0;", *order, "fence.proxy.async"]
        order.append("cp.async.bulk.tensor.2d.shared")
    positions(made["ptx"], *order)
    debug = compiled(store_and_meet, tile, tile, counter, a_view(patience_us=9), arch=arch, num_warps=4).asm["ptx"]
    assert "trap;" in debug


@triton.jit
def misuses(x, s, n, team, CASE: tl.constexpr):
    if CASE == "grid_barrier: counter points to int32; it is one int64 of this rank":
        wl.grid_barrier(s, team)
    if CASE == "grid_barrier: counter is a block of shape [2] of pointers to int64":
        wl.grid_barrier(x + tl.arange(0, 2), team)
    if CASE == "grid_barrier: counter is a run-time value of type int32":
        wl.grid_barrier(n, team)
    if CASE == "grid_barrier: team is a run-time value of type int32":
        wl.grid_barrier(x, n)


@pytest.mark.parametrize("case", re.findall(r'if CASE == "(.*)":', misuses.src))
def test_compiler_and_simulator_refuse_the_same_misuse_in_one_line(case):
    compiler, simulator = refused(misuses, 10, case, tensors=(torch.int64, torch.int32))
    assert simulator.startswith(case) and "\n" not in simulator and simulator in compiler


def scans_of_whole_gpus(team):
    most = team.max_programs(4)
    return scans(team, [(1, 1), (132, 1), (7, 11), (min(most, 512), 1)])


@pytest.mark.gpu(2)
def test_gpu_grids_of_any_size_share_a_counter():
    assert weft.launch(scans_of_whole_gpus, 2, "cuda") == [0, 0]


@pytest.mark.gpu(2)
def test_gpu_descriptor_stores_are_visible_after_it():
    weft.launch(exchanged, 2, "cuda")
