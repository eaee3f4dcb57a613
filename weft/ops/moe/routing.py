"""Values of a mixture of experts: a rank's experts, tokens' choices, order of rows.

A *pair* is a token and one of its k choices: pair t * k + j is choice j of token t.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from weft.arguments import check_int
from weft.runtime.virtual_rank import settle

# Most choices of a token that kernels take.
MAX_CHOICES = 16


@dataclass(frozen=True, slots=True)
class Experts:
    """Experts first .. first + count - 1 of ``total``: this rank's, whole or slices.

    ValueError where they are not among 0 .. total - 1.
    """

    total: int
    first: int
    count: int

    def __post_init__(self) -> None:
        check_int("total", self.total, 1)
        check_int("first", self.first, 0)
        check_int("count", self.count, 1)
        if self.first + self.count > self.total:
            raise ValueError(
                f"first={self.first} and count={self.count} reach beyond total={self.total}; experts are 0 .. total - 1"
            )

    @classmethod
    def whole(cls, total: int, rank: int, world_size: int) -> Experts:
        """An equal share of whole experts. ValueError unless ``world_size`` divides ``total``."""
        if total % world_size:
            raise ValueError(
                f"total={total} experts cannot be shared by world_size={world_size}; use a world size that divides them"
            )
        return cls(total, rank * (total // world_size), total // world_size)

    @classmethod
    def grouped(cls, total: int, rank: int, ep: int, tp: int) -> Experts:
        """Experts of the rank's group: one of ``ep`` groups of ``tp`` neighbouring ranks.

        A rank holds slice rank % tp of each.

        ValueError unless ``ep`` divides ``total`` and rank is below ep * tp.
        """
        check_int("rank", rank, 0, check_int("ep", ep, 1) * check_int("tp", tp, 1) - 1)
        if total % ep:
            raise ValueError(
                f"total={total} experts cannot be shared by ep={ep} groups; use a number that divides them"
            )
        return cls(total, rank // tp * (total // ep), total // ep)

    @classmethod
    def slices(cls, total: int) -> Experts:
        """All experts, of each of which a rank holds some of its intermediate features."""
        return cls(total, 0, total)

    def sharers(self, rank: int, world_size: int) -> int:
        """Number of ranks that hold slices of each of these experts.

        1 for whole ones, W for slices of all, tp for groups. ValueError for experts that no such layout gives to ``rank``.
        """
        tp, rest = divmod(self.count * world_size, self.total)
        if rest or world_size % tp or self != Experts.grouped(self.total, rank, world_size // tp, tp):
            raise ValueError(
                f"experts={self} is no equal share of rank={rank} of {world_size}; use Experts.whole, slices or grouped"
            )
        return tp

    def __iter__(self) -> Iterator[int]:
        return iter((self.total, self.first, self.count))

    def chosen(self, ids: torch.Tensor) -> torch.Tensor:
        """True for ids of these experts."""
        return (ids >= self.first) & (ids < self.first + self.count)


class Routing(NamedTuple):
    """Experts that each token has chosen.

    ids      int32 [T, k], best first, all of a token different; -1: none, as for padding
    weights  [T, k], by which the results of the chosen experts are multiplied
    """

    ids: torch.Tensor
    weights: torch.Tensor


class Dispatched(NamedTuple):
    """Tokens of all ranks as one rank has them. Row s * max_tokens + t is token t of rank s.

    rows     [W * max_tokens, H]: defined for tokens that chose an expert of this rank
    routing  of all tokens of all ranks; ids of -1 where there is no token
    experts  this rank's
    scales   fp32 [W * max_tokens, ceil(H / 128)] of fp8 rows, defined where they are; None for rows of x's dtype
    """

    rows: torch.Tensor
    routing: Routing
    experts: Experts
    scales: torch.Tensor | None = None


class Gating(NamedTuple):
    """How a router's logits choose experts: arguments of ``route``."""

    k: int
    scoring: str = "softmax"
    renormalize: bool = True
    groups: int = 1
    group_limit: int = 1
    scale: float = 1.0


class ClampedSwiGLU(NamedTuple):
    """Activation of experts: (clamp(up, -limit, limit) + 1) * g * sigmoid(alpha * g)

    with g = min(gate, limit)
    """

    alpha: float
    limit: float


class Schedule(NamedTuple):
    """The pairs of a rank's experts, expert by expert, as grouped GEMMs compute them.

    pairs       int32 [experts, T]: the first counts[e] of row e are expert e's, tokens ascending; the rest is undefined
    counts      int32 [experts]
    tiles       int32 [most, 4], a row for each tile of at most ``block`` pairs of one expert: (expert, place of its first pair
                in pairs.view(-1), number of pairs before that one, pairs); rows from tile_count on are undefined
    tile_count  int32 [1]
    choices     k
    block       pairs of a tile
    """

    pairs: torch.Tensor
    counts: torch.Tensor
    tiles: torch.Tensor
    tile_count: torch.Tensor
    choices: int
    block: int

    @property
    def all_pairs(self) -> int:
        """Pairs of all tokens, of any rank's experts."""
        return self.pairs.shape[1] * self.choices


class Routed(NamedTuple):
    """Choices of all tokens, with the schedule of this rank's experts.

    gate  [T], logits of a shared expert's gate; None: there is none
    """

    routing: Routing
    schedule: Schedule
    gate: torch.Tensor | None


def check_distinct(op: str, ids: torch.Tensor) -> None:
    """ValueError if a token names one expert twice. Reads ``ids``, which waits for the GPU."""
    settle()
    # No operation of torch on a CPU tensor: ``weft check`` would take it for one of the program.
    chosen = np.sort((ids if ids.is_cpu else ids.cpu()).numpy(), axis=1)
    twice = np.argwhere((chosen[:, 1:] == chosen[:, :-1]) & (chosen[:, 1:] >= 0))
    if len(twice):
        token, choice = (int(number) for number in twice[0])
        raise ValueError(
            f"{op}: ids[{token}] names expert {chosen[token, choice]} twice; a token's experts differ, and -1 is none"
        )
