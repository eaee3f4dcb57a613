"""Drafts of a decode step: the interface of drafters, the choice of the draft length, and counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from weft.runtime.codec import exchangeable

if TYPE_CHECKING:
    from torch import Tensor

    from weft.engine.prefill import PrefillChunk
    from weft.engine.speculation.options import SpeculativeConfig


class Drafter(Protocol):
    """Source of drafts for batch slots. Collective: all ranks make the same calls and get the same drafts.

    `propose` and `accept` launch kernels on tensors at fixed addresses only: a decode step in a CUDA graph calls them.

    page_bytes  memory that it takes for each page of the model's cache
    """

    page_bytes: int

    def allocate(self, pages: int) -> None:
        """Make the cache that it needs beside the model's of this number of pages."""
        ...

    def read(self, chunks: Sequence[PrefillChunk], rows: Mapping[int, int]) -> None:
        """Read the chunks of prompts that the model has just read.

        rows  by slot, index of a chunk's first row in the model's pass
        """
        ...

    def propose(self, batch: int, drafts: int) -> Tensor:
        """Tokens [batch, drafts] int64 that may follow the newest ones of slots 0 .. batch - 1.

        -1: none from there on.
        """
        ...

    def accept(self, batch: int, tokens: Tensor, counts: Tensor) -> None:
        """Note the first counts[b] of `tokens` [batch, drafts + 1], which follow slot b's newest token."""
        ...

    def enter(self, slot: int, tokens: Sequence[int]) -> None:
        """Forget what the slot had: the sequence in it begins with `tokens`, and its newest token follows."""
        ...

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Move the state of slots, (from, to)."""
        ...


@exchangeable
class Speculation(NamedTuple):
    """Counts of speculative decoding since the engine's start.

    drafts           times that tokens were drafted for a sequence
    draft_tokens     tokens drafted
    accepted_tokens  drafted tokens that are in an answer
    accepted_per_pos  the same by place in the draft
    draft_length     tokens that the last step drafted for a sequence at most; 0: speculation was off, since it did not pay
    """

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_pos: tuple[int, ...] = ()
    draft_length: int = 0

    def since(self, before: Speculation) -> Speculation:
        """Counts since the counts `before`."""
        places = zip(self.accepted_per_pos, before.accepted_per_pos, strict=True)
        counts = (count - earlier for count, earlier in zip(self[:3], before[:3], strict=True))
        return Speculation(*counts, tuple(count - earlier for count, earlier in places), self.draft_length)

    @property
    def tokens_per_draft(self) -> float:
        """Tokens of a step for a sequence with drafts: the accepted ones and one more; 0: nothing was drafted."""
        return 1 + self.accepted_tokens / self.drafts if self.drafts else 0.0


# Weight of a new step in the measured acceptance.
RECENT = 0.05
# Acceptance of a first draft before any is measured; of later ones its powers.
ASSUMED = 0.7
# Where no time is predicted: rows of a pass up to which weights take longer to load than to multiply (an H200 has 206
# multiplications for an element of 16 bits that it loads, and one of 8 bits), and the share of a decode step that a drafted
# token costs beside its rows: look-up, attention and choice.
FREE_ROWS = 128
DRAFT_COST = 0.02
# Steps between two trials of the next longer draft length, of whose further place nothing is measured.
TRIAL_STEPS = 64


# Predicted steps by batch, for each draft length: seconds of one after no tokens, and further seconds for each token that a
# sequence has before it.
StepTimes = Mapping[int, Sequence[tuple[float, float]]]


class DraftLength:
    """Choice of the draft length of each step, and counts.

    A function of tokens, and of times that are equal on all ranks, so all ranks choose alike.
    """

    def __init__(self, config: SpeculativeConfig, times: StepTimes | None = None) -> None:
        """`times`: of all batches that `choose` gets; None: nothing is known of the GPU."""
        most = config.num_speculative_tokens
        self._lengths, self._times = config.lengths, times
        self._kept = [ASSUMED ** (place + 1) for place in range(most)]
        self._accepted = [0] * most
        self._drafts = self._draft_tokens = self._short = self._length = 0

    def choose(self, batch: int, context: Callable[[], float]) -> int:
        """Draft length of the next step, of `batch` sequences; `context`: gives their mean number of tokens."""
        if len(self._lengths) == 1:
            self._length = self._lengths[0]
            return self._length
        costs = self._costs(batch, context)
        self._length = max(self._lengths, key=lambda length: self._tokens(length) / costs[length])
        longer = [length for length in self._lengths if length > self._length]
        self._short = self._short + 1 if longer else 0
        if self._short == TRIAL_STEPS:
            self._length, self._short = longer[0], 0
        return self._length

    def _costs(self, batch: int, context: Callable[[], float]) -> dict[int, float]:
        """Times of a step by draft length, in any unit."""
        if self._times is None:
            return {length: _cost(batch, length) for length in self._lengths}
        tokens, lines = context(), zip(self._lengths, self._times[batch], strict=True)
        return {length: begin + slope * tokens for length, (begin, slope) in lines}

    def _tokens(self, length: int) -> float:
        """Tokens of a sequence that a step of this draft length is expected to give."""
        return 1 + sum(self._kept[:length])

    def note(self, length: int, drafted: Sequence[int], counts: Sequence[int]) -> None:
        """Note the result of a step: numbers of tokens drafted for each sequence, and given to it."""
        running = len(counts) - counts.count(0)
        accepted = running
        for place in range(length if running else 0):
            accepted -= counts.count(place + 1)
            self._accepted[place] += accepted
            self._kept[place] += RECENT * (accepted / running - self._kept[place])
        sent = (
            drafted if running == len(counts) else [sent for sent, count in zip(drafted, counts, strict=True) if count]
        )
        self._drafts += len(sent) - sent.count(0)
        self._draft_tokens += sum(sent)

    @property
    def counts(self) -> Speculation:
        return Speculation(self._drafts, self._draft_tokens, sum(self._accepted), tuple(self._accepted), self._length)


def _cost(batch: int, length: int) -> float:
    """Time of a step, over that of one whose weights are multiplied by few rows."""
    return max(1.0, batch * (length + 1) / FREE_ROWS) + DRAFT_COST * length
