"""Bugs of copies that are complete only after ``quiet``."""

import torch
import triton
import triton.language as tl

import weft.language as wl
from tests.zoo.exhibit import N, exhibit
from tests.zoo.publishing import tensors
from weft.language.shmem import SIGNAL_SET


@triton.jit
def put_then_overwrite(data, source, landed, got, team, N: tl.constexpr, BUG: tl.constexpr):
    at = tl.arange(0, N)
    if wl.rank(team) == 0:
        wl.put_nbi(data, source, N, 1, team)  # here
        if BUG:
            wl.fence(team)
        else:
            wl.quiet(team)
        tl.store(source + at, 2.0)  # here
        wl.notify(landed, 1, 1, team)
    else:
        wl.wait(landed, 1, team)
        tl.store(got + at, tl.load(data + at))


@exhibit("unquieted", "source, argument of put_then_overwrite", "the source of put_nbi is overwritten before quiet",
         put_then_overwrite, also=("divergence",))  # fmt: skip
def source_of_put_nbi_overwritten(team, bug):
    data, landed, got = tensors(team)
    source = team.local(N, torch.float32).fill_(1.0)
    put_then_overwrite[(1,)](data, source, landed, got, team.view, N, bug)
    team.barrier()
    return got


@triton.jit
def get_then_read(data, inbox, got, team, N: tl.constexpr, BUG: tl.constexpr):
    at = tl.arange(0, N)
    wl.shmem.getmem_nbi_block(inbox, data, 4 * N, 1 - wl.rank(team), team)  # here
    if not BUG:
        wl.shmem.quiet(team)
    tl.store(got + at, tl.load(inbox + at))  # here


@exhibit("unquieted", "inbox, argument of get_then_read", "the target of get_nbi is read before quiet", get_then_read,
         also=("divergence",))  # fmt: skip
def target_of_get_nbi_read(team, bug):
    data, _, got = tensors(team)
    data.fill_(1.0)
    team.barrier()
    get_then_read[(1,)](data, team.local(N, torch.float32), got, team.view, N, bug)
    team.barrier()
    return got


@triton.jit
def put_then_signal(data, source, landed, got, team, N: tl.constexpr, BUG: tl.constexpr):
    at = tl.arange(0, N)
    if wl.rank(team) == 0:
        wl.put_nbi(data, source, N, 1, team)  # here
        if not BUG:
            wl.fence(team)
        wl.notify(landed, 1, 1, team)
    else:
        wl.wait(landed, 1, team)
        tl.store(got + at, tl.load(data + at))  # here


@exhibit("unquieted", "data", "a notify after put_nbi, without a fence or quiet", put_then_signal, also=("divergence",))
def notify_overtakes_put_nbi(team, bug):
    data, landed, got = tensors(team)
    put_then_signal[(1,)](data, team.local(N, torch.float32).fill_(1.0), landed, got, team.view, N, bug)
    team.barrier()
    return got


@triton.jit
def put_signal_twice(data, source, landed, got, team, N: tl.constexpr, BUG: tl.constexpr):
    at = tl.arange(0, N)
    if wl.rank(team) == 0:
        for call in tl.static_range(2):
            tl.store(source + at, call + 1.0)  # here
            there, flag = data + call * N, landed + call
            wl.shmem.putmem_signal_nbi_block(there, source, 4 * N, flag, 1, SIGNAL_SET, 1, team)  # here
            if not BUG:
                wl.quiet(team)
    else:
        for call in tl.static_range(2):
            wl.wait(landed + call, 1, team)
            tl.store(got + call * N + at, tl.load(data + call * N + at))


@exhibit("unquieted", "source, argument of put_signal_twice", "the source of put_signal_nbi is refilled before quiet",
         put_signal_twice)  # fmt: skip
def source_of_put_signal_nbi_filled_again(team, bug):
    data, landed = team.zeros((2, N), torch.float32, name="data"), team.signals(2, name="landed")
    source, got = team.local(N, torch.float32), team.local(2 * N, torch.float32)
    put_signal_twice[(1,)](data, source, landed, got, team.view, N, bug)
    team.barrier()
    return got


@triton.jit
def put_and_answer(data, source, landed, got, team, N: tl.constexpr, BUG: tl.constexpr):
    """The receiver answers by what it has read, so that the data have been read; only quiet gives the source back."""
    at = tl.arange(0, N)
    if wl.rank(team) == 0:
        wl.put_nbi(data, source, N, 1, team)  # here
        wl.fence(team)
        wl.notify(landed, 1, 1, team)
        wl.wait(landed, 1, team)
        if not BUG:
            wl.quiet(team)
        tl.store(source + at, 2.0)  # here
    else:
        wl.wait(landed, 1, team)
        seen = tl.load(data + at)
        tl.store(got + at, seen)
        wl.notify(landed, 0, tl.max(seen).to(tl.int32), team)


@exhibit("unquieted", "source, argument of put_and_answer", "the source of put_nbi is overwritten after an answer to it",
         put_and_answer)  # fmt: skip
def source_of_put_nbi_overwritten_after_an_answer(team, bug):
    data, landed, got = tensors(team)
    source = team.local(N, torch.float32).fill_(1.0)
    put_and_answer[(1,)](data, source, landed, got, team.view, N, bug)
    team.barrier()
    return got
