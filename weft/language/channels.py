"""Signals by chunk of a channel (``team.channel(chunks)``), which counts the calls itself.

    call = wl.next_call(channel)                  begins a call: one load for all notifies and waits of the program
    wl.chunk_notify(call, peer, chunk, team)      after the stores of a chunk
    wl.chunk_wait(call, source, chunk, team)      before the loads of a chunk
    wl.advance_call(call)                         at the end of every program

The kernel's argument is ``channel.view``. Where an earlier kernel of the stream, or the host (``channel.begin()``), has begun
the call, ``wl.current_call(channel)`` replaces the first line, and the last one is left out.
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
    """One call of a channel in a kernel: the fields of the view, and ``now``, the number of the call.

    Other signals of the kernel may use ``now`` as their epoch. Triton turns the constants of an assigned tuple into tensors, so
    ``chunks`` is no compile-time constant here; the compiler still folds it.
    """

    signals: tl.tensor
    epoch: tl.tensor
    chunks: tl.tensor
    now: tl.tensor


@triton.jit
def next_call(channel):
    """Begin the channel's next call in this kernel: the same call in all its programs.

    Every program calls ``advance_call`` at its end.
    """
    check_channel("next_call", channel)
    return ChannelCall(channel.signals, channel.epoch, channel.chunks, next_epoch(channel.epoch))


@triton.jit
def current_call(channel):
    """Current call of the channel, begun by an earlier kernel of the stream or by the host."""
    check_channel("current_call", channel)
    return ChannelCall(channel.signals, channel.epoch, channel.chunks, tl.load(channel.epoch))


@triton.jit
def advance_call(call):
    """End this program's part of ``next_call``; the last program makes ``call`` the current one.

    Every program calls it once, at its end.
    """
    check_call("advance_call", call)
    advance_epoch(call.epoch, call.now)


@triton.jit
def chunk_notify(call, peer, chunk, team):
    """Release: announce ``chunk`` of this rank to ``peer``, after all earlier stores of this program.

    ``chunk``: integer scalar in 0 .. chunks - 1. The promise is that of ``notify``: a ``chunk_wait`` for this chunk makes the
    stores visible. All threads must reach it.
    """
    check_call("chunk_notify", call)
    check_team("chunk_notify", team)
    check_scalars("chunk_notify", peer=peer, chunk=chunk)
    stock.names_chunk(peer, chunk, call.chunks, team)
    notify(call.signals + rank(team) * call.chunks + chunk, peer, call.now, team)


@triton.jit
def chunk_wait(call, source, chunk, team):
    """Acquire: returns once ``chunk`` of rank ``source`` has arrived in this call, with the epoch seen.

    It pairs with that rank's ``chunk_notify``, or with ``channel.send`` of its copy engine. The promise is that of ``wait``:
    stores before the notify are visible to every thread of this program afterwards. Debug builds give up as ``wait`` does.
    """
    check_call("chunk_wait", call)
    check_team("chunk_wait", team)
    check_scalars("chunk_wait", source=source, chunk=chunk)
    stock.names_chunk(source, chunk, call.chunks, team)
    return wait(call.signals + source * call.chunks + chunk, call.now, team)
