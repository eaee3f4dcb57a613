"""Waits for several signals, and barriers of a grid."""

import torch
import triton
import triton.language as tl

import weft.language as wl
from tests.zoo.exhibit import N, exhibit


@triton.jit
def gather_after_a_wait_for_any(data, got, landed, team, N: tl.constexpr, BUG: tl.constexpr):
    me, at = wl.rank(team), tl.arange(0, N)
    for peer in tl.static_range(wl.num_ranks(team)):
        tl.store(wl.symm_at(data, peer, team) + me * N + at, tl.full((N,), 1.0, tl.float32))  # here
        wl.notify(landed + me, peer, 1, team)
    if BUG:
        wl.wait_any(landed, wl.num_ranks(team), 1, team)
    else:
        wl.wait_all(landed, wl.num_ranks(team), 1, team)
    for source in tl.static_range(wl.num_ranks(team)):
        tl.store(got + source * N + at, tl.load(data + source * N + at))  # here


@exhibit("race", "data", "the data of all ranks are read after a wait for any one rank", gather_after_a_wait_for_any,
         also=("divergence",))  # fmt: skip
def wait_for_any_in_place_of_all(team, bug):
    data, landed = team.zeros((team.size, N), torch.float32, name="data"), team.signals(team.size, name="landed")
    got = team.local((team.size, N), torch.float32)
    gather_after_a_wait_for_any[(1,)](data, got, landed, team.view, N, bug)
    return got


@triton.jit
def shift_between_programs(data, counter, team, N: tl.constexpr, BUG: tl.constexpr):
    me, at = tl.program_id(0), tl.arange(0, N)
    tl.store(data + me * N + at, tl.full((N,), 1.0, tl.float32) * me)  # here
    if not BUG:
        wl.grid_barrier(counter, team)
    neighbour = tl.load(data + (me + 1) % tl.num_programs(0) * N + at)  # here
    wl.grid_barrier(counter, team)
    tl.store(data + me * N + at, neighbour)


@exhibit("race", "data", "a program reads what another stores, without a grid barrier", shift_between_programs,
         also=("divergence",))  # fmt: skip
def forgotten_grid_barrier(team, bug):
    data = team.zeros((4, N), torch.float32, name="data")
    shift_between_programs[(4,)](data, team.local((1,), torch.int64), team.view, N, bug)
    return data


@triton.jit
def meet_if_busy(counter, rows, team, BUG: tl.constexpr):
    if (tl.program_id(0) < rows) | (not BUG):
        wl.grid_barrier(counter, team)  # here


@exhibit("deadlock", "counter, argument of meet_if_busy", "a program without work leaves out the grid barrier",
         meet_if_busy)  # fmt: skip
def idle_program_leaves_out_the_grid_barrier(team, bug):
    meet_if_busy[(3,)](team.local((1,), torch.int64), 2, team.view, bug)


@triton.jit
def meet(counter, team):
    wl.grid_barrier(counter, team)  # here


@exhibit("residency", "counter, argument of meet", "a grid barrier of more programs than the GPU holds", meet, sms=4)
def grid_barrier_beyond_residency(team, bug):
    meet[(6 if bug else 4,)](team.local((1,), torch.int64), team.view)
