"""note_tokens: chosen tokens, counted for the penalties and bad words of adjust_logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.ops.case import FP32, Case, Draw, Inputs
from weft.ops.local import capabilities_of, check_like
from weft.ops.op import UNCHANGED, Op, register
from weft.ops.registration import check_count
from weft.ops.vocab.adjust_logits import LogitChanges, case_changes, check_changes, local_index
from weft.ops.vocab.sample_argmax import CASES_FIRST
from weft.runtime.capabilities import launch_options
from weft.runtime.team.team import Team


@triton.jit(do_not_specialize=["N", "first"])
def note_tokens_kernel(seen, recent, rows, tokens, position, N, first, LENGTH: tl.constexpr):
    """seen[r, t - first] += 2, recent[r] = [*recent[r, 1:], t]        r = rows[b], t = tokens[b]

    grid: (B,). Where position[b] > 0, else nothing. No two rows are equal, so no two programs write the same.
    """
    batch = tl.program_id(0)
    wl.follow_previous_kernel()
    if tl.load(position + batch) > 0:
        slot, token = tl.load(rows + batch), tl.load(tokens + batch)
        place = tl.arange(0, LENGTH)
        at = recent + slot * (LENGTH - 1) + place
        later = tl.load(at + 1, mask=place < LENGTH - 2, other=0)
        count = seen + slot * N + token - first
        owned = (token >= first) & (token < first + N)
        counted = tl.load(count, mask=owned, other=0) + 2
        tl.debug_barrier()  # all threads have loaded what is written below
        tl.store(at, tl.where(place == LENGTH - 2, token, later), mask=place < LENGTH - 1)
        tl.store(count, counted, mask=owned)


def note_tokens(
    changes: LogitChanges, first: int, rows: torch.Tensor, tokens: torch.Tensor, position: torch.Tensor
) -> None:
    """Note chosen ``tokens`` [B] int64 in ``changes.seen`` and ``recent``, where ``position`` is above 0.

    rows, position  [B] int64: slot of each token, no two equal, and its index in its sequence
    """
    check_changes("note_tokens", changes)
    check_count("note_tokens", "first", first)
    for name, x in (("rows", rows), ("tokens", tokens), ("position", position)):
        check_like(
            "note_tokens", name, x, changes.bias.device, (torch.int64,), ("B",) if name == "rows" else (len(rows),)
        )
    NOTE_TOKENS.dispatch(changes.seen, changes.recent, rows, tokens, position, first)


def note(
    seen: torch.Tensor,
    recent: torch.Tensor,
    first: int,
    rows: torch.Tensor,
    tokens: torch.Tensor,
    position: torch.Tensor,
) -> None:
    """`note_tokens` in plain torch."""
    index, owned = local_index(tokens, first, seen.shape[1])
    seen.view(-1).scatter_add_(0, rows * seen.shape[1] + index, 2 * (owned & (position > 0)).int())
    before = recent[rows]
    later = torch.cat((before[:, 1:], tokens[:, None]), dim=1)
    recent.index_copy_(0, rows, torch.where((position > 0)[:, None], later, before))


class NoteTokens(Op):
    name, alias = "note_tokens", "note-tokens"
    bits = UNCHANGED
    no_plan = "one kernel; a program takes one token"
    mutates = ("seen", "recent")

    def inputs(self, case: Case, rank: int, draw: Draw) -> Inputs:
        """Rows, tokens, positions, and the changes. sizes: tokens, and token ids of this rank."""
        batch, vocab = case.sizes
        row = torch.arange(batch, device=draw.device)
        return 2 * batch - 1 - row, row * 13 % (vocab + 2 * CASES_FIRST), row % 3, *case_changes(batch, vocab, draw)

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> tuple[torch.Tensor, torch.Tensor]:
        rows, tokens, position, *changes = by_rank[rank]
        seen, recent = (x.clone() for x in (LogitChanges(*changes).seen, LogitChanges(*changes).recent))
        note(seen, recent, CASES_FIRST, rows, tokens, position)
        return seen, recent

    def call(
        self, case: Case, team: Team, rows: torch.Tensor, tokens: torch.Tensor, position: torch.Tensor, *changes: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        of = LogitChanges(*changes)
        note_tokens(of, CASES_FIRST, rows, tokens, position)
        return of.seen, of.recent

    def cases(self) -> Iterator[Case]:
        for sizes in ((1, 1), (9, 70)):
            yield self.case(1, FP32, sizes)

    def forward(
        self,
        seen: torch.Tensor,
        recent: torch.Tensor,
        rows: torch.Tensor,
        tokens: torch.Tensor,
        position: torch.Tensor,
        first: int,
    ) -> None:
        if len(rows) > 0:
            arguments = (
                seen,
                recent,
                rows.contiguous(),
                tokens.contiguous(),
                position.contiguous(),
                seen.shape[1],
                first,
            )
            options = launch_options(capabilities_of(seen.device))
            note_tokens_kernel[(len(rows),)](*arguments, LENGTH=recent.shape[1] + 1, num_warps=1, **options)

    def fake(self, seen, recent, rows, tokens, position, first):
        return None


NOTE_TOKENS = register(NoteTokens())
