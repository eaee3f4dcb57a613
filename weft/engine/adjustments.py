"""Changes of logits by request, on the device: penalties, biases, tokens that are not allowed.

In vLLM's order, for each token id of a row:

    x = logit + bias                              logit_bias; -inf for a token outside allowed_token_ids
    x = -inf                                      if it would complete one of bad_words, or end the answer before min_tokens, or
                                                  if a grammar does not allow it (weft.engine.guided)
    x = x / r if x > 0 else x * r                 r: repetition_penalty, if prompt or answer have the token
    x = x - f * count - p * (count > 0)           f, p: frequency_penalty, presence_penalty; count: in the answer

Each rank changes the logits of its own token ids, and nothing is exchanged. The state is that of batch slots: a slot is filled
when its sequence's prompt has been read, again when it is read again after a preemption, and each chosen token is noted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from weft.arguments import quoted
from weft.engine.guided import Guide
from weft.engine.params import SamplingParams
from weft.parallel.vocabulary import VocabParallelHead
from weft.runtime.copying import upload

# Bounds of static tensors: end-of-sequence and stop tokens, bad words as token ids, and the length of these.
MOST_ENDS, MOST_BAD_WORDS, LONGEST_BAD_WORD = 64, 128, 16
NO_TOKEN, ANY_TOKEN = -1, -2


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjusted:
    """Changes of logits that `params` ask for, with the tokens that they mean.

    ends       token ids that may not come before `min_tokens`
    bad_words  token ids of each, of one spelling
    guide      grammar of the answer, behind the tokens that the host has
    """

    params: SamplingParams
    ends: list[int]
    bad_words: list[list[int]]
    guide: Guide | None = None

    def __post_init__(self) -> None:
        if self.params.min_tokens and len(self.ends) > MOST_ENDS:
            raise ValueError(
                f"min_tokens={self.params.min_tokens} with {len(self.ends)} tokens that end an answer; pass at most "
                f"{MOST_ENDS}, those of the checkpoint included"
            )
        if len(self.bad_words) > MOST_BAD_WORDS:
            raise ValueError(
                f"bad_words have {len(self.bad_words)} spellings as tokens; pass fewer, for {MOST_BAD_WORDS}"
            )
        if (longest := max((len(word) for word in self.bad_words), default=0)) > LONGEST_BAD_WORD:
            word = next(word for word in self.bad_words if len(word) == longest)
            raise ValueError(f"bad_words: {quoted(word)} has {longest} tokens; pass words of up to {LONGEST_BAD_WORD}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A sequence that enters a batch slot, and its tokens so far."""

    adjusted: Adjusted
    prompt: list[int]
    answer: list[int]


class Adjustments:
    """State of `slots` batch slots, and of row `neutral`, which changes nothing.

    Rows of sequences that ask for nothing leave logits as they are, bit for bit in fp32.

    bias             [B, N] fp32; N: token ids of this rank
    seen             [B, N] int32: twice the token's count in the answer, 1 more if the prompt has it
    repetition, frequency, presence  [B] fp32
    ends             [B, MOST_ENDS] int64: tokens that may not be chosen for positions before `first_end` [B]
    bad_words        [B, MOST_BAD_WORDS, LONGEST_BAD_WORD] int64, right-aligned behind ANY_TOKEN
    allowed          [B, M] int32: a bit for each token id, from a multiple of 32 on, that a grammar allows
    recent           [B, LONGEST_BAD_WORD - 1] int64: last tokens of the answer, NO_TOKEN before its first
    """

    def __init__(self, head: VocabParallelHead, slots: int) -> None:
        device, self.neutral = head.weight.device, slots
        self.start, self.size = head.start, head.local_size

        def full(value: float, dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.full((slots + 1, *shape), value, dtype=dtype, device=device)

        self.bias = full(0.0, torch.float32, self.size)
        self.seen = full(0, torch.int32, self.size)
        self.repetition = full(1.0, torch.float32)
        self.frequency = full(0.0, torch.float32)
        self.presence = full(0.0, torch.float32)
        self.ends = full(NO_TOKEN, torch.int64, MOST_ENDS)
        self.first_end = full(0, torch.int64)
        self.bad_words = full(NO_TOKEN, torch.int64, MOST_BAD_WORDS, LONGEST_BAD_WORD)
        self.recent = full(NO_TOKEN, torch.int64, LONGEST_BAD_WORD - 1)
        ids = torch.arange(self.start, self.start + self.size, device=device)
        self._first_word = self.start // 32
        self._word, self._bit = ids // 32 - self._first_word, (ids % 32).int()
        self.allowed = full(-1, torch.int32, (self.start + self.size - 1) // 32 + 1 - self._first_word)
        self._rows = torch.arange(slots + 1, device=device)
        self._tensors = (
            self.bias, self.seen, self.repetition, self.frequency, self.presence, self.ends, self.first_end,
            self.bad_words, self.recent, self.allowed,
        )  # fmt: skip
        self._filled: set[int] = set()

    def enter(self, slot: int, entry: Entry | None) -> None:
        """Fill the row of a slot; None: of a sequence that asks for nothing."""
        # A sequence that asks for nothing has its tokens noted too, where another of the batch asks.
        if entry is not None or slot in self._filled:
            for tensor in self._tensors:
                tensor[slot].copy_(tensor[self.neutral])
            self._filled.discard(slot)
        if entry is None:
            return
        self._filled.add(slot)
        params = entry.adjusted.params
        if params.allowed_token_ids is not None:
            self.bias[slot].fill_(-torch.inf)
            self._set(self.bias[slot], params.allowed_token_ids, [0.0] * len(params.allowed_token_ids))
        if params.logit_bias:
            bias = self._own(self.bias[slot], params.logit_bias.keys(), params.logit_bias.values())
            self.bias[slot].index_add_(0, *bias)
        self._set(self.seen[slot], set(entry.prompt), [1] * len(set(entry.prompt)))
        self.seen[slot].index_add_(0, *self._own(self.seen[slot], entry.answer, [2] * len(entry.answer)))
        self.repetition[slot] = params.repetition_penalty
        self.frequency[slot] = params.frequency_penalty
        self.presence[slot] = params.presence_penalty
        if params.min_tokens:
            self.first_end[slot] = len(entry.prompt) + params.min_tokens
            self.ends[slot, : len(entry.adjusted.ends)] = self._upload(entry.adjusted.ends, torch.int64)
        if words := entry.adjusted.bad_words:
            aligned = [[ANY_TOKEN] * (LONGEST_BAD_WORD - len(word)) + word for word in words]
            self.bad_words[slot, : len(words)] = self._upload(aligned, torch.int64)
        if entry.adjusted.guide is not None:
            self.allow({slot: entry.adjusted.guide.mask()})
        if last := entry.answer[1 - LONGEST_BAD_WORD :]:
            self.recent[slot, -len(last) :] = self._upload(last, torch.int64)

    def allow(self, masks: Mapping[int, torch.Tensor]) -> None:
        """Set the tokens that the next choice for these slots may give: a mask of weft.engine.guided each."""
        size = self.allowed.shape[1]
        parts = torch.stack([mask[self._first_word : self._first_word + size] for mask in masks.values()])
        rows = self.allowed[:, : parts.shape[1]]  # behind the vocabulary there is only padding
        rows.index_copy_(0, self._upload(list(masks), torch.int64), upload(parts, rows.device))

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Move the rows of slots, (from, to)."""
        for source, target in moves:
            if source in self._filled or target in self._filled:
                for tensor in self._tensors:
                    tensor[target].copy_(tensor[source])
                self._filled.discard(target)
                if source in self._filled:
                    self._filled.add(target)

    def adjust(
        self, logits: torch.Tensor, rows: slice | torch.Tensor, position: torch.Tensor, *, guided: bool = False
    ) -> torch.Tensor:
        """Changed logits [S, N], fp32, of the slots `rows`; `position` [S]: of the tokens to be chosen.

        guided  some rows have grammars
        """
        x = logits.float() + self.bias[rows]
        seen = self.seen[rows]
        repetition = torch.where(seen != 0, self.repetition[rows, None], 1.0)
        x = torch.where(x > 0, x / repetition, x * repetition)
        count = seen >> 1
        x -= self.frequency[rows, None] * count
        x -= self.presence[rows, None] * (count > 0)
        if guided:
            bits = self.allowed[rows][:, self._word] >> self._bit
            x = x.masked_fill(bits & 1 == 0, -torch.inf)
        before, words = self.recent[rows], self.bad_words[rows]
        fits = ((words[..., :-1] == before[:, None]) | (words[..., :-1] == ANY_TOKEN)).all(dim=-1)
        completed = torch.where(fits, words[..., -1], NO_TOKEN)
        ends = torch.where((position < self.first_end[rows])[:, None], self.ends[rows], NO_TOKEN)
        index, owned = self._index(torch.cat((completed, ends), dim=1))
        return x.scatter_add_(1, index, torch.where(owned, -torch.inf, 0.0))

    def note(self, rows: slice | torch.Tensor, tokens: torch.Tensor, position: torch.Tensor) -> None:
        """Note the chosen tokens [S], which got the indices `position`; empty slots have positions below 1."""
        rows = self._rows[rows]
        index, owned = self._index(tokens)
        self.seen.view(-1).scatter_add_(0, rows * self.size + index, 2 * (owned & (position > 0)).int())
        recent = self.recent[rows]
        later = torch.cat((recent[:, 1:], tokens[:, None]), dim=1)
        self.recent.index_copy_(0, rows, torch.where((position > 0)[:, None], later, recent))

    def _index(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Index of each token among this rank's, 0 for others, and whether it is one of them."""
        index = tokens - self.start
        owned = (index >= 0) & (index < self.size)
        return torch.where(owned, index, 0), owned

    def _set(self, row: torch.Tensor, tokens: Sequence[int], values: Sequence[float]) -> None:
        row.index_copy_(0, *self._own(row, tokens, values))

    def _own(
        self, row: torch.Tensor, tokens: Sequence[int], values: Sequence[float]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Index and value of each of these tokens that this rank has."""
        own = [(t - self.start, v) for t, v in zip(tokens, values, strict=True) if 0 <= t - self.start < self.size]
        index, kept = zip(*own, strict=True) if own else ((), ())
        return self._upload(index, torch.int64), self._upload(kept, row.dtype)

    def _upload(self, values: Sequence, dtype: torch.dtype) -> torch.Tensor:
        return upload(torch.tensor(values, dtype=dtype), self.bias.device)
