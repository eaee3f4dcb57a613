"""A tile exchanged between all ranks, in registers: the one step that every collective here is made of.

    received[s] = what rank s sent me      rows, received: [ROWS, BLOCK], ROWS = world size rounded to a power of two

An all-gather exchanges W copies of a tile, an all-to-all W different ones, a reduce-scatter sums what it received, a
one-shot all-reduce sums W copies, a two-shot all-reduce exchanges, sums and exchanges again.

Each program owns a *slot* of the workspace and counts its exchanges in a word of device memory, its epoch. Program p
of a rank exchanges only with the programs p of the others, and all ranks make the same calls with the same sizes, so
epoch e of slot p means the same exchange everywhere, whatever the sizes of the calls before: a smaller call uses
fewer slots, and the epochs of the others stand still.

    slot     stages[e % S] is [W, BLOCK]: row s is written by rank s        S = 3 (lamport) or 2 (signals)
    lamport  data are their own flag (weft.language.lamport); one link crossing; -0.0 arrives as +0.0
    signals  arrived[s] = e once row s is here; two crossings, no clearing, every bit pattern

Who signals whom: rank s writes row s of stage e at every rank; each waits for all W rows.

Reuse, signals. Rank s writes stage e % 2 at r again in epoch e + 2, after it saw r's arrival of e + 1, which r's
program sent after it had loaded stage e into registers (``notify`` releases, with the CTA barrier in it).

Reuse, lamport. In epoch e program p of rank r clears the stage of e - 1, which it has loaded, to "unwritten". It is
the stage of e + 2. Rank s writes there after it saw r's rows of e + 1, sent after the clearing. The whole [W, BLOCK]
stage is written in every epoch (beyond ragged edges with zeros) and the whole stage is cleared, so no size leaves a
rest behind.

Progress. All programs of a grid are resident (cooperative launch), and each makes its exchanges in order without
waiting for another program of its rank. Kernels that share the slots are ordered by one stream.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.runtime.team import Team

# Triton 3.6 takes no plain string as a default; as a constant a constexpr object serves everywhere.
LAMPORT: tl.constexpr = tl.constexpr("lamport")
SIGNALS: tl.constexpr = tl.constexpr("signals")

LAMPORT_WARPS = 2
LAMPORT_ROW_BYTES = 1024  # 16 bytes a thread; many small programs beat few large ones (H200: FACTS, 512 bf16 elements)
SIGNALS_WARPS = 4
SIGNALS_TILE_BYTES = 16384  # of all rows: 128 bytes a thread in registers, whatever the world size
# Of a thread, so that 8 programs of 2 warps or 4 of 4 fit an SM's 65,536. Ragged sizes would take up to 250 (signalled
# two-shot of bf16, sm_90) and have the cooperative launch refused; held to 128 they spill, up to 184 bytes at W=8.
MAX_REGISTERS = 128
UNWRITTEN = {2: (torch.int16, -(2**15)), 4: (torch.int32, -(2**31))}  # the bits of -0.0 by item size


@triton.jit
def send_order(team, ROWS: tl.constexpr):
    """``peers[i]``, [ROWS] int32: who gets row i. Rotated, so that not all ranks write to rank 0 first."""
    return (wl.rank(team) + 1 + tl.arange(0, ROWS)) % wl.num_ranks(team)


@triton.jit
def is_rank(team, ROWS: tl.constexpr):
    """[ROWS, 1] int1: rows that stand for a rank (world sizes that are not powers of two have more rows)."""
    return tl.arange(0, ROWS)[:, None] < wl.num_ranks(team)


@triton.jit
def count_tiles(length, TILE: tl.constexpr):
    """Tiles of TILE elements in ``length`` (int64, since the sum in ``cdiv`` may pass 2**31), int32."""
    return tl.cast(tl.cdiv(length, TILE), tl.int32)


@triton.jit
def tile_rest(length, start, TILE: tl.constexpr):
    """How many of the TILE elements from ``start`` (int64) lie before ``length``: int32, for masks of few registers."""
    return tl.cast(tl.minimum(length - start, TILE), tl.int32)


@triton.jit
def my_slot(buffer, BLOCK: tl.constexpr, TRANSPORT: tl.constexpr, team):
    """This program's slot of ``buffer``: pointer to [stages, W, BLOCK]."""
    STAGES: tl.constexpr = 3 if TRANSPORT == "lamport" else 2
    return buffer + tl.program_id(0) * (STAGES * BLOCK * wl.num_ranks(team))


@triton.jit
def exchange(rows, slot, arrived, epoch, team, TRANSPORT: tl.constexpr):
    """Row i of ``rows`` [ROWS, BLOCK] goes to ``send_order(team)[i]``; returns [ROWS, BLOCK], row s from rank s, 0
    beyond W.

    ``slot``: ``my_slot``. ``arrived``: int32 [W] of this program. ``epoch``: this program's count of exchanges, this
    one included. All ranks' programs of this id call it the same number of times. See the module for order and reuse.
    """
    ROWS: tl.constexpr = rows.shape[0]
    BLOCK: tl.constexpr = rows.shape[1]
    world: tl.constexpr = wl.num_ranks(team)
    me = wl.rank(team)
    mask = is_rank(team, ROWS) & (tl.arange(0, BLOCK) >= 0)[None, :]
    here = (tl.arange(0, ROWS) * BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :]
    if TRANSPORT == "lamport":
        stage = slot + (epoch % 3) * (world * BLOCK)
        row = wl.symm_at(stage + me * BLOCK, send_order(team, ROWS), team)
        wl.lamport_store(row[:, None] + tl.arange(0, BLOCK)[None, :], rows, mask)
        # Between send and receive, where there is time: the stage of the epoch before.
        wl.lamport_clear(slot + ((epoch + 2) % 3) * (world * BLOCK) + here, mask)
        return wl.lamport_load(stage + here, mask, team)
    else:
        tl.static_assert(TRANSPORT == "signals", "exchange: TRANSPORT must be 'lamport' or 'signals'")
        stage = slot + (epoch & 1) * (world * BLOCK)
        row = wl.symm_at(stage + me * BLOCK, send_order(team, ROWS), team)
        tl.store(row[:, None] + tl.arange(0, BLOCK)[None, :], rows, mask=mask)
        for step in tl.static_range(world):
            wl.notify(arrived + me, (me + 1 + step) % world, epoch, team)
        for peer in tl.static_range(world):
            wl.wait(arrived + peer, epoch, team)
        return tl.load(stage + here, mask=mask, other=0)


@triton.jit
def keep_epoch(epochs, epoch, TRANSPORT: tl.constexpr):
    """At a program's end: ``epoch`` exchanges have ended. Lamport needs them modulo 3 only, and must never wrap
    elsewhere."""
    tl.debug_barrier()  # all threads have read the word before it changes
    if TRANSPORT == "lamport":
        tl.store(epochs + tl.program_id(0), epoch % 3)
    else:
        tl.store(epochs + tl.program_id(0), epoch)


@triton.jit
def sum_of_ranks(received, dtype: tl.constexpr):
    """[ROWS, BLOCK] -> [BLOCK]: summed over the ranks in fp32, in an order that is the same on all of them, rounded
    once."""
    return tl.sum(received.to(tl.float32), axis=0).to(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """The workspace of one transport, shared by all collectives of a team.

    buffer   uint8 [programs, stages, W, row_bytes], symmetric
    arrived  int32 [programs, W], symmetric: epochs that have arrived, by sender (unused by lamport)
    epochs   int32 [programs]: exchanges that have ended
    """

    buffer: torch.Tensor
    arrived: torch.Tensor
    epochs: torch.Tensor
    programs: int
    row_bytes: int
    num_warps: int


def lamport_slots(team: Team, itemsize: int) -> Slots:
    """For elements of 2 (fp16, bf16) or 4 (fp32) bytes. 1024 programs move 1 MiB of rows to each rank in one round."""
    stages = 3

    def make() -> Slots:
        programs = min([1024, *team.exchange(team.max_programs(LAMPORT_WARPS, MAX_REGISTERS))])
        buffer = team.empty((programs, stages, team.size, LAMPORT_ROW_BYTES), torch.uint8)
        word, bits = UNWRITTEN[itemsize]
        buffer.view(word).fill_(bits)
        return _slots(team, buffer, LAMPORT_WARPS)

    return team.workspace(("exchange", "lamport", itemsize), make)


def signal_slots(team: Team) -> Slots:
    """For elements of any size. 512 programs move 8 MiB in one round."""
    stages = 2
    row_bytes = SIGNALS_TILE_BYTES // triton.next_power_of_2(team.size)

    def make() -> Slots:
        programs = min([512, *team.exchange(team.max_programs(SIGNALS_WARPS, MAX_REGISTERS))])
        return _slots(team, team.empty((programs, stages, team.size, row_bytes), torch.uint8), SIGNALS_WARPS)

    return team.workspace(("exchange", "signals"), make)


def _slots(team: Team, buffer: torch.Tensor, num_warps: int) -> Slots:
    programs, row_bytes = buffer.shape[0], buffer.shape[3]
    arrived = team.signals((programs, team.size))
    epochs = team.local((programs,), torch.int32)
    team.barrier()  # nobody writes into a peer's buffer before the peer has cleared it
    return Slots(
        buffer=buffer, arrived=arrived, epochs=epochs, programs=programs, row_bytes=row_bytes, num_warps=num_warps
    )
