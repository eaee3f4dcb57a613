"""Batch slots on the device: positions, page tables, sampling parameters and changes of logits.

Changes of logits by request, on the device: penalties, biases, tokens that are not allowed.

In vLLM's order, for each token id of a row:

    x = logit + bias                              logit_bias; -inf for a token outside allowed_token_ids
    x = -inf                                      if it would complete one of bad_words, or end the answer before min_tokens, or
                                                  if a grammar does not allow it (weft.text.grammars)
    x = x / r if x > 0 else x * r                 r: repetition_penalty, if prompt or answer have the token
    x = x - f * count - p * (count > 0)           f, p: frequency_penalty, presence_penalty; count: in the answer

Logits that are NaN or +inf stay so, also of excluded tokens. A request that excludes all tokens at its begin is refused; one
that excludes all later ends with an error.

Each rank changes the logits of its token ids, and nothing is exchanged. State is kept by batch slot: it is filled when the
prompt of its sequence has been read, also once more after a preemption, and each chosen token is noted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy
import torch

from weft import ops
from weft.arguments import quoted
from weft.engine.params import MOST_BAD_WORDS, SamplingParams
from weft.ops.vocab.adjust_logits import ANY_TOKEN, NO_TOKEN, LogitChanges, adjusted
from weft.ops.vocab.note_tokens import note
from weft.parallel.vocabulary import VocabParallelHead
from weft.runtime.arithmetic import cdiv
from weft.runtime.copying import to_device, upload
from weft.text.grammars import Guide

# Fields of a slot that are one number.
DTYPES = {
    "positions": torch.int64, "last": torch.int64, "seed": torch.int64, "top_k": torch.int64,
    "temperature": torch.float32, "top_p": torch.float32, "min_p": torch.float32, "adapter": torch.int32,
}  # fmt: skip
# The sampling parameters among them.
SAMPLING = [name for name in DTYPES if name not in ("positions", "last", "adapter")]
# Int32 words to whose multiples fields are aligned: kernels are compiled for pointers of 16 bytes.
ALIGNMENT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotState:
    """State of a batch slot; `position`: of the token that the next decode step takes.

    pages  the sequence's; 0 for a page that it has given back, before the windows of all layers
    last   position of the last token that a decode step may take
    adapter  number of the sequence's adapter; -1: none
    """

    position: int
    pages: list[int]
    params: SamplingParams
    last: int = 0
    adapter: int = -1


class Slots:
    """Fields of `max_batch` batch slots on `device`, at fixed addresses. At first all are empty.

    positions                              [max_batch] int64; -1: the slot is empty. Decode steps advance it on the device
    last                                   [max_batch] int64, for decode steps with drafts (weft.engine.speculation.verify)
    table                                  [max_batch, max_pages] int32
    seed, top_k                            [max_batch] int64
    temperature, top_p, min_p              [max_batch] fp32
    adapter                                [max_batch] int32; -1: none
    occupied                               slots that `send` has filled and not emptied

    They are views of one buffer of int32 words, of which the host has a copy. So all changes of a step are one copy to the
    device, of the words and their places, and one kernel.
    """

    def __init__(self, max_batch: int, max_pages: int, device: torch.device) -> None:
        shapes = {name: (max_batch,) for name in DTYPES} | {"table": (max_batch, max_pages)}
        dtypes = DTYPES | {"table": torch.int32}
        begins, sizes, end = {}, {}, 0
        for name, shape in shapes.items():
            begins[name], sizes[name] = end, dtypes[name].itemsize // 4 * (shape[1] if len(shape) > 1 else 1)
            end += cdiv(max_batch * sizes[name], ALIGNMENT) * ALIGNMENT
        self._words = torch.zeros(end, dtype=torch.int32)
        self._there = torch.zeros(end, dtype=torch.int32, device=device)

        def views(words: torch.Tensor) -> dict[str, torch.Tensor]:
            parts = {name: words[begin : begin + max_batch * sizes[name]] for name, begin in begins.items()}
            return {name: part.view(dtypes[name]).view(shapes[name]) for name, part in parts.items()}

        there = views(self._there)
        self.positions, self.last, self.table, self.seed, self.top_k = (
            there[name] for name in ("positions", "last", "table", "seed", "top_k")
        )
        self.temperature, self.top_p, self.min_p = (there[name] for name in ("temperature", "top_p", "min_p"))
        self.adapter = there["adapter"]
        self.positions.fill_(-1)
        self.adapter.fill_(-1)
        self.top_p.fill_(1.0)
        self._here = {name: part.numpy() for name, part in views(self._words).items()}
        self._table_begin, self._max_pages = begins["table"], max_pages
        # Places of a slot's words: first + slot * step; its position comes first.
        first = [numpy.arange(begins[name], begins[name] + size) for name, size in sizes.items()]
        self._first, self._step = numpy.concatenate(first), numpy.repeat(list(sizes.values()), list(sizes.values()))
        self._position_words = sizes["positions"]
        self.occupied: set[int] = set()
        self._forgotten: set[int] = set()

    def forget(self) -> None:
        """Have the next `send` empty all slots that it does not fill.

        After an error the device's copy is uncertain.
        """
        self._forgotten = set(range(len(self.positions)))
        self.occupied.clear()

    def send(self, changes: Mapping[int, SlotState | None], new_pages: Sequence[tuple[int, int, int]] = ()) -> None:
        """Fill slots, or empty them (None), for the next decode step. Others go on by themselves.

        new_pages  (slot, index in its table, page), of slots that stay
        """
        if self._forgotten:
            changes = {**dict.fromkeys(self._forgotten), **changes}
            self._forgotten = set()
        if not changes and not new_pages:
            return
        here, entries = self._here, []
        for slot, index, page in new_pages:
            here["table"][slot, index] = page
            entries.append(self._table_begin + slot * self._max_pages + index)
        filled = [slot for slot, state in changes.items() if state is not None]
        emptied = [slot for slot, state in changes.items() if state is None]
        for slot in filled:
            state = changes[slot]
            here["positions"][slot], here["last"][slot] = state.position, state.last
            here["adapter"][slot] = state.adapter
            for name in SAMPLING:
                here[name][slot] = getattr(state.params, name)
            row = here["table"][slot]
            row[: len(state.pages)] = state.pages
            row[len(state.pages) :] = 0
        here["positions"][emptied] = -1
        self.occupied.update(filled)
        self.occupied.difference_update(emptied)
        self._upload(
            numpy.array(entries, numpy.int64), self._places(filled), self._places(emptied, self._position_words)
        )

    def _places(self, slots: list[int], words: int | None = None) -> numpy.ndarray:
        """Places of these slots' words, or of the first `words` of each."""
        return (self._first[:words] + numpy.array(slots, numpy.int64)[:, None] * self._step[:words]).reshape(-1)

    def _upload(self, *places: numpy.ndarray) -> None:
        """Copy the words at these places to the device."""
        at = numpy.concatenate(places)
        packed = torch.empty(len(at) * 12, dtype=torch.uint8)  # int64 places, then int32 words
        packed[: len(at) * 8].view(torch.int64).numpy()[...] = at
        packed[len(at) * 8 :].view(torch.int32).numpy()[...] = self._words.numpy()[at]
        packed = upload(packed, self._there.device)
        self._there.index_copy_(0, packed[: len(at) * 8].view(torch.int64), packed[len(at) * 8 :].view(torch.int32))


def rows_of(x: torch.Tensor, slots: slice) -> torch.Tensor:
    """Rows of these slots, contiguous: `x` itself for the first slots, a copy for a group.

    Also a copy of one row, since kernels are compiled for pointers of 16 bytes.
    """
    return x[slots] if slots.step is None else x[slots].clone(memory_format=torch.contiguous_format)


# Bounds of static tensors, powers of two, with MOST_BAD_WORDS: end-of-sequence and stop tokens, token ids of a bad word.
MOST_ENDS, LONGEST_BAD_WORD = 64, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjusted:
    """Changes of logits that `params` ask for, with the tokens that they mean.

    ends       token ids that may not come before `min_tokens`
    bad_words  token ids of each, of one spelling
    guide      grammar of the answer, after the tokens that the host has
    """

    params: SamplingParams
    ends: list[int]
    bad_words: list[list[int]]
    guide: Guide | None = None

    def __post_init__(self) -> None:
        if self.params.min_tokens and len(self.ends) > MOST_ENDS:
            raise ValueError(
                f"min_tokens={self.params.min_tokens} with {len(self.ends)} tokens that end an answer; pass at most "
                f"{MOST_ENDS}, the checkpoint's included"
            )
        if len(self.bad_words) > MOST_BAD_WORDS:
            raise ValueError(
                f"bad_words have {len(self.bad_words)} spellings as tokens; pass fewer, for {MOST_BAD_WORDS}"
            )
        if (longest := max((len(word) for word in self.bad_words), default=0)) > LONGEST_BAD_WORD:
            word = next(word for word in self.bad_words if len(word) == longest)
            raise ValueError(f"bad_words: {quoted(word)} has {longest} tokens; pass words of up to {LONGEST_BAD_WORD}")

    def constraints(self, chosen: int) -> list[str]:
        """Names of the parameters that exclude tokens after the first `chosen` ones of the answer."""
        named = {
            "allowed_token_ids": self.params.allowed_token_ids is not None,
            "bad_words": bool(self.bad_words),
            "stop_token_ids": chosen < self.params.min_tokens and bool(self.params.stop_token_ids),
            f"min_tokens={self.params.min_tokens}": chosen < self.params.min_tokens and bool(self.ends),
            f"structured_outputs ({self.guide and self.guide.kind})": self.guide is not None,
        }
        return [name for name, excludes in named.items() if excludes]

    def check_begin(self, vocab_size: int) -> None:
        """ValueError if no token of the vocabulary may begin the answer."""
        excluded = {word[0] for word in self.bad_words if len(word) == 1} | set(self.ends)
        ids = self.params.allowed_token_ids
        allowed = range(vocab_size) if ids is None else set(ids)
        if self.guide is not None:
            bits = numpy.unpackbits(self.guide.mask().numpy().view(numpy.uint8), bitorder="little")
            allowed = [token for token in numpy.flatnonzero(bits).tolist() if token in allowed]
        if all(token in excluded for token in allowed):
            raise ValueError(f"no token can begin the answer: {self.named(0)}")

    def named(self, chosen: int) -> str:
        """Rest of a message that no token is left after the first `chosen` ones of the answer."""
        return f"{' and '.join(self.constraints(chosen))} exclude all; loosen one of them"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A sequence that enters a batch slot, and its tokens so far."""

    adjusted: Adjusted
    prompt: list[int]
    answer: list[int]


class Adjustments:
    """State of `slots` batch slots, and of row `neutral`, which changes nothing.

    Rows of sequences that ask for nothing leave logits as they are, bit for bit in fp32.

    state  of all slots, then of `neutral`
    """

    def __init__(self, head: VocabParallelHead, slots: int) -> None:
        device, self.neutral = head.weight.device, slots
        self.start, self.size = head.start, head.local_size

        def full(value: float, dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.full((slots + 1, *shape), value, dtype=dtype, device=device)

        self._first_word = self.start // 32
        self.state = LogitChanges(
            bias=full(0.0, torch.float32, self.size),
            seen=full(0, torch.int32, self.size),
            repetition=full(1.0, torch.float32),
            frequency=full(0.0, torch.float32),
            presence=full(0.0, torch.float32),
            ends=full(NO_TOKEN, torch.int64, MOST_ENDS),
            first_end=full(0, torch.int64),
            bad_words=full(NO_TOKEN, torch.int64, MOST_BAD_WORDS, LONGEST_BAD_WORD),
            recent=full(NO_TOKEN, torch.int64, LONGEST_BAD_WORD - 1),
            allowed=full(-1, torch.int32, (self.start + self.size - 1) // 32 + 1 - self._first_word),
        )
        self._rows = torch.arange(slots + 1, device=device)
        self._filled: set[int] = set()

    def enter(self, slot: int, entry: Entry | None) -> None:
        """Fill the row of a slot; None: of a sequence that asks for nothing."""
        # A sequence that asks for nothing has its tokens noted too, where another of the batch asks.
        if entry is not None or slot in self._filled:
            for tensor in self.state:
                tensor[slot].copy_(tensor[self.neutral])
            self._filled.discard(slot)
        if entry is None:
            return
        self._filled.add(slot)
        params, row = entry.adjusted.params, LogitChanges(*(tensor[slot] for tensor in self.state))
        if params.allowed_token_ids is not None:
            row.bias.fill_(-torch.inf)
            self._set(row.bias, params.allowed_token_ids, [0.0] * len(params.allowed_token_ids))
        if params.logit_bias:
            row.bias.index_add_(0, *self._own(row.bias, params.logit_bias.keys(), params.logit_bias.values()))
        self._set(row.seen, set(entry.prompt), [1] * len(set(entry.prompt)))
        row.seen.index_add_(0, *self._own(row.seen, entry.answer, [2] * len(entry.answer)))
        row.repetition.fill_(params.repetition_penalty)
        row.frequency.fill_(params.frequency_penalty)
        row.presence.fill_(params.presence_penalty)
        if params.min_tokens:
            row.first_end.fill_(len(entry.prompt) + params.min_tokens)
            row.ends[: len(entry.adjusted.ends)] = self._upload(entry.adjusted.ends, torch.int64)
        if words := entry.adjusted.bad_words:
            aligned = [[ANY_TOKEN] * (LONGEST_BAD_WORD - len(word)) + word for word in words]
            row.bad_words[: len(words)] = self._upload(aligned, torch.int64)
        if entry.adjusted.guide is not None:
            self.allow({slot: entry.adjusted.guide.mask()})
        if last := entry.answer[1 - LONGEST_BAD_WORD :]:
            row.recent[-len(last) :] = self._upload(last, torch.int64)

    def allow(self, masks: Mapping[int, torch.Tensor], state: torch.Tensor | None = None) -> None:
        """Set the tokens that the next choice for these slots may give: a mask of weft.text.grammars each.

        state  like ``state.allowed``, and set in its place; None: that
        """
        state = self.state.allowed if state is None else state
        size = state.shape[1]
        parts = torch.stack([mask[self._first_word : self._first_word + size] for mask in masks.values()])
        rows = state[:, : parts.shape[1]]  # only padding follows the vocabulary
        rows.index_copy_(0, self._upload(list(masks), torch.int64), upload(parts, rows.device))

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Move the rows of slots, (from, to)."""
        for source, target in moves:
            if source in self._filled or target in self._filled:
                for tensor in self.state:
                    tensor[target].copy_(tensor[source])
                self._filled.discard(target)
                if source in self._filled:
                    self._filled.add(target)

    def adjust(
        self,
        logits: torch.Tensor,
        rows: slice | torch.Tensor,
        position: torch.Tensor,
        *,
        guided: bool = False,
        fused: bool = False,
    ) -> torch.Tensor:
        """Changed logits [S, N], fp32, of the slots `rows`; `position` [S]: of the tokens to be chosen.

        guided  some rows have grammars
        fused   by weft.ops' kernel; the torch operations give the same bits
        """
        if fused:
            return ops.adjust_logits(logits, self.start, self.state, self._indices(rows), position, guided)
        return adjusted(logits, self.start, self.state, rows, position, guided)

    def note(
        self, rows: slice | torch.Tensor, tokens: torch.Tensor, position: torch.Tensor, *, fused: bool = False
    ) -> None:
        """Note the chosen tokens [S], which got the indices `position`; empty slots have positions below 1."""
        if fused:
            ops.note_tokens(self.state, self.start, self._indices(rows), tokens, position)
        else:
            note(self.state.seen, self.state.recent, self.start, self._indices(rows), tokens, position)

    def _indices(self, rows: slice | torch.Tensor) -> torch.Tensor:
        return rows_of(self._rows, rows) if isinstance(rows, slice) else rows

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
        return to_device(values, self.state.bias.device, dtype)
