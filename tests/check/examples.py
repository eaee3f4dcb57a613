"""Mains shared by the tests of weft.check, its command and its plugin."""

import torch
import triton
import triton.language as tl

import weft.language as wl


@triton.jit
def publish(data, landed, got, team, N: tl.constexpr, NOTIFY: tl.constexpr):
    at = tl.arange(0, N)
    if wl.rank(team) == 0:
        tl.store(wl.symm_at(data, 1, team) + at, 1.0)
        if NOTIFY:
            wl.notify(landed, 1, 1, team)
        else:
            tl.atomic_xchg(wl.symm_at(landed, 1, team), 1, sem="release", scope="sys")
    elif wl.rank(team) == 1:
        wl.wait(landed, 1, team)
        tl.store(got + at, tl.load(data + at))


def run(team, notify):
    data, landed = team.zeros((32,), torch.float32, name="data"), team.signals(1, name="landed")
    publish[(1,)](data, landed, team.local(32, torch.float32), team.view, 32, notify)
    team.barrier()
    return data.clone()


def main(team):
    return run(team, True)


def racy(team):
    return run(team, False)


@triton.jit
def overwrite(data, team, N: tl.constexpr):
    there = wl.symm_at(data, 0, team) + tl.arange(0, N)
    tl.store(there, wl.rank(team).to(tl.float32))  # weft: allow(race) any rank's value will do


@triton.jit
def overwrite_for_no_reason(data, team, N: tl.constexpr):
    tl.store(wl.symm_at(data, 0, team) + tl.arange(0, N), wl.rank(team).to(tl.float32))  # weft: allow(race)


def allowed(team):
    overwrite[(1,)](team.zeros((32,), torch.float32, name="data"), team.view, 32)


def allowed_for_no_reason(team):
    overwrite_for_no_reason[(1,)](team.zeros((32,), torch.float32, name="data"), team.view, 32)


@triton.jit
def stop_here(out, team):
    if wl.rank(team) == 1:
        breakpoint()
    tl.store(out, wl.rank(team))


def stopped(team):
    out = team.local(1, torch.int32)
    stop_here[(1,)](out, team.view)
    return out.item()


@triton.jit
def count(total):
    tl.store(total, tl.load(total) + 1)


@triton.jit
def take(data, landed, got, team, N: tl.constexpr):
    wl.wait(landed, 1, team)
    tl.store(got + tl.arange(0, N), tl.load(data + tl.arange(0, N)))


def launched_first(team):
    source, target = (team.zeros((32,), torch.float32, name=name) for name in ("source", "target"))
    landed, one, got = team.signals(1, name="landed"), team.local(1, torch.int32), team.local(32, torch.float32)
    source.fill_(team.rank + 1.0)
    one.fill_(1)
    team.copy_engine.fork()
    take[(1,)](target, landed, got, team.view, 32)
    team.copy_engine.put(target, source, 1 - team.rank)
    team.copy_engine.signal(landed, one, 1 - team.rank)
    assert got.eq(2.0 - team.rank).all()
    team.barrier()
