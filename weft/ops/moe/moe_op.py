"""Base of the ops of a mixture of experts, and the shapes by which benchmarks name their calls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from weft.ops.case import Case
from weft.ops.moe.choices import popularity, recorded_shares
from weft.ops.op import Call, Op
from weft.plan.planned import AUTO, Machine, Planned

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


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

    def tuned(self, call: Call, machine: Machine) -> Planned | None:
        planned = super().tuned(call, machine)
        if planned is None or self.pinned is None:
            return planned
        shape = self.table_key(call, machine)[1]
        return planned if planned.row.shape[self.pinned] == shape[self.pinned] else None

    def row_name(self, call: Call) -> str:
        """Name of the op in rows for ``call``, with its variants."""
        return "+".join([self.name, *(one for one in self.variants if getattr(call, one))])

    def case_of(self, shape: Sequence[int], dtype: torch.dtype, world_size: int, **fields: Any) -> Case:
        whole = MoeShape(*shape)
        given = {"held": whole.held, **({"skew": SKEWS[whole.skew]} if whole.skew else {}), **fields}
        return self.case(world_size, dtype, *self.case_sizes(whole), **given)

    def case(self, world_size: int, dtype: torch.dtype, *sizes: int, design: Any = AUTO, **fields: Any) -> Case:
        """A case of these sizes. fields: the op's further arguments.

        ``layout`` among them says how experts are split (``Op.case``: how tensors lie in memory).
        """
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
