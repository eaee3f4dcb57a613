"""Decode steps in flight over stages: a group of batch slots a stage, and no wait for a step's end.

    groups a, b of steps 1, 2, …       turn t of stage s: group (t - s) mod P, of P stages
    stage 0 | a1 | b1 | a2 | b2 | a3
    stage 1      | a1 | b1 | a2 | b2   behind its turn the last stage sends the group's tokens to all others

A group's tokens come to stage s behind its turn with the group P - 1 - s later: to stage 0 just before the group's next turn.
So P - 1 - s groups of a step are under way to it once its turns are launched. They come in the turns of the next step, if that
one continues it, or else by ``Runner.settle``.

order  behind the turns t of all stages: tokens from the last stage, then hidden states, those of the higher stages first. It
       is the order of weft.engine.pipeline's pieces, so no two ranks wait for each other
slots  slot i is of group i mod P: groups of a batch differ by one sequence at most
"""

from __future__ import annotations

from typing import NamedTuple

import torch

# Bytes of memory that an H200 reads in the 20 us until a rail's piece has begun.
CROSSING_BYTES = 80 << 20
# Steps in flight that end, since prompts are read, have cost P - 1 turns more, mostly of reading weights. With keys and values
# of this share of the weights' bytes, some eight steps between two prompts pay for that.
FEWEST_OF_WEIGHTS = 1 / 8


class Turn(NamedTuple):
    """Turn of a stage in a decode step: its layers for a group, then the tokens of another one.

    batch     slots of the step
    group     whose layers are computed
    arriving  group whose tokens come from the last stage; None: of no group, in a step that follows none, and on the last
              stage, which has them
    """

    batch: int
    group: int
    arriving: int | None


def slots_of(group: int, batch: int, stages: int) -> slice:
    """Slots of a group, of the first `batch` ones."""
    return slice(group, batch, stages)


def rows_of(x: torch.Tensor, slots: slice) -> torch.Tensor:
    """Rows of these slots, contiguous: `x` itself for the first slots, a copy for a group.

    Also a copy of one row, since kernels are compiled for pointers of 16 bytes.
    """
    return x[slots] if slots.step is None else x[slots].clone(memory_format=torch.contiguous_format)


def turns_of(stage: int, stages: int, batch: int, *, continued: bool) -> list[Turn]:
    """Turns of a decode step on a stage; `continued`: tokens of the step before are under way to it."""
    behind, turns = stages - 1 - stage, []
    for group in range(stages):
        arriving = group - behind
        comes = behind > 0 and (arriving >= 0 or continued)
        turns.append(Turn(batch, group, arriving % stages if comes else None))
    return turns


def pays(stages: int, read_bytes: int, weight_bytes: int) -> bool:
    """True if a decode step takes less time in groups than as one pass, by the bytes a stage reads.

    read_bytes  keys and values of all sequences. Weights are read once a pass, or once a group: P turns either way

    As one pass a step takes P turns of w + r, weights and reads; in groups P of w + r / P and 2 (P - 1) crossings.
    """
    return read_bytes >= max(2 * (stages - 1) * CROSSING_BYTES, weight_bytes * FEWEST_OF_WEIGHTS)
