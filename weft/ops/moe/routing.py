"""Values of a mixture of experts: a rank's experts, tokens' choices, order of rows; base of its ops.

A *pair* is a token and one of its k choices: pair t * k + j is choice j of token t. Choices of cases are random, skewed as real
ones are; ``MoeShape`` has the shapes of benchmarks and tables.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch

from weft.arguments import check_int
from weft.ops.case import Case, Draw
from weft.ops.op import Op
from weft.plan.planned import AUTO, Machine, Planned
from weft.runtime.virtual_rank import settle

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


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


def experts_of(case: Case, total: int, rank: int) -> Experts:
    """Experts of ``rank``: as many as the case's field ``held`` says, or its field ``local``, else all.

    local: (first, count)
    """
    if held := case.field("held"):
        return Experts(total, rank * held % total, held)
    return Experts(total, *(case.field("local") or (0, total)))


def common(draw: Draw) -> Draw:
    """``draw`` for what ranks with a field ``held`` share: the choices of all tokens."""
    return Draw(draw.case, 0, draw.call, draw.device) if draw.case.field("held") else draw


def popularity(experts: int, held: int | None) -> torch.Tensor:
    """Weights [experts] by which tokens choose: 1, 1/2, 1/3, … dealt in turn to ranks of ``held``.

    held: None: all weights are 1
    """
    if held is None:
        return torch.ones(experts)
    order = torch.arange(experts).view(held, experts // held).T.flatten()
    return 1.0 / (1 + order)


def draw_ids(draw: Draw, T: int, k: int, experts: int) -> torch.Tensor:
    """int32 [T, k], a token's ids all different. The case's field ``skew``:

    None           all sets of experts alike
    "one expert"   all tokens choose expert 1, the other choices are random
    "last expert"  all tokens choose the last expert and the ones before it
    "none"         all ids are -1
    "some"         half of the tokens have chosen none, as padding has
    "zipf"         experts are chosen by ``popularity``
    "recorded"     experts are chosen as often as ``recorded_shares`` says
    """
    skew, device = draw.case.field("skew"), draw.device
    order = draw.own("order", (T, experts), dtype=torch.float32)
    if skew == "recorded":
        start = torch.special.ndtr(draw.own("start", (T,), dtype=torch.float32)).clamp(max=1 - 1e-7)
        return chosen_by_shares(recorded_shares(experts, k), order, start, k).contiguous()
    if skew == "zipf":
        # The k largest of log(weight) + Gumbel noise are k draws without replacement.
        noise = torch.special.ndtr(order).clamp(1e-7, 1 - 1e-7).log().neg().log().neg()
        order = noise + popularity(experts, draw.case.field("held")).log().to(device)
    if skew == "one expert":
        order[:, 1] = torch.inf
    if skew == "last expert":
        order = torch.arange(experts, device=device).float().expand(T, experts)
    ids = order.topk(k, dim=-1).indices.int()
    if skew == "none":
        ids.fill_(-1)
    if skew == "some":
        ids[::2] = -1
    return ids.contiguous()


def schedule_by_torch(ids: torch.Tensor, experts: Experts, block: int, most: int) -> tuple[torch.Tensor, ...]:
    """(pairs, counts, tiles [most, 4], tile_count) of ``Schedule`` by torch; -1 where undefined.

    Nothing is read by the host.
    """
    (T, k), device = ids.shape, ids.device
    token, choice = torch.arange(T, device=device)[:, None], torch.arange(k, device=device)
    known = torch.where((ids >= 0) & (ids < experts.total), ids, experts.total).long()
    asked = ids.new_full((T, experts.total + 1), -1).scatter(1, known, (token * k + choice).int())
    asked = asked[:, experts.first : experts.first + experts.count].T
    counts = (asked >= 0).sum(1)
    # Pairs of an expert first, in their order.
    order = (asked < 0).int().argsort(dim=1, stable=True)
    needed, before = (counts + block - 1) // block, counts.cumsum(0) - counts
    ends, number = needed.cumsum(0), torch.arange(most, device=device)
    expert = torch.searchsorted(ends, number, right=True).clamp(max=experts.count - 1)
    at = (number - (ends - needed)[expert]) * block
    tiles = (expert, expert * T + at, before[expert] + at, (counts[expert] - at).clamp(max=block))
    tiles = torch.stack(tiles, 1).int().masked_fill((number >= ends[-1])[:, None], -1)
    return asked.gather(1, order), counts.int(), tiles, ends[-1:].int()


# Shares of 4,471 tokens that chose expert 0, 1, …: layer 0 of OLMoE-1B-7B-0924 on questions of GSM8K and its answers, 8 choices
# each. Counted in moe_routes.jsonl of github.com/KaxitPandya/cerebras-assesment2 (7c3cceb), without the 2,048 of its warm-up.
OLMOE = (
    0.0438, 0.0575, 0.0476, 0.0901, 0.0754, 0.1056, 0.6354, 0.1038,
    0.1369, 0.2639, 0.1183, 0.0957, 0.0441, 0.1138, 0.0904, 0.1382,
    0.0787, 0.0781, 0.1085, 0.1320, 0.1738, 0.0774, 0.1027, 0.1134,
    0.1472, 0.2496, 0.0863, 0.0684, 0.1306, 0.2297, 0.0872, 0.1405,
    0.1472, 0.1255, 0.0637, 0.0769, 0.1219, 0.0828, 0.1024, 0.1331,
    0.1787, 0.2601, 0.1168, 0.1244, 0.0783, 0.1284, 0.1069, 0.0586,
    0.0870, 0.1141, 0.0405, 0.0573, 0.2617, 0.1440, 0.1002, 0.1212,
    0.0707, 0.0501, 0.2789, 0.0774, 0.1018, 0.1335, 0.0716, 0.2199,
)  # fmt: skip


def recorded_shares(experts: int, k: int) -> torch.Tensor:
    """Shares [experts] of the tokens that choose each expert, in fp64: k in all, at most 1 each.

    The recorded ones for 8 choices of 64 experts. For other numbers the curve of OLMOE is stretched over the experts, in its
    order, and scaled.
    """
    recorded = torch.tensor(OLMOE, dtype=torch.float64)
    if (experts, k) == (len(OLMOE), 8):
        return recorded * (k / recorded.sum())
    places = torch.linspace(0, len(OLMOE) - 1, experts, dtype=torch.float64)
    below, part = places.long(), places.frac()
    curve = recorded[below] * (1 - part) + recorded[(below + 1).clamp(max=len(OLMOE) - 1)] * part
    low, high = 0.0, experts / float(curve.min())
    for _ in range(100):
        scale = (low + high) / 2
        low, high = (scale, high) if float((scale * curve).clamp(max=1).sum()) < k else (low, scale)
    return (high * curve).clamp(max=1)


def chosen_by_shares(shares: torch.Tensor, order: torch.Tensor, start: torch.Tensor, k: int) -> torch.Tensor:
    """int32 [T, k] experts of each token, all different: expert e in a share ``shares[e]`` of all tokens.

    Systematic sampling: intervals as long as the shares lie side by side, in an order of the token's own, and the places start,
    start + 1, … hit k of them.

    shares  fp64 [experts], k in all; order: [T, experts], random numbers; start: [T], random in [0, 1)
    """
    permuted = order.argsort(dim=1)
    ends = shares.to(order.device)[permuted].cumsum(1)
    ends[:, -1] = k
    hit = start.double()[:, None] + torch.arange(k, device=order.device)
    at = torch.searchsorted(ends, hit, right=True).clamp(max=len(shares) - 1)
    return permuted.gather(1, at).int()


# Of choices of experts, by the numbers that shapes have for them.
SKEWS = ("", "zipf", "recorded")


class MoeShape(NamedTuple):
    """Shape of form "moe". An op takes what it needs of it.

    tokens    of each rank where the ranks compute together, else all whose choices this rank sees
    k         choices of a token, among ``experts``
    held      experts of a rank
    hidden    elements of a token's row
    features  of an expert between its two GEMMs, as a rank holds them
    skew      of the choices, a place in SKEWS: all experts alike; by weights 1, 1/2, 1/3, …, dealt to the ranks in turn; as
              often as a trained router chose them
    """

    tokens: int
    k: int
    experts: int
    held: int
    hidden: int
    features: int
    skew: int = 0

    @property
    def of_all_ranks(self) -> MoeShape:
        """The same with the tokens of all ranks."""
        return self._replace(tokens=self.tokens * (self.experts // self.held))

    @property
    def chosen(self) -> list[float]:
        """Share of the tokens that choose each expert of the rank that has the most, about.

        A token draws its k experts without replacement. The number of experts drawn by a time is nearly k where its mean is, so
        expert e is drawn with probability 1 - exp(-weight * time).
        """
        if SKEWS[self.skew] == "recorded":
            of_ranks = recorded_shares(self.experts, self.k).view(-1, self.held)
            return of_ranks[of_ranks.sum(1).argmax()].tolist()
        weights = popularity(self.experts, self.held if self.skew else None).tolist()
        if self.k == self.experts:
            return [1.0] * self.held
        low, high = 0.0, 1e9
        for _ in range(100):
            time = (low + high) / 2
            low, high = (time, high) if sum(1 - math.exp(-w * time) for w in weights) < self.k else (low, time)
        return [1 - math.exp(-w * high) for w in weights[: self.held]]

    @property
    def pairs(self) -> float:
        """Pairs of a token and one of its choices that this rank computes, about."""
        return self.tokens * sum(self.chosen)

    @property
    def active(self) -> float:
        """Experts of this rank that some token has chosen, about."""
        return sum(1 - (1 - share) ** self.tokens for share in self.chosen)


class MoeOp(Op):
    """An op whose ``call`` is ``results`` of ``arguments``, reduced to what is ``defined``.

    pinned  sizes of a row's shape that must be the call's for the row to decide; None: the nearest row does
    """

    form = "moe"
    pinned: ClassVar[slice | None] = None

    def tuned(self, call: Any, machine: Machine) -> Planned | None:
        planned = super().tuned(call, machine)
        if planned is None or self.pinned is None:
            return planned
        shape = self.table_key(call, machine)[1]
        return planned if planned.row.shape[self.pinned] == shape[self.pinned] else None

    def row_name(self, call: Any) -> str:
        """Name of the op in rows for ``call``, with its variants."""
        return "+".join([self.name, *(one for one in self.variants if getattr(call, one))])

    def case_of(self, shape: Sequence[int], dtype: torch.dtype, world_size: int, **fields: Any) -> Case:
        whole = MoeShape(*shape)
        given = {"held": whole.held, **({"skew": SKEWS[whole.skew]} if whole.skew else {}), **fields}
        sizes = self.case_sizes(whole)
        return Case(op=self.name, world_size=world_size, dtype=dtype, sizes=sizes, fields=tuple(given.items()))

    def case(self, world_size: int, dtype: torch.dtype, *sizes: int, design: Any = AUTO, **fields: Any) -> Case:
        """A case of these sizes; fields: its further arguments."""
        given = tuple(fields.items())
        return Case(op=self.name, world_size=world_size, dtype=dtype, sizes=sizes, design=design, fields=given)

    def call_of_case(self, case: Case, machine: Machine) -> Any:
        return self.call_of(case.sizes, case.dtype, machine, case.design)

    def case_sizes(self, shape: MoeShape) -> tuple[int, ...]:
        """``Case.sizes`` of a shape."""
        raise NotImplementedError

    def call(self, case: Case, team: Team | None, *tensors: torch.Tensor) -> Any:
        out = self.results(case, team, *self.arguments(case, team, *tensors))
        return self.defined(case, team, out, *tensors)
