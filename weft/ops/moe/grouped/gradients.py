"""Gradients of the weights of grouped GEMMs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.ops.local import capabilities_of
from weft.ops.moe.routing import Schedule
from weft.runtime.arithmetic import cdiv, next_power_of_2
from weft.runtime.capabilities import launch_options
from weft.runtime.launching import launch_on


@triton.jit
def grouped_weight_grad_kernel(
    dy,
    x,
    grad,
    schedule,
    T,
    N,
    K,
    CHOICES: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEP: tl.constexpr,
):
    """grad[e] = sum over the pairs of expert e of dy[row].T @ x[row]    grid: (EXPERTS * tiles of [N, K],)

    dy, x  if CHOICES, row i of dy [pairs, N] is of the i-th pair of the schedule, and row t of x [T, K] of token t; else row p
           of dy is pair p's, and x is in the order of the schedule. STEP pairs at a time, in that order; T: tokens

    signals, waits  none
    """
    across = tl.cdiv(K, BLOCK_K)
    of_expert = tl.cdiv(N, BLOCK_N) * across
    expert, tile = tl.program_id(0) // of_expert, tl.program_id(0) % of_expert
    n = tile // across * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    k = tile % across * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    wl.follow_previous_kernel()
    every = tl.arange(0, triton.next_power_of_2(EXPERTS))
    before = tl.sum(tl.load(schedule.counts + every, mask=every < expert, other=0), axis=0)
    count = tl.load(schedule.counts + expert)
    pairs = schedule.pairs + expert.to(tl.int64) * T
    acc = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for begin in range(0, count, STEP):
        local = begin + tl.arange(0, STEP)
        inside = (local < count)[:, None]
        pair = tl.load(pairs + local, mask=local < count, other=0)
        if CHOICES > 0:
            of_y, of_x = before + local, pair // CHOICES
        else:
            of_y, of_x = pair, before + local
        a = tl.load(dy + of_y.to(tl.int64)[:, None] * N + n, mask=inside & (n < N), other=0.0)
        b = tl.load(x + of_x.to(tl.int64)[:, None] * K + k, mask=inside & (k < K), other=0.0)
        acc = tl.dot(a.T, b, acc, input_precision="ieee")
    n = n.T
    rows = expert.to(tl.int64) * N + n
    tl.store(grad + rows * K + k, acc.to(grad.dtype.element_ty), mask=(n < N) & (k < K))


def weight_grad(dy: torch.Tensor, x: torch.Tensor, schedule: Schedule, *, gather: bool) -> torch.Tensor:
    """Gradient of the weight [experts, N, K] in x's dtype; zeros for experts without pairs."""
    (N, K), (experts, T), caps = (dy.shape[1], x.shape[1]), schedule.pairs.shape, capabilities_of(x.device)
    grad = x.new_empty((experts, N, K))
    block = 32 if x.dtype == torch.float32 else 128 if caps.arch == "sm_90" else 64
    block_n, block_k = (max(16, min(block, next_power_of_2(size))) for size in (N, K))
    choices = schedule.choices if gather else 0
    launch = launch_on(
        x.device,
        grouped_weight_grad_kernel,
        (choices, experts, block, block_n, block_k),
        lambda: {
            "CHOICES": choices,
            "EXPERTS": experts,
            "BLOCK_N": block_n,
            "BLOCK_K": block_k,
            "STEP": 32,
            "num_warps": 8 if block == 128 else 4,
            **launch_options(caps),
        },
    )
    programs = experts * cdiv(N, block_n) * cdiv(K, block_k)
    launch(programs, dy.contiguous(), x.contiguous(), grad, schedule, T, N, K)
    return grad
