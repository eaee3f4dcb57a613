"""All-reduce whose sums are made by the switch: NVLink multicast, where ``team.caps.multicast``.

multimem_one_shot   x tile -> staging, barrier, each rank loads the sum of all stagings          1 barrier a tile
multimem_two_shot   x tile -> staging, barrier, rank s loads the sum of part s and stores it
                    to all ranks, barrier, staging -> out                                        2 barriers a tile

A byte leaves each rank once for its sum, and once more in two-shot for the ranks to have it, whatever W is. The plan never
chooses them: they have never run on a GPU, and a switch promises no order of its additions, so that one-shot's results may
differ between ranks in their last bits. As in torch's multimem kernels (CUDASymmetricMemoryOps.cu) all accesses are relaxed,
between barriers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.ops.knobs import design_type
from weft.plan.planned import Machine
from weft.runtime.arithmetic import cdiv
from weft.runtime.team.team import Team

WORD_BYTES = 16  # one multimem access
WARPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Multimem:
    """Sums made by the switch.

    words     16-byte words whose sums a rank loads for a tile
    programs  most programs of the grid
    """

    words: int
    programs: int = 64


@design_type
class MultimemOneShot(Multimem):
    """Every rank loads the sums of all elements from the switch."""

    words: int = 256


@design_type
class MultimemTwoShot(Multimem):
    """Every rank loads the sums of its part of a tile from the switch, and stores them to all ranks."""

    words: int = 128


DESIGNS = {"multimem_one_shot": MultimemOneShot, "multimem_two_shot": MultimemTwoShot}


def check(design: str, machine: Machine) -> None:
    """ValueError if the design of this name needs multicast and ``machine`` has none."""
    if design in DESIGNS and not machine.caps.multicast:
        raise ValueError(
            f"all_reduce: algorithm={design!r} needs NVLink multicast, which this team lacks (team.caps.multicast); "
            f"pass 'auto'"
        )


@triton.jit
def multimem_all_reduce_kernel(
    x,  # [n], fp16, bf16 or fp32
    out,  # [n], with room for n rounded up to whole words
    n,
    staging,  # [programs, 2, TILE] symmetric, in x's dtype
    turns,  # [programs] int32: which of the two buffers one-shot's next tile takes
    team,
    WORDS: tl.constexpr,
    TWO_SHOT: tl.constexpr,
):
    """out = sum over ranks of x

    grid     (programs,), all resident, the same number on all ranks; each over every programs-th tile
    tile     WORDS words of 16 bytes in one-shot, W times that in two-shot
    order    a barrier of the programs of one number orders what they staged before what the peers load after it

    one-shot   | stage 0 | barrier | load sums 0 | stage 1 | barrier | load sums 1 | ...
    two-shot   | stage parts 0 | barrier | load sums of my part, store to all | barrier | sums to out | stage parts 1 | ...

    reuse    one-shot takes two buffers in turn: a rank that stages tile t + 2 has passed the barrier of tile t + 1, which its
             peers reach after they have loaded tile t. Two-shot stages into one and gets sums in the other: peers load the
             parts before the second barrier, and store the next sums after the next first one, which this rank reaches after
             it has read the last.
    """
    program = tl.program_id(0)
    EACH: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth  # elements of a word
    PARTS: tl.constexpr = wl.num_ranks(team) if TWO_SHOT else 1
    TILE: tl.constexpr = PARTS * WORDS * EACH
    end = tl.cast(n, tl.int64)
    elements, words = tl.arange(0, WORDS * EACH), tl.arange(0, WORDS)
    every = words < WORDS
    buffers = staging + tl.cast(program, tl.int64) * (2 * TILE)
    turn = tl.load(turns + program)
    for tile in range(program, tl.cast(tl.cdiv(end, TILE), tl.int32), tl.num_programs(0)):
        start = tl.cast(tile, tl.int64) * TILE
        staged = buffers if TWO_SHOT else buffers + turn * TILE
        for part in range(PARTS):
            at = part * (WORDS * EACH) + elements
            tl.store(staged + at, tl.load(x + start + at, mask=start + at < end, other=0))
        wl.barrier(team)
        if TWO_SHOT:
            own_part = (wl.rank(team) * WORDS + words) * EACH
            wl.multimem_store(
                buffers + TILE + own_part, wl.multimem_load_reduce(staged + own_part, every, team), every, team
            )
            wl.barrier(team)
            for part in range(PARTS):
                at = part * (WORDS * EACH) + elements
                tl.store(out + start + at, tl.load(buffers + TILE + at), mask=start + at < end)
        else:
            sums = wl.multimem_load_reduce(staged + words * EACH, every, team)
            target = (out + start + words * EACH).to(tl.pointer_type(tl.int32), bitcast=True)
            inside = start + words * EACH < end
            for word in tl.static_range(4):
                tl.store(target + word, sums[word], mask=inside)
            turn = 1 - turn
    tl.debug_barrier()  # all threads have read it before it changes
    tl.store(turns + program, turn)


def all_reduce(x: torch.Tensor, team: Team, design: Multimem) -> torch.Tensor:
    """Sum of all ranks' ``x``, contiguous and not empty: a new tensor of its shape."""
    two_shot = isinstance(design, MultimemTwoShot)
    tile = design.words * WORD_BYTES * (team.size if two_shot else 1)
    each = WORD_BYTES // x.itemsize
    most = min(design.programs, team.max_programs(WARPS))
    programs = min(most, cdiv(x.nbytes, tile))
    staging, turns = team.workspace(
        ("multimem", design, x.dtype),
        lambda: (team.empty((most, 2, tile // x.itemsize), dtype=x.dtype), team.local((most,), torch.int32)),
    )
    out = torch.empty(cdiv(x.numel(), each) * each, dtype=x.dtype, device=x.device)
    multimem_all_reduce_kernel[(programs,)](
        x, out, x.numel(), staging, turns, team.view, WORDS=design.words, TWO_SHOT=two_shot,
        num_warps=WARPS, launch_cooperative_grid=True,
    )  # fmt: skip
    return out[: x.numel()].view(x.shape)
