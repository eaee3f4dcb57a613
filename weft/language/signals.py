"""Order between ranks: ``notify`` releases, ``wait`` acquires, ``barrier`` is both with every rank.

A signal is one int32 of the symmetric heap (``team.signals(shape)``), or one uint32, int64 or uint64
(``team.zeros(shape, dtype)``); the compiler and the simulator refuse other types. Signals only grow, and a wait asks for
``>=``: a wait for one value would never end if the next notify came between two of its looks at the signal.

Values count modulo the signal's width: a value of another integer type is first truncated or extended to the signed type of
that width, a constant that does not fit is refused, and the comparison is of the signed difference. So counting past 2**31
(2**63) works, signed or unsigned, as long as no wait is that far ahead of its signal.
"""

import triton
import triton.language as tl

from weft.language.arguments import check_constants, check_scalars, check_signal, check_team, signed_type_of
from weft.language.coordinates import num_ranks, rank, symm_at
from weft.language.lowering import stock, tracing
from weft.language.ordering import gather_stores

# Operations of `notify` on a signal. Constexpr objects because Triton 3.6 takes no plain string as a default.
SET: tl.constexpr = tl.constexpr("set")
ADD: tl.constexpr = tl.constexpr("add")


@triton.jit
def notify(signal, peer, value, team, op: tl.constexpr = SET):
    """Release: all that this program has stored is visible to a program that waits for ``value``.

    ``signal``: scalar pointer to a symmetric signal. ``value``: integer scalar. ``op``, a compile-time constant: "set" stores
    ``value`` at ``peer``; "add" adds it atomically, which PCIe does not offer (``team.caps.remote_atomics``): refused there.
    Promise: every earlier store of this *program* (all its threads, remote ones and tensor-descriptor stores included) is
    visible system-wide before ``peer`` can see the new value. Contains a CTA barrier: all threads must reach it.
    """
    check_signal("notify", signal, value)
    check_scalars("notify", peer=peer)
    check_team("notify", team)
    check_constants("notify", op=op)
    began = tracing.begin(team)
    stock.drain_tma_stores()
    gather_stores()
    target = symm_at(signal, peer, team)
    if op == "add":
        tl.static_assert(
            team.remote_atomics > 0,
            "notify: op='add' needs atomics on a peer's memory, which this team's links lack (PCIe, team.caps.links); "
            "pass op='set', with a signal for each sender",
        )
        stock.add_release(target, value)
    else:
        tl.static_assert(op == "set", "notify: op must be 'set' or 'add'")
        stock.store_release(target, value)
    tracing.record("add" if op == "add" else "notify", began, signal, peer, value, True, team)


@triton.jit
def wait(signal, value, team):
    """Acquire: returns once ``*signal >= value``, with the value seen (a token for ``consume_token``).

    ``signal``: scalar pointer to a signal in this rank's memory. ``value``: integer scalar. The result has the signal's type.
    Promise: all that the notifier's program stored before its ``notify`` is visible to every thread of this program
    afterwards, to plain loads and to tensor-descriptor loads. Debug builds (``weft.init(debug=True)``) give up after the team's
    patience, leave a record and trap.
    """
    check_signal("wait", signal, value)
    check_team("wait", team)
    return wait_until(signal, value, ">=", team)


@triton.jit
def is_unmet(seen, wanted, comparison: tl.constexpr):
    """True where a wait for ``wanted`` goes on, of numbers in the signed type of the signal's width."""
    if comparison == "==":
        return seen != wanted
    elif comparison == "!=":
        return seen == wanted
    else:
        return seen - wanted < 0


@triton.jit
def wait_until(signal, value, comparison: tl.constexpr, team):
    """``wait`` with another comparison than ``>=``: OpenSHMEM's "==" and "!=", which lack its promise."""
    # Unsigned numbers have no difference below 0.
    signed: tl.constexpr = signed_type_of("wait", signal)
    wanted = tl.cast(value, signed)
    began = tracing.begin(team)
    seen = stock.load_acquire(signal)
    polls = is_unmet(tl.cast(seen, signed), wanted, comparison)
    if team.patience_us > 0:
        started = stock.microseconds()
        while is_unmet(tl.cast(seen, signed), wanted, comparison):
            seen = stock.load_acquire(signal)
            late = stock.microseconds() - started > team.patience_us
            if late & is_unmet(tl.cast(seen, signed), wanted, comparison):
                stock.give_up(signal, value, comparison, tl.cast(seen, signed), team)
    else:
        while is_unmet(tl.cast(seen, signed), wanted, comparison):
            seen = stock.load_acquire(signal)
    stock.fence_before_tma_loads()
    tracing.record("wait", began, signal, rank(team), value, polls, team)
    return seen


@triton.jit
def consume_token(x, token):
    """``x``, tied to the wait that returned ``token``.

    A wait is an atomic with side effects, and stock Triton moves no load across it, so this is the identity here. Write it
    where only data flow orders a use after a wait, for the reader and for lowerings that need it.
    """
    return x


@triton.jit
def barrier(team):
    """Barrier of the programs with this ``tl.program_id(0)`` on all ranks, with release and acquire.

    Stores of each before it are visible to its peers after it. Every rank must call it in the same programs the same number of
    times, in at most ``MAX_BARRIER_PROGRAMS`` programs. Grids are one-dimensional: programs that differ in another index alone
    would share counters, which the simulator refuses. The counters live in the team and only grow, so any number of calls is
    allowed.
    """
    check_team("barrier", team)
    stock.meets_by_first_index()
    world: tl.constexpr = num_ranks(team)
    me = rank(team)
    row = team.barriers + tl.program_id(0) * (world + 1)
    round = tl.load(row + world) + 1
    for step in tl.static_range(world):
        # Own counter last: all peers are notified before the first wait.
        notify(row + me, (me + step + 1) % world, round, team)
    for peer in tl.static_range(world):
        wait(row + peer, round, team)
    tl.store(row + world, round)
    # All threads of the next barrier of this program read the count.
    tl.debug_barrier()
