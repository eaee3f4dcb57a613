"""Arrival by chunk: a channel (``team.channel(chunks)``, passed as ``channel.view``) knows the number of the call.

    call = wl.next_call(channel)                  begins a call: one load, for all notifies and waits of the program
    wl.chunk_notify(call, peer, chunk, team)      behind the stores of a chunk
    wl.chunk_wait(call, source, chunk, team)      before the loads of a chunk
    wl.advance_call(call)                         at the end of every program

Kernels launched after one that has begun the call take ``wl.current_call(channel)`` in place of the first and last line, and
so does every kernel where the host has begun it (``channel.begin()``).
"""

from typing import NamedTuple

import triton
import triton.language as tl

from weft.language.arguments import check_call, check_channel, check_scalars, check_team
from weft.language.coordinates import rank
from weft.language.epochs import advance_epoch, next_epoch
from weft.language.lowering import stock
from weft.language.signals import notify, wait


class ChannelCall(NamedTuple):
    """One call of a channel, in a kernel: the channel's view, and ``now``, the number of the call.

    ``now`` may also stand in signals of the kernel's own, which then need no epoch of theirs. ``chunks`` is no compile-time
    constant to Triton any more, which makes tensors of the constants in a tuple that is assigned; the compiler still folds it.
    """

    signals: tl.tensor
    epoch: tl.tensor
    chunks: tl.tensor
    now: tl.tensor


@triton.jit
def next_call(channel):
    """The channel's next call, which this kernel begins: the same one in all its programs, 1 at first.

    Every program ends it with ``advance_call``.
    """
    check_channel("next_call", channel)
    return ChannelCall(channel.signals, channel.epoch, channel.chunks, next_epoch(channel.epoch))


@triton.jit
def current_call(channel):
    """The channel's current call, which an earlier kernel of the stream or the host has begun."""
    check_channel("current_call", channel)
    return ChannelCall(channel.signals, channel.epoch, channel.chunks, tl.load(channel.epoch))


@triton.jit
def advance_call(call):
    """Make ``call`` the channel's current one: run once by every program of the grid at its end; the last one stores it."""
    check_call("advance_call", call)
    advance_epoch(call.epoch, call.now)


@triton.jit
def chunk_notify(call, peer, chunk, team):
    """Release: all that this program has stored is visible to a program of ``peer`` whose ``chunk_wait`` for it returns.

    ``chunk``: integer scalar in 0 .. chunks - 1, of this rank's data at ``peer``. As with ``notify``, all threads come here.
    """
    check_call("chunk_notify", call)
    check_team("chunk_notify", team)
    check_scalars("chunk_notify", peer=peer, chunk=chunk)
    stock.names_chunk(peer, chunk, call.chunks, team)
    notify(call.signals + rank(team) * call.chunks + chunk, peer, call.now, team)


@triton.jit
def chunk_wait(call, source, chunk, team):
    """Acquire: returns once ``chunk`` of rank ``source``'s data of this call is here, with the epoch seen.

    Its ``chunk_notify``, or ``channel.send`` of its copy engine, came behind the data. As ``wait``: what was stored before is
    visible to every thread of this program afterwards, and debug builds give up after the team's patience.
    """
    check_call("chunk_wait", call)
    check_team("chunk_wait", team)
    check_scalars("chunk_wait", source=source, chunk=chunk)
    stock.names_chunk(source, chunk, call.chunks, team)
    return wait(call.signals + source * call.chunks + chunk, call.now, team)
