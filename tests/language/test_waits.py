"""Waits for several signals: all of them, any one."""

import re

import pytest
import torch
import triton
import triton.language as tl

import weft
import weft.language as wl
from tests.compiling import TARGETS, a_view, compiled
from tests.language.test_signals import WIDTHS, refused


@triton.jit
def gather_all(boxes, out, landed, team, N: tl.constexpr):
    """out[r] = the number that rank r has sent, once all have come."""
    me = wl.rank(team)
    world: tl.constexpr = wl.num_ranks(team)
    at = tl.arange(0, N)
    for peer in tl.static_range(world):
        tl.store(wl.symm_at(boxes, peer, team) + me * N + at, tl.full((N,), 10 + me, tl.int32))
        wl.notify(landed + me, peer, 1, team)
    wl.wait_all(landed, world, 1, team)
    for source in tl.static_range(world):
        tl.store(out + source * N + at, tl.load(boxes + source * N + at))


@triton.jit
def gather_any(boxes, out, landed, order, team, N: tl.constexpr):
    """The same, in the order of arrival, which goes to ``order``."""
    me = wl.rank(team)
    world: tl.constexpr = wl.num_ranks(team)
    at = tl.arange(0, N)
    for peer in tl.static_range(world):
        tl.store(wl.symm_at(boxes, peer, team) + me * N + at, tl.full((N,), 10 + me, tl.int32))
        wl.notify(landed + me, peer, 1, team)
    done = 0
    for turn in range(world):
        source, done = wl.wait_any(landed, world, 1, team, done)
        tl.store(order + turn, source)
        tl.store(out + source * N + at, tl.load(boxes + source * N + at))
    nothing, _ = wl.wait_any(landed, world, 1, team, done)
    tl.store(order + world, nothing)


def gathers(team, dtype=torch.int32):
    """What both kernels gather, and the order in which the second took it."""
    n, size = 256, team.size
    landed = [team.zeros((size,), dtype, name="landed") for _ in range(2)]
    boxes = [team.zeros((size, n), torch.int32, name="boxes") for _ in range(2)]
    out = [team.local((size, n), torch.int32) for _ in range(2)]
    order = team.local((size + 1,), torch.int32)
    gather_all[(1,)](boxes[0], out[0], landed[0], team.view, n)
    gather_any[(1,)](boxes[1], out[1], landed[1], order, team.view, n)
    expected = (10 + torch.arange(size)).repeat_interleave(n).tolist()
    assert [one.flatten().tolist() for one in out] == [expected, expected]
    return order.tolist()


def test_what_several_ranks_send_is_gathered_under_every_schedule():
    report = weft.check(gathers, [1, 2, 3, 4], schedules=4, deterministic=False)
    assert report.ok, str(report)


@pytest.mark.parametrize("dtype", WIDTHS)
def test_any_takes_each_signal_once_and_the_first_of_those_that_have_come(dtype):
    orders = {tuple(order) for seed in range(6) for order in weft.simulate(gathers, 3, seed=seed, args=(dtype,))}
    assert all(sorted(order[:-1]) == [0, 1, 2] and order[-1] == -1 for order in orders) and len(orders) > 1


@triton.jit
def looks(signals, out, value, team, n: tl.constexpr, DONE: tl.constexpr):
    index, done = wl.wait_any(signals, n, value, team, tl.full((), DONE, tl.int64))
    tl.store(out, index)
    tl.store(out + 1, done)


@pytest.mark.parametrize("dtype", WIDTHS)
def test_any_is_a_function_of_memory(dtype):
    def main(team, values, done):
        signals, out = team.zeros((len(values),), dtype), team.local((2,), torch.int64)
        signals.copy_(torch.tensor(values, dtype=torch.int64).to(dtype))
        looks[(1,)](signals, out, 5, team.view, len(values), done)
        return out.tolist()

    for values, done, expected in [
        ([4, 5, 5], 0, [1, 0b10]),
        ([4, 5, 6], 0b10, [2, 0b110]),
        ([9, 0, 0], 0, [0, 1]),
        ([0] * 40 + [7], 1, [40, 1 | 1 << 40]),
        ([9, 9], 0b11, [-1, 0b11]),
    ]:
        assert weft.simulate(main, 1, args=(values, done)) == [expected]


@triton.jit
def waits_in_vain(landed, team, n: tl.constexpr, ANY: tl.constexpr):
    wl.notify(landed + 1, wl.rank(team), 1, team)
    if ANY:
        wl.wait_any(landed, n, 2, team)
    else:
        wl.wait_all(landed, n, 1, team)


def wait_in_vain(team, any_one):
    waits_in_vain[(1,)](team.signals(3, name="landed"), team.view, 2, any_one)
    team.synchronize()


MISSING = {
    True: (r"landed\[0\] of rank 0 or landed\[1\] of rank 0 >= 2, sees 0, 1", 2),
    False: (r"landed\[0\] of rank 0 >= 1, sees 0", 1),
}


@pytest.mark.parametrize("any_one", MISSING)
def test_a_wait_in_vain_blocks_and_names_what_is_missing(any_one):
    with pytest.raises(weft.errors.Deadlock, match=MISSING[any_one][0]):
        weft.simulate(wait_in_vain, 1, args=(any_one,))


@pytest.mark.gpu(2)
@pytest.mark.parametrize("any_one", MISSING)
def test_gpu_a_wait_in_vain_ends_and_names_what_is_missing(any_one):
    with pytest.raises(weft.errors.WaitTimeout) as caught:
        weft.launch(wait_in_vain, 2, "cuda", args=(any_one,), debug=1.0)
    assert (caught.value.signal, caught.value.wanted, caught.value.seen) == ("landed[0]", MISSING[any_one][1], 0)


@triton.jit
def first_of_two(landed, out, team):
    if tl.program_id(0) == 0:
        index, done = wl.wait_any(landed, 2, 1, team)
        tl.store(out, index)
    else:
        wl.notify(landed + tl.program_id(0) - 1, wl.rank(team), 1, team)


def test_over_all_schedules_either_of_two_is_the_first():
    seen = set()

    def main(team):
        out = team.local((1,), torch.int32)
        first_of_two[(3,)](team.signals(2, name="landed"), out, team.view)
        return out.item()

    report = weft.check.check(
        main, 1, strategy="exhaustive", schedules=500, deterministic=False, on_results=lambda found: seen.update(found)
    )
    assert report.ok and report.exhaustive == "exhausted" and seen == {0, 1}, str(report)


@triton.jit
def waits_for_both(landed, out, value, team, n: tl.constexpr):
    wl.wait_all(landed, n, value, team)
    index, done = wl.wait_any(landed, n, value, team)
    tl.store(out, index)


@pytest.mark.parametrize("arch", TARGETS)
def test_waits_for_several_signals_load_them_in_one_step_and_acquire(arch):
    for dtype, bits in WIDTHS.items():
        for patience_us in (0, 1_000_000) if dtype is torch.int32 else (0,):
            made = compiled(
                waits_for_both,
                torch.zeros(8, dtype=dtype),
                torch.zeros(1),
                3,
                a_view(patience_us=patience_us),
                5,
                arch=arch,
            ).asm
            if arch == "gfx942":
                load = "global_load_dwordx2" if bits == 64 else "global_load_dword"
                assert re.search(
                    rf"(?:{load} v\S+, v\S+, off|global_atomic_add.*) sc0 sc1\n"
                    r"(.*\n)+?.*buffer_inv sc0 sc1\n(.*\n)+?.*s_barrier",
                    made["amdgcn"],
                )
            else:
                polls = re.findall(rf"atom\.global\.sys\.acquire\.add\.u{bits}", made["ptx"])
                assert len(polls) == 2 and made["ptx"].rindex("bar.sync") > made["ptx"].rindex(polls[0])
                assert ("trap;" in made["ptx"]) == (patience_us > 0)
                assert ("fence.proxy.async" in made["ptx"]) == (arch != "sm_80")


@triton.jit
def misuses(x, s, n, team, CASE: tl.constexpr):
    if CASE == "wait_all: n is a run-time value of type int32; it is a compile-time constant":
        wl.wait_all(s, n, 1, team)
    if CASE == "wait_all: n=0 is no count of signals; pass one in 1 .. 1024":
        wl.wait_all(s, 0, 1, team)
    if CASE == "wait_all: n=1025 is no count of signals; pass one in 1 .. 1024":
        wl.wait_all(s, 1025, 1, team)
    if CASE == "wait_all: signal points to bf16":
        wl.wait_all(x, 2, 1, team)
    if CASE == "wait_all: value is 1.5":
        wl.wait_all(s, 2, 1.5, team)
    if CASE == "wait_all: team is 1":
        wl.wait_all(s, 2, 1, 1)
    if CASE == "wait_any: n=33 is no count of signals; pass one in 1 .. 32":
        wl.wait_any(s, 33, 1, team)
    if CASE == "wait_any: signal is a block of shape [2]":
        wl.wait_any(s + tl.arange(0, 2), 2, 1, team)
    if CASE == "wait_any: done is 1.5":
        wl.wait_any(s, 2, 1, team, 1.5)
    if CASE == "wait_any: value=4294967296 does not fit":
        wl.wait_any(s, 2, 2**32, team)


@pytest.mark.parametrize("case", re.findall(r'if CASE == "(.*)":', misuses.src))
def test_compiler_and_simulator_refuse_the_same_misuse_in_one_line(case):
    compiler, simulator = refused(misuses, 10, case, tensors=(torch.bfloat16, torch.int32))
    assert simulator.startswith(case) and "\n" not in simulator and simulator in compiler


@pytest.mark.gpu(2)
def test_gpu_what_several_ranks_send_is_gathered():
    for dtype in WIDTHS:
        for order in weft.launch(gathers, 2, "cuda", args=(dtype,)):
            assert sorted(order[:-1]) == [0, 1] and order[-1] == -1
