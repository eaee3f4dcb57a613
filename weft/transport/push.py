"""Push transport: an exchange of one tile between all ranks, in registers; collectives consist of it.

    received[s] = what rank s sent me      rows, received: [ROWS, BLOCK], ROWS = world size rounded to a power of two

An all-gather exchanges W copies of a tile, an all-to-all W different ones, a reduce-scatter sums what it received, a
one-shot all-reduce sums W copies, a two-shot all-reduce exchanges, sums and exchanges again. A rank's own row stays in
its registers. An exchange has two halves, ``send`` and ``receive``; between them a program loads and sends its
next tile, so that the links are busy while it waits.

Each program owns a *slot* of the workspace (its receive buffers) and counts its sends in device memory: its epoch. Program p of
a rank exchanges only with the programs p of its peers, and all ranks make the same calls with the same sizes, so
epoch e of slot p means the same exchange everywhere, whatever the sizes of the calls before: a smaller call uses
fewer slots, and the epochs of further programs stand still.

    slot     stages[e % S] is [W, WIDTH]: row s is written by rank s; S = stages_of(bytes of a row), at least 6
    lamport  numbers are their own flag (weft.language.lamport): one hop over the link, no fence; -0.0 arrives as +0.0
    keyed    the same for any bits: int words XOR a key for which none of the tile reads as unwritten; W keys follow the rows
    fp8      int words of four e4m3 each, none of which reads as unwritten; W rows of scales follow (weft.transport.fp8_push)

Flags after the data (``notify``, ``wait``) would cost a fence and a second hop: an all-gather of 64 MiB took 142 us with them
and 108 with keyed (H200, W=2).

Signals: rank s writes row s of stage e at every other rank; each rank waits for the rows of its peers.

Reuse. A stage may be overwritten once its reader has cleared it. A program sends epoch k into the stage of epoch k - S, so the
peer must have cleared k - S by then. A ``receive`` clears what the ``receive`` before it read, and if ``ordered`` returns only
when that is in memory (``lamport_receive``). S = 6 suffices, and so does more, for each order of sends (s) and receives (r):

    in turns   s0 r0 s1 r1 s2 ...
               Before we send k we received k - 1. The peer sent k - 1 only after receiving k - 2, and that receive cleared
               k - 3: all up to k - 3 are cleared.
    one ahead  s0 s1 r0 s2 r1 s3 ...
               Before we send k we received k - 2. The peer sent k - 2 only after receiving k - 4, and that receive cleared
               k - 5: all up to k - 5 are cleared.
    two shots  sA0 sA1 rA0 sB0 rB0 sA2 rA1 sB1 rB1 ...      epochs count the sends: A(t) = 2t - 1, but A0 = 0; B(t) = 2t + 2
               Before we send A(t) = k we received B(t-2) = k - 1. The peer sent it only after receiving A(t-2) = k - 4, and
               had then cleared B(t-3) = k - 3 and A(t-3) = k - 6, and what is older of both: all up to k - 5 are cleared.
               Before we send B(t) = k we received A(t) = k - 3. The peer sent it only after receiving B(t-2) = k - 4, and
               had then cleared A(t-2) = k - 7 and B(t-3) = k - 6, and what is older of both: all up to k - 6 are cleared.
               (The last B has a number less, as no A goes before it; the distances to it are then less by one as well.)

A launch begins with at most two sends; its first one comes after the last receive of the launch before, which is the
last epoch in all three orders. Whole rows are written in every epoch (beyond ragged edges with zeros) and whole rows
are cleared, so no size leaves a rest.

A launch of at most S - 3 epochs, a .. a + n - 1, need not see its clearings in memory (``clears_in_order``): they are there
when it ends, before this rank's next launch sends anything. They clear a - 1 and later epochs, which peers write over in epoch
a - 1 + S >= a + n + 2 or later. That lies beyond the two that a peer may send in its next launch without having received
anything in it, so it comes after words that this rank sent in its next launch. Looking costs a round trip to memory for each
tile, in line after the stores to peers: 4 to 14 % of an all-gather of 4 to 32 MiB at W=2.

Progress. All programs of a grid are resident: there are no more than fit (``launch``). A send does not wait, and each
program makes its exchanges in order without waiting for another program of its rank. Kernels that share the slots are
ordered by one stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.kernels.fp8_words import WORDS
from weft.runtime.arithmetic import next_power_of_2
from weft.runtime.capabilities import launch_options
from weft.runtime.launching import Launch
from weft.runtime.team.team import Team
from weft.transport.plans import PushPlan
from weft.triton_api import JITFunction

# Stages of a slot: of narrow rows, whose launches have one exchange or two a program, and of wide rows, for large messages. An
# all-gather of 64 MiB takes 107 us with 7 stages of wide rows and 101 with 19 (two H200s; lab/h200-x2-stages.json@4c5a438).
# With seven, a launch of at most three tiles a program needs no read-back: the end of the kernel completes the clears first. An
# all-gather of 16 MiB takes 28.2 us so, 31.7 with six (the same file).
STAGES: tl.constexpr = tl.constexpr(7)
WIDE_STAGES: tl.constexpr = tl.constexpr(19)
WIDE_BYTES: tl.constexpr = tl.constexpr(4096)
KEY_BYTES: tl.constexpr = tl.constexpr(16)
# Keys take whole lines of memory, as the rows of all plans do: so every row of every stage begins on a line, and a warp's
# stores to a peer fill whole packets.
LINE_BYTES: tl.constexpr = tl.constexpr(128)
UNWRITTEN = {2: (torch.int16, -(2**15)), 4: (torch.int32, -(2**31))}  # the bits of -0.0 by item size


@triton.jit
def send_order(team, ROWS: tl.constexpr):
    """Receiver of each row, [ROWS] int32, this rank last; rotated, so that not all write to rank 0 first."""
    return (wl.rank(team) + 1 + tl.arange(0, ROWS)) % wl.num_ranks(team)


@triton.jit
def is_rank(team, ROWS: tl.constexpr):
    """Mask [ROWS, 1] of rows that stand for a rank; there are more if W is not a power of two."""
    return tl.arange(0, ROWS)[:, None] < wl.num_ranks(team)


@triton.jit
def is_sent(team, ROWS: tl.constexpr):
    """Mask [ROWS, 1] of rows in ``send_order`` that leave this rank."""
    return tl.arange(0, ROWS)[:, None] < wl.num_ranks(team) - 1


@triton.jit
def count_tiles(length, TILE: tl.constexpr):
    """Number of tiles in ``length`` elements, int32; ``length`` is int64, since ``cdiv`` may pass 2**31."""
    return tl.cast(tl.cdiv(length, TILE), tl.int32)


@triton.jit
def tile_rest(length, start, TILE: tl.constexpr):
    """Number of the TILE elements from ``start`` (int64) that lie before ``length``, int32.

    In 32 bits, so that masks take few registers.
    """
    return tl.cast(tl.minimum(length - start, TILE), tl.int32)


@triton.constexpr_function
def key_bytes(transport, world_size, row_bytes):
    """Bytes of keys, or of scales, after the rows of a stage; also for the host."""
    if transport == "lamport":
        return 0
    line, of_row = LINE_BYTES.value, KEY_BYTES.value if transport == "keyed" else row_bytes // WORDS.value
    return -(-world_size * of_row // line) * line


@triton.constexpr_function
def stages_of(row_bytes):
    """Number of stages of a slot with rows of ``row_bytes``; also for the host."""
    return WIDE_STAGES.value if row_bytes >= WIDE_BYTES.value else STAGES.value


@triton.constexpr_function
def row_bytes_of(dtype, width):
    return width * (dtype.primitive_bitwidth // 8)


@triton.constexpr_function
def stage_words(dtype, width, transport, world_size):
    """Elements of a stage."""
    item = dtype.primitive_bitwidth // 8
    return world_size * width + key_bytes(transport, world_size, width * item) // item


@triton.constexpr_function
def key_words(dtype):
    """Elements from one key to the next."""
    return KEY_BYTES.value // (dtype.primitive_bitwidth // 8)


@triton.jit
def my_slot(buffer, WIDTH: tl.constexpr, TRANSPORT: tl.constexpr, team):
    """This program's slot of ``buffer``: pointer to its stages."""
    STAGE: tl.constexpr = stage_words(buffer.dtype.element_ty, WIDTH, TRANSPORT, wl.num_ranks(team))
    SLOT: tl.constexpr = stages_of(row_bytes_of(buffer.dtype.element_ty, WIDTH)) * STAGE
    return buffer + tl.program_id(0) * SLOT


@triton.jit
def find_key(rows):
    """Smallest key for which no int word of ``rows`` XOR key reads as unwritten.

    There is one, since a tile has fewer int words than there are keys.
    """
    dtype: tl.constexpr = rows.dtype
    UNWRITTEN_WORD: tl.constexpr = -(2 ** (dtype.primitive_bitwidth - 1))
    key = tl.full((), 0, dtype)
    while tl.max(tl.max(((rows ^ key) == UNWRITTEN_WORD).to(tl.int32), axis=1), axis=0) > 0:
        key = (key + 1).to(dtype)
    return key


@triton.jit
def send(rows, slot, epoch, team, TRANSPORT: tl.constexpr, WIDTH: tl.constexpr):
    """Send row i of ``rows`` [ROWS, BLOCK] to ``send_order(team)[i]``, without waiting.

    ``slot``: ``my_slot``, of the dtype of ``rows``. ``epoch``: number of sends of this program, this one included.
    ``WIDTH``: columns that are sent, the same in every call that shares the slot. The programs of this id on all ranks call
    it the same number of times. See the module for order and reuse.
    """
    ROWS: tl.constexpr = rows.shape[0]
    BLOCK: tl.constexpr = rows.shape[1]
    world: tl.constexpr = wl.num_ranks(team)
    STAGE: tl.constexpr = stage_words(rows.dtype, WIDTH, TRANSPORT, world)
    KEY: tl.constexpr = key_words(rows.dtype)
    OF_SLOT: tl.constexpr = stages_of(row_bytes_of(rows.dtype, WIDTH))
    columns = tl.arange(0, BLOCK)
    inside = is_sent(team, ROWS) & (columns < WIDTH)[None, :]
    began = wl.begin_put(team)
    words = slot + (epoch % OF_SLOT) * STAGE
    stage = wl.symm_at(words, send_order(team, ROWS), team)[:, None]
    row = stage + wl.rank(team) * WIDTH + columns[None, :]
    if TRANSPORT == "keyed":
        key = find_key(rows)
        wl.lamport_store(row, rows ^ key, inside)
        place = stage + (world * WIDTH + wl.rank(team) * KEY)
        wl.lamport_store(place, key + tl.zeros([ROWS, 1], rows.dtype), is_sent(team, ROWS))
    else:
        tl.static_assert(TRANSPORT == "lamport", "send: TRANSPORT must be 'lamport' or 'keyed'")
        wl.lamport_store(row, rows, inside)
    wl.end_put(began, words, (world - 1) * row_bytes_of(rows.dtype, WIDTH), wl.rank(team), team)


@triton.jit
def clears_in_order(slot, exchanges, WIDTH: tl.constexpr):
    """True if a launch with ``exchanges`` per program must poll until its clearings are visible."""
    return exchanges > stages_of(row_bytes_of(slot.dtype.element_ty, WIDTH)) - 3


@triton.jit
def receive(own, slot, epoch, before, team, ordered, ROWS: tl.constexpr, TRANSPORT: tl.constexpr, WIDTH: tl.constexpr):
    """Receive [ROWS, BLOCK]: row s from rank s, with ``own`` [BLOCK] as this rank's row.

    Rows beyond W and columns from WIDTH on are 0. ``epoch``: that of its ``send``. ``before``: the epoch that this program
    received before it, cleared when this returns, or, unless ``ordered`` (clears_in_order), when the launch ends.
    """
    BLOCK: tl.constexpr = own.shape[0]
    world: tl.constexpr = wl.num_ranks(team)
    STAGE: tl.constexpr = stage_words(own.dtype, WIDTH, TRANSPORT, world)
    OF_SLOT: tl.constexpr = stages_of(row_bytes_of(own.dtype, WIDTH))
    me = wl.rank(team)
    ranks, columns = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    from_others = (ranks < world) & (ranks != me)
    there = from_others[:, None] & (columns < WIDTH)[None, :]
    here = (ranks * WIDTH)[:, None] + columns[None, :]
    stage = slot + (epoch % OF_SLOT) * STAGE
    old = slot + ((before + OF_SLOT) % OF_SLOT) * STAGE
    if TRANSPORT == "keyed":
        keys = world * WIDTH + ranks * key_words(own.dtype)
        received, key = wl.lamport_receive_keyed(
            stage + here, old + here, there, stage + keys, old + keys, from_others, team, ordered, stage
        )
        received ^= key[:, None]
    else:
        received = wl.lamport_receive(stage + here, old + here, there, team, ordered, stage)
    return tl.where((ranks == me)[:, None], own[None, :], received)


@triton.jit
def keep_epoch(epochs, epoch):
    """Store ``epoch``, the tiles that a program has sent and received, at its end.

    Stored modulo the stages, so that it never wraps elsewhere.
    """
    tl.debug_barrier()  # all threads have read it before it changes
    tl.store(epochs + tl.program_id(0), epoch % (STAGES * WIDE_STAGES))


@triton.jit
def sum_of_ranks(received):
    """Sum of [ROWS, BLOCK] over the ranks, [BLOCK] fp32, in an order that is the same on all ranks."""
    return tl.sum(received.to(tl.float32), axis=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """Workspace of one plan and item size, shared by all collectives of a team that use it.

    buffer     uint8 [programs * stages * (W * row_bytes + keys)], symmetric
    epochs     int32 [programs]: tiles that each has sent, modulo the stages of all plans
    registers  most registers of a thread for which all ``programs`` are resident
    """

    buffer: torch.Tensor
    epochs: torch.Tensor
    programs: int
    registers: int


def slots_of(team: Team, plan: PushPlan, itemsize: int) -> Slots:
    """The team's slots for a plan and item size. Collective at the first call, which makes them."""

    def make() -> Slots:
        registers = registers_of(plan, team.size)
        resident = min(team.max_programs(plan.num_warps, registers), plan.programs_per_sm * team.caps.sms)
        programs = min(team.exchange(resident))
        stage = team.size * plan.row_bytes + key_bytes(plan.transport, team.size, plan.row_bytes)
        buffer = team.empty((programs * stages_of(plan.row_bytes) * stage,), torch.uint8, name="pushed words")
        word, bits = UNWRITTEN[itemsize]
        buffer.view(word).fill_(bits)
        epochs = team.local((programs,), torch.int32)
        team.barrier()  # no rank writes into a peer's buffer before the peer has cleared it
        return Slots(buffer=buffer, epochs=epochs, programs=programs, registers=registers)

    return team.workspace(("exchange", plan, itemsize), make)


def registers_of(plan: PushPlan, world_size: int) -> int:
    """Most registers of a thread: as many as whole tiles need (sm_90).

    Ragged sizes would take up to 250, and then not all programs are resident; with this bound they spill.
    """
    threads = 32 * plan.num_warps * plan.programs_per_sm
    if plan.num_warps == 1 and threads * 168 <= 65536:
        return 168
    if threads * 128 <= 65536:
        return 128
    tile = next_power_of_2(world_size) * next_power_of_2(plan.row_bytes) // (32 * plan.num_warps)
    if plan.transport == "fp8":
        return 64 if tile <= 16 else 128  # four columns a word, in fp32
    return 64 if tile <= 32 else 80 if tile <= 64 else 128


def prepare(
    kernel: JITFunction, n: int, tiles: int, dtype: torch.dtype, team: Team, plan: PushPlan, **constants: object
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """``launch`` of a kernel without further arguments, as a function of x and out of one size."""
    prepared = _prepared(kernel, team, plan, dtype, constants)
    return prepared.launch.of_pair(min(tiles, prepared.programs), n)


def launch(
    kernel: JITFunction,
    x: torch.Tensor | tuple,
    out: torch.Tensor,
    n: int,
    tiles: int,
    team: Team,
    plan: PushPlan,
    *arguments: object,
    **constants: object,
) -> None:
    """Run a push kernel with a program for each of ``tiles``, or as many as can be resident.

    The call is ``kernel(x, out, n, buffer, epochs, team, *arguments, BLOCK, ROWS, TRANSPORT, ...)``. Elements are sent in the
    dtype of ``out``, in the "fp8" transport as int words. A kernel sends PART elements to a peer at once, or BLOCK if it has no
    such constant. ValueError if these are not ``plan.row_bytes``.

    All programs are resident, by ``team.max_programs``: they end without later kernels, which start only when all
    of these run, and kernels beside or before them end by themselves. It is no cooperative launch, by which the driver would
    refuse more: that starts 1 us later (H200).
    """
    dtype = torch.int32 if plan.transport == "fp8" else out.dtype
    prepared = _prepared(kernel, team, plan, dtype, constants)
    prepared.launch(min(tiles, prepared.programs), x, out, n, *arguments)


def _prepared(
    kernel: JITFunction, team: Team, plan: PushPlan, dtype: torch.dtype, constants: dict[str, Any]
) -> Prepared:
    known = team.workspace("pushes", dict)
    key = kernel.__name__, plan, dtype, team.is_traced, *constants.values()
    prepared = known.get(key)
    if prepared is None:
        prepared = known[key] = Prepared.make(kernel, team, plan, dtype, constants)
    return prepared


@dataclass(frozen=True, slots=True)
class Prepared:
    """Parts of a launch that depend on no tensor: the kernel, and the slots in the dtype that is sent.

    programs  number that can be resident
    block     elements that are sent to a peer at once
    """

    launch: Launch
    programs: int
    block: int

    @classmethod
    def make(
        cls,
        kernel: JITFunction,
        team: Team,
        plan: PushPlan,
        dtype: torch.dtype,
        constants: dict[str, Any],
        fixed: tuple = (),
    ) -> Prepared:
        """fixed: arguments of every launch after the team's view."""
        itemsize = max(2, dtype.itemsize)  # single bytes are sent widened to two
        sent = 1 if plan.transport == "fp8" else itemsize
        block = next_power_of_2(plan.row_bytes // sent)
        if constants.get("PART", block) * sent != plan.row_bytes:
            raise ValueError(
                f"row_bytes={plan.row_bytes} is not a power of two: {block * sent} bytes would go to a peer at once, more "
                f"than the workspace holds; pass {block * sent}"
            )
        slots = slots_of(team, plan, itemsize)
        switches = {"BLOCK": block, "ROWS": next_power_of_2(team.size), "TRANSPORT": plan.transport, **constants}
        options = {"num_warps": plan.num_warps, **target_options(team, slots.registers)}
        if plan.transport == "fp8":
            # A value times its scale is rounded before it is added, as in the simulator: a sum has one result.
            options["enable_fp_fusion"] = False
        buffer = slots.buffer.view(dtype if dtype.itemsize == itemsize else torch.int16)
        return cls(
            Launch(kernel, switches | options, (buffer, slots.epochs, team.view, *fixed), before=3),
            slots.programs,
            block,
        )


def target_options(team: Team, registers: int) -> dict[str, int | bool]:
    """Launch options by target: a bound on registers, and the options of ``wl.follow_previous_kernel``."""
    bound = {"maxnreg": registers} if team.caps.arch.startswith("sm_") else {}
    return bound | launch_options(team.caps)
