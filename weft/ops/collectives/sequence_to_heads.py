"""sequence_to_heads: from all heads of a rank's tokens to a rank's heads of all tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.ops.collectives.heads import ExchangeHeads
from weft.ops.op import register
from weft.runtime.team.team import Team


class SequenceToHeads(ExchangeHeads):
    name, alias = "sequence_to_heads", "sequence-to-heads"
    to_heads = True
    differs = {"xs": (0,)}  # tokens of the rank


SEQUENCE_TO_HEADS = SequenceToHeads()
register(SEQUENCE_TO_HEADS)


def sequence_to_heads(
    x: torch.Tensor | Sequence[torch.Tensor],
    team: Team,
    *,
    tokens: Sequence[int] | None = None,
    algorithm: str = "auto",
) -> torch.Tensor | list[torch.Tensor]:
    """Send each rank its heads of this rank's tokens: [T, H, D] -> [all tokens, H / W, D]. Collective.

    x          one tensor, or several of the same T and dtype, such as q, k and v, with their own H and D: a list of results
               is returned. Any dtype of 1, 2, 4 or 8 bytes, on ``team.device``; tokens may be strided
    tokens     those of each rank, which may differ and be 0; None: T on every rank. Known on the host and equal on all ranks,
               as H, D and dtype are
    algorithm  "auto", "push" or "copy_engine" (equal tokens only; it permutes once before)

    Rank r gets heads r * H / W and on; tokens are in rank order. Bits arrive as they were sent, in new contiguous tensors.
    Captured in a CUDA graph it replays correctly with these ``tokens``, after one call outside. ValueError for arguments that
    do not fit, among them heads that W does not divide. The backward is ``heads_to_sequence``.
    """
    xs, counts = SEQUENCE_TO_HEADS.checked(x, team, tokens, algorithm)
    outs = SEQUENCE_TO_HEADS.dispatch(xs, counts, team.name, algorithm)
    return outs[0] if isinstance(x, torch.Tensor) else outs
