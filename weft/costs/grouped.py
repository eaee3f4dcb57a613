"""Grouped GEMMs of a mixture of experts, alone and with the exchange of rows: µs by design.

Tokens choose alike among all experts.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from weft.costs import exchanges, gemms
from weft.costs.fitted import Fitted, FourBit
from weft.costs.gpu import Gpu
from weft.runtime.arithmetic import cdiv

# Columns of a tile, blocks of pairs, and slabs.
COLUMNS, BLOCKS, SLABS = 256, (16, 32, 64, 128), 4
# Columns of K under a scale of fp8; pairs of a tile that are few.
STEP, FEW_PAIRS = 128, 32
# Rows of a weight in 4 bits in a tile of few pairs, which converts it: of each of gate, up or down.
FOUR_BIT_ROWS = 64
# Start and end of such a tile, and the first tile's wait for its weights, µs.
FOUR_BIT_TILE, FOUR_BIT_FILL = 0.3, 2.5


class Experts(NamedTuple):
    """Experts of one layer.

    tokens  that a rank sees: all ranks' together, where rows are gathered
    held    experts of a rank, of ``experts``; item, weight: bytes of an element of rows and of weights
    ranks   that hold the other experts, and wait for the one with the most chosen ones; 1: there are none
    sent    bytes of an element of rows on their way to the experts
    fp8     rows and weights are in fp8
    """

    tokens: int
    choices: int
    experts: int
    held: int
    hidden: int
    features: int
    item: int = 2
    weight: float = 2.0
    ranks: int = 1
    sent: float = 2.0
    fp8: bool = False

    @property
    def pairs(self) -> float:
        """Tokens and choices that a rank computes."""
        return self.tokens * self.choices * self.held / self.experts

    def matrix(self, gated: bool) -> tuple[int, int]:
        """(N, K) of an expert's gate and up together, or of its down."""
        return (2 * self.features, self.hidden) if gated else (self.hidden, self.features)

    @property
    def hit(self) -> float:
        """Experts that a token chose, of the rank that holds the most such ones."""
        share = 1 - (1 - self.choices / self.experts) ** self.tokens
        mean = self.held * share
        if self.ranks == 1:
            return mean
        # By drawing, within 4 %: of 8 choices of a token 5.1 are on the fuller one of two ranks, 3.5 on the fullest of four.
        deviation = math.sqrt(mean * (1 - share) * (1 - 1 / self.ranks))
        return min(self.held, mean + 0.78 * math.log2(self.ranks) ** 0.68 * deviation)


def grouped(gpu: Gpu, fitted: Fitted, experts: Experts, N: int, K: int) -> float:
    """Grouped GEMM [pairs, K] @ [held, N, K] of a rank."""
    of, block = fitted.grouped, block_of(experts)
    tile = block * COLUMNS * K * 2 * gpu.sms / gpu.flops * of.expert
    moved = experts.hit * N * K * experts.weight + experts.pairs * (K + N) * experts.item
    return of.call + max(waves(gpu, experts, N, COLUMNS) * tile, moved / (of.weights * gpu.memory))


def in_fp8(gpu: Gpu, fitted: Fitted, experts: Experts, gated: bool) -> float:
    """``grouped`` in fp8.

    With few pairs the memory reads the weights, after one tile has waited for the scales of its steps, each loaded one step
    ahead; with more pairs tiles multiply.
    """
    of, (N, K) = fitted.fp8_experts, experts.matrix(gated)
    results = experts.pairs * N * (1 if gated else experts.item)
    read = (experts.hit * N * K + experts.pairs * K + results) / (fitted.grouped.weights * gpu.memory)
    if has_few_pairs(experts):
        return gpu.launch + cdiv(K, STEP) * of.step + read
    rows = fp8_rows(gated, block_of(experts))
    multiplied = block_of(experts) * rows * K * gpu.sms / gpu.flops * of.expert
    return gpu.launch + max(read, waves(gpu, experts, N, rows) * (multiplied + of.tile))


def fp8_rows(gated: bool, block: int) -> int:
    """Rows of a weight in fp8 by which an SM multiplies ``block`` pairs, many, at a time.

    As ``weft.ops.moe.grouped.rule`` has them.
    """
    return 256 if gated or block == 64 else 128


def has_few_pairs(experts: Experts) -> bool:
    """True for tiles of so few pairs that each has weights to wait for."""
    return block_of(experts) <= FEW_PAIRS


def block_of(experts: Experts) -> int:
    """Pairs of a tile at most."""
    return block_for(experts.tokens * experts.choices, experts.experts)


def block_for(pairs: int, experts: int) -> int:
    """Pairs of a tile: 16 where an expert has about 8 or fewer, for which more rows only take longer.

    8 tokens of Qwen3-30B-A3B on an H200, half of it: tiles of 32 pairs take 3 to 23 % longer than of 16, of 64 5 to 54 %; from
    256 pairs an expert on, tiles of 128 are the fastest.
    """
    mean = pairs / experts
    return next((block for block in BLOCKS[:-1] if 2 * mean <= block), BLOCKS[-1])


def waves(gpu: Gpu, experts: Experts, N: int, columns: int) -> int:
    """Tiles of ``columns``, of N, that an SM computes one after the other."""
    return cdiv(math.ceil(row_tiles(experts)) * cdiv(N, columns), gpu.sms)


def row_tiles(experts: Experts) -> float:
    """Tiles of pairs: an expert of more than a block has a last one that is half full in the mean."""
    return max(experts.hit, experts.pairs / block_of(experts) + experts.hit / 2)


def four_bit(gpu: Gpu, fitted: Fitted, of: FourBit, experts: Experts, gated: bool) -> float:
    """``grouped`` of weights in 4 bits, converted in tiles of few pairs and before the GEMM of more."""
    N, K = experts.matrix(gated)
    if not has_few_pairs(experts):
        return widened(gpu, of, experts, N, K) + grouped(
            gpu, fitted, experts._replace(weight=float(experts.item)), N, K
        )
    columns = FOUR_BIT_ROWS * (2 if gated else 1)
    # Tiles of an SM convert beside each other, and its programs take the next one when they are done; the last one is alone.
    rounds = row_tiles(experts) * cdiv(N, columns) / gpu.sms
    tiles = (rounds + min(rounds, 1.0)) * (FOUR_BIT_TILE + columns * K / of.experts)
    return fitted.grouped.call + FOUR_BIT_FILL + tiles


def widened(gpu: Gpu, of: FourBit, experts: Experts, N: int, K: int) -> float:
    """Kernel that writes all experts' weights [N, K] in 16 bits."""
    numbers = experts.held * N * K
    return gemms.widened(gpu, of, numbers * experts.weight, numbers)


def gate_up(gpu: Gpu, fitted: Fitted, experts: Experts) -> float:
    """With gate and up, and their product."""
    return _alone(gpu, fitted, experts, gated=True)


def down(gpu: Gpu, fitted: Fitted, experts: Experts) -> float:
    """With down."""
    return _alone(gpu, fitted, experts, gated=False)


def _alone(gpu: Gpu, fitted: Fitted, experts: Experts, gated: bool) -> float:
    if experts.fp8:
        return in_fp8(gpu, fitted, experts, gated)
    return grouped(gpu, fitted, experts, *experts.matrix(gated))


def schedule(gpu: Gpu, tokens: int) -> float:
    """moe_schedule of a rank's tokens."""
    return gpu.launch + 1.8 + tokens * 1.3e-3


# Bytes of all ranks' rows up to which an AG-MoE gathers them first.
SEQUENTIAL_BYTES = 4 << 20


def gathers_first(experts: Experts) -> bool:
    """True if an AG-MoE of all ranks' tokens is sequential by plan."""
    return experts.tokens * experts.hidden * experts.sent <= SEQUENTIAL_BYTES


def ag_moe(gpu: Gpu, fitted: Fitted, experts: Experts, world_size: int) -> dict[str, float]:
    """Rows of all ranks, and their grouped GEMM with gate and up.

    Of the fused design most tiles wait for rows of every rank, and an expert's weights are read again for its other tiles.
    """
    work = gate_up(gpu, fitted, experts)
    if world_size == 1:
        return {"sequential": work}
    rows = exchanges.Rows(
        cdiv(experts.tokens, world_size), experts.choices, experts.hidden, experts.item, world_size,
        tp=max(1, world_size * experts.held // experts.experts), fp8=experts.sent < experts.item,
    )  # fmt: skip
    sent = (world_size - 1) * rows.tokens * rows.row_bytes
    arrive = min(exchanges.dispatch(gpu, fitted.exchanges, fitted.pushes, rows).values())
    return {
        "sequential": fitted.grouped.ag + arrive + schedule(gpu, experts.tokens) + work,
        "fused": fitted.grouped.fused + work + fitted.grouped.late * sent / gpu.link,
    }


def moe_rs(gpu: Gpu, fitted: Fitted, experts: Experts, world_size: int) -> dict[str, float]:
    """Grouped GEMM with down, summed over choices and ranks."""
    work = down(gpu, fitted, experts)
    rows = exchanges.Rows(cdiv(experts.tokens, world_size), experts.choices, experts.hidden, experts.item, world_size)
    combined = exchanges.combine(gpu, fitted.exchanges, fitted.pushes, rows)
    summed = (experts.pairs + experts.tokens) * experts.hidden * experts.item / gpu.memory
    if world_size == 1:
        return {"sequential": work + gpu.launch + summed}
    message = experts.tokens / world_size * experts.hidden * experts.item
    copies = (world_size - 1) * (SLABS * gpu.copy + message / gpu.link)
    hidden = max(work, copies) + (summed + copies) * fitted.grouped.slabs
    return {
        "sequential": fitted.grouped.rs + work + min(combined.values()),
        "slabs": fitted.gemms.call + hidden + (world_size + 1) * message / gpu.memory,
    }
