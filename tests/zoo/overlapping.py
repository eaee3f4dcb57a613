"""Bugs of kernels that start while the one before them runs (programmatic dependent launch)."""

import torch
import triton
import triton.language as tl

import weft.language as wl
from tests.zoo.exhibit import N, exhibit


@triton.jit
def fill(x, N: tl.constexpr):
    wl.follow_previous_kernel()
    tl.store(x + tl.program_id(0) * N + tl.arange(0, N), 1.0)  # here


@triton.jit
def sum_of(out, x, N: tl.constexpr, EARLY: tl.constexpr):
    at = tl.arange(0, 2 * N)
    if not EARLY:
        wl.follow_previous_kernel()
    found = tl.load(x + at)  # here
    if EARLY:
        wl.follow_previous_kernel()
    tl.store(out, tl.sum(found))


@exhibit(
    "early-access", "x, argument of fill", "a kernel loads what the previous one stores before it waits for it", fill,
    sum_of,
)  # fmt: skip
def load_before_following(team, bug):
    x, out = team.local((2, N), torch.float32), team.local(1, torch.float32)
    fill[(2,)](x, N, launch_pdl=True)
    sum_of[(1,)](out, x, N, bug, launch_pdl=True)
    return out


@triton.jit
def clear(x, N: tl.constexpr, EARLY: tl.constexpr):
    at = tl.arange(0, 2 * N)
    if not EARLY:
        wl.follow_previous_kernel()
    tl.store(x + at, 0.0)  # here
    if EARLY:
        wl.follow_previous_kernel()


@exhibit(
    "early-access", "x, argument of sum_of", "a kernel clears memory that the previous kernel still reads", sum_of, clear
)  # fmt: skip
def store_before_following(team, bug):
    x, out = team.local((2, N), torch.float32), team.local(1, torch.float32)
    sum_of[(1,)](out, x, N, False, launch_pdl=True)
    clear[(1,)](x, N, bug, launch_pdl=True)
    return out


@triton.jit
def hurried(y, N: tl.constexpr, BUG: tl.constexpr):
    if BUG:
        wl.let_next_kernel_start()
        wl.wait_for_previous_kernel()
    else:
        wl.follow_previous_kernel()
    tl.store(y + tl.arange(0, N), 2.0)


@exhibit(
    "early-access", "x, argument of fill",
    "a kernel lets the next one start before it has waited, and the next one relies on the kernel before both", fill, sum_of,
)  # fmt: skip
def start_let_too_soon(team, bug):
    x, y, out = team.local((2, N), torch.float32), team.local(N, torch.float32), team.local(1, torch.float32)
    fill[(2,)](x, N, launch_pdl=True)
    hurried[(1,)](y, N, bug, launch_pdl=True)
    sum_of[(1,)](out, x, N, True, launch_pdl=True)
    return out


@triton.jit
def fill_some(x, n, N: tl.constexpr, BUG: tl.constexpr):
    if BUG:
        if tl.program_id(0) >= n:
            return
    wl.follow_previous_kernel()
    if tl.program_id(0) < n:
        tl.store(x + tl.program_id(0) * N + tl.arange(0, N), 1.0)


@exhibit("unfollowed", "", "a program without work returns without waiting for the previous kernel")
def idle_program_that_does_not_follow(team, bug):
    x, out = team.local((2, N), torch.float32), team.local(1, torch.float32)
    sum_of[(1,)](out, x, N, False, launch_pdl=True)
    fill_some[(3,)](x, 2, N, bug, launch_pdl=True)
    return x
