"""heads_to_sequence: from a rank's heads of all tokens to all heads of a rank's tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.ops.collectives.heads import ExchangeHeads
from weft.ops.op import register
from weft.runtime.team.team import Team


class HeadsToSequence(ExchangeHeads):
    name, alias = "heads_to_sequence", "heads-to-sequence"
    to_heads = False


HEADS_TO_SEQUENCE = HeadsToSequence()
register(HEADS_TO_SEQUENCE)


def heads_to_sequence(
    x: torch.Tensor | Sequence[torch.Tensor],
    team: Team,
    *,
    tokens: Sequence[int] | None = None,
    algorithm: str = "auto",
) -> torch.Tensor | list[torch.Tensor]:
    """Send each rank its tokens of this rank's heads: [all tokens, h, D] -> [T, W * h, D]. Collective.

    The inverse of ``sequence_to_heads``, whose arguments have the same meaning. tokens: None: the same number on every rank,
    which then divides all tokens. The backward is ``sequence_to_heads``.
    """
    xs, counts = HEADS_TO_SEQUENCE.checked(x, team, tokens, algorithm)
    outs = HEADS_TO_SEQUENCE.dispatch(xs, counts, team.name, algorithm)
    return outs[0] if isinstance(x, torch.Tensor) else outs
