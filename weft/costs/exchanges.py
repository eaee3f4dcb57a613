"""moe_dispatch and moe_combine: µs by design.

Tokens of a rank choose alike among all experts. Every design sends each peer a message: all rows ("lamport", "pipelined"), or
the rows that it needs ("push").
"""

from __future__ import annotations

from typing import NamedTuple

from weft.costs import pushes
from weft.costs.fitted import Exchanges, Pushes
from weft.costs.gpu import Gpu
from weft.runtime.arithmetic import cdiv

# Tokens under a flag, columns of a block and programs of "push" by default (weft/ops/moe/exchange).
CHUNK, BLOCK, PROGRAMS = 8, 1024, 256


class Rows(NamedTuple):
    """Rows of an exchange.

    tokens   of each rank
    choices  of a token
    width    elements of a row
    item     bytes of an element
    world_size, tp  ranks; of which ``tp`` hold slices of the same experts
    fp8      rows are sent in one byte
    block    elements of a tile of "lamport" sums
    weighted  False: a rank has a row for each token in place of one for each choice
    """

    tokens: int
    choices: int
    width: int
    item: int
    world_size: int
    tp: int = 1
    fp8: bool = False
    block: int = 256
    weighted: bool = True

    @property
    def row_bytes(self) -> int:
        """Bytes of a row as it is sent."""
        return self.width + 4 * cdiv(self.width, 128) if self.fp8 else self.width * self.item

    @property
    def share(self) -> float:
        """Share of a rank's tokens that a peer has an expert for."""
        return 1 - (1 - self.tp / self.world_size) ** self.choices

    @property
    def blocks(self) -> float:
        """Blocks of columns, and chunks after each other, of a program of "push"."""
        return cdiv(self.width, BLOCK) * cdiv(cdiv(self.tokens, CHUNK), PROGRAMS)


def dispatch(gpu: Gpu, fitted: Exchanges, of_pushes: Pushes, rows: Rows) -> dict[str, float]:
    """Rows of tokens to the ranks that hold an expert they chose."""
    W, T = rows.world_size, rows.tokens
    if W == 1:
        return {"push": gpu.launch + 2 * T * rows.row_bytes / gpu.memory}
    choices = T * rows.choices * 8
    message = T * rows.row_bytes + choices
    # Every rank's rows are stored where the caller reads them.
    stored = 2 * W * message / gpu.memory
    rounded = fitted.rounding * (fitted.sums_base + T * rows.width * rows.item / gpu.memory) if rows.fp8 else 0.0
    needed = (W - 1) * (rows.share * T * rows.row_bytes + choices)
    steps = (W - 1) * cdiv(rows.width, BLOCK) * fitted.send_step * (2 if rows.fp8 else 1)
    wire = fitted.send_wire * (fitted.send_fp8 if rows.fp8 else 1.0) * needed / gpu.wire(W)
    return {
        "lamport": fitted.gathered
        + pushes.one_hop(gpu, of_pushes, fitted.words * (W - 1) * message, W)
        + fitted.stored * stored
        + rounded,
        "push": fitted.send + max(steps, wire) + fitted.send_both * min(steps, wire) + rounded,
        "pipelined": fitted.pieces + (W - 1) * gpu.copy + (W - 1) * message / gpu.link + rounded,
    }


def combine(gpu: Gpu, fitted: Exchanges, of_pushes: Pushes, rows: Rows) -> dict[str, float]:
    """Weighted sums of each token's results back to its rank, and their sum."""
    W, T, row = rows.world_size, rows.tokens, rows.width * rows.item
    # A rank has T * k pairs in the mean, of W * T tokens.
    loads = (T * rows.choices * rows.tp if rows.weighted else W * T * rows.share) * row / gpu.memory
    every = W * T * row
    sums = fitted.sums_base + fitted.sums * (loads + every / gpu.memory)
    if W == 1:
        return {"push": gpu.launch + sums}
    crossing = 0.0
    if rows.width % rows.block:
        # One choice after the other, in place of all at once.
        many = fitted.crossing * W * T * rows.width * rows.choices * 1e-6 * 132 / gpu.sms
        crossing = fitted.crossing_step * rows.choices + many
    scatter = min(pushes.exchange(gpu, of_pushes, every, W, adds=True).values())
    message = (W - 1) * T * row
    wire = fitted.words * message
    hop = pushes.one_hop(gpu, of_pushes, wire, W)
    sent, read = (W - 1) * rows.share * T * row / gpu.wire(W), loads / fitted.rate
    return {
        "lamport": fitted.first + hop + fitted.choices * loads + crossing,
        "sum_then_scatter": sums + scatter,
        "push": fitted.base
        + W * rows.blocks * (fitted.step + fitted.load * rows.choices) * min(1.0, 0.5 + T / 64)
        + max(sent, read)
        + fitted.both * min(sent, read),
        "pipelined": fitted.pieces
        + (W - 1) * gpu.copy
        + fitted.piece_step * min(T, 128) ** 0.5
        + message / gpu.link
        + fitted.piece_sums * (loads + every / gpu.memory),
    }
