"""Waits for several signals that lie side by side: all signals, or any one.

    wl.wait_all(landed, wl.num_ranks(team), epoch, team)                 every rank's shard is here

    done = 0
    for _ in range(wl.num_ranks(team)):                                  the shards in the order of their arrival
        source, done = wl.wait_any(landed, wl.num_ranks(team), epoch, team, done)

Signals that do not lie side by side are awaited by ``wait``, one after the other.
"""

import triton
import triton.language as tl

from weft.language.arguments import check_scalars, check_signal, check_signal_count, check_team, signed_type_of
from weft.language.coordinates import rank
from weft.language.lowering import stock, tracing
from weft.language.signals import is_unmet


@triton.jit
def wait_all(signals, n: tl.constexpr, value, team):
    """Acquire: returns once each of ``signals[0:n]`` has been seen ``>= value``.

    ``signals``: scalar pointer to the first of ``n`` signals in this rank's memory, which the program looks at in one step.
    ``n``: compile-time constant in 1 .. 1024. ``value``: integer scalar.
    Promise: that of ``wait``, for each of the signals. Debug builds give up as ``wait`` does, naming a missing signal.
    """
    check_signal("wait_all", signals, value)
    check_signal_count("wait_all", n, 1024)
    check_team("wait_all", team)
    BLOCK: tl.constexpr = triton.next_power_of_2(n)
    await_all(signals, tl.arange(0, BLOCK) < n, value, ">=", team)


@triton.jit
def wait_any(signals, n: tl.constexpr, value, team, done=0):
    """Acquire: returns ``(index, done)`` once ``signals[index]``, one of ``n``, is ``>= value``.

    The first index where several are. ``signals``: scalar pointer to the first of ``n`` signals in this rank's memory.
    ``n``: compile-time constant in 1 .. 32, or in 1 .. 64 where ``done`` is an int64. ``value``: integer scalar. ``done``: the
    signals to leave out, one bit each; returned with the bit of ``index`` set, for the next call. Where all are left out,
    ``index`` is -1.
    Promise: that of ``wait``, for signal ``index`` alone, even if more signals have arrived. Which one that is depends on
    timing: a sum in this order differs in its last bits from run to run. Debug builds give up as ``wait`` does.
    """
    check_signal("wait_any", signals, value)
    check_scalars("wait_any", done=done)
    check_team("wait_any", team)
    done = done + tl.zeros((), tl.int32)  # a tensor of the number's type, or int32
    check_signal_count("wait_any", n, done.dtype.primitive_bitwidth)
    BLOCK: tl.constexpr = triton.next_power_of_2(n)
    at = tl.arange(0, BLOCK)
    index = await_any(signals, (at < n) & ((done >> at) & 1 == 0), value, ">=", team)
    # A shift by -1 is undefined, so it is made by 0 and not used.
    one = tl.full((), 1, done.dtype)
    return index, tl.where(index < 0, done, done | (one << tl.maximum(index, 0)))


@triton.jit
def await_all(signals, left, value, comparison: tl.constexpr, team):
    """``wait_all`` for the signals that ``left``, a block of booleans, selects."""
    signed: tl.constexpr = signed_type_of("wait", signals)
    wanted = tl.cast(value, signed)
    at = tl.arange(0, left.shape[0])
    started = stock.microseconds() if team.patience_us > 0 else 0
    began, rounds, last = tracing.begin(team), 0, 0
    while tl.max(left.to(tl.int32)) > 0:
        if team.trace is not None:
            rounds += 1
            last = tl.max(tl.where(left, at, 0))
        seen = tl.cast(stock.load_acquire_each(signals + at, left), signed)
        left = left & is_unmet(seen, wanted, comparison)
        if team.patience_us > 0:
            _give_up_after(started, signals, left, wanted, comparison, seen, team)
    # Each thread has acquired some of the signals: the barrier spreads that to all.
    tl.debug_barrier()
    stock.fence_before_tma_loads()
    tracing.record("wait", began, signals + last, rank(team), value, rounds > 1, team)


@triton.jit
def await_any(signals, left, value, comparison: tl.constexpr, team):
    """Index of ``wait_any`` for the signals that ``left``, a block of booleans, selects."""
    signed: tl.constexpr = signed_type_of("wait", signals)
    wanted = tl.cast(value, signed)
    at = tl.arange(0, left.shape[0])
    most: tl.constexpr = left.shape[0]
    index = tl.where(tl.max(left.to(tl.int32)) > 0, most, -1)
    started = stock.microseconds() if team.patience_us > 0 else 0
    began, rounds = tracing.begin(team), 0
    while index == most:
        if team.trace is not None:
            rounds += 1
        seen = tl.cast(stock.load_acquire_each(signals + at, left), signed)
        index = tl.min(tl.where(left & (is_unmet(seen, wanted, comparison) == 0), at, most))
        if team.patience_us > 0:
            _give_up_after(started, signals, left & (index == most), wanted, comparison, seen, team)
    tl.debug_barrier()
    stock.fence_before_tma_loads()
    tracing.record("wait", began, signals + tl.maximum(index, 0), rank(team), value, rounds > 1, team)
    return index


@triton.jit
def _give_up_after(started, signals, left, wanted, comparison: tl.constexpr, seen, team):
    """Give up once the team's patience is over, naming the first signal that ``left`` selects, if any."""
    at = tl.arange(0, left.shape[0])
    first = tl.min(tl.where(left, at, left.shape[0]))
    seen_first = tl.sum(tl.where(at == first, seen, 0))
    if (first < left.shape[0]) & (stock.microseconds() - started > team.patience_us):
        stock.give_up(signals + first, wanted, comparison, seen_first, team)
