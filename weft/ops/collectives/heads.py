"""Exchange of attention heads for tokens (Ulysses): sequence_to_heads and heads_to_sequence.

Between attentions a rank has all heads of its tokens, in attention its heads of all tokens. Rows are transposed where
they are loaded and stored: one kernel and one hop, no copy before or after. Several tensors of different numbers of heads,
such as q, k and v, go in one call.

The dataflow is DeepSpeed-Ulysses' (Jacobs et al., 2023), which permutes before and after an all-to-all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch

from weft.arguments import check_int, quoted
from weft.ops.case import BF16, FP16, FP32, Case, Draw, Inputs
from weft.ops.collectives.cases import FEW_KEYED
from weft.ops.collectives.collective import ENDLESS, Collective, CollectiveCall, Copy, Push
from weft.ops.collectives.head_exchange import Part, exchange_heads_kernel
from weft.ops.op import UNCHANGED, register
from weft.ops.registration import as_words, check_choice, check_list, check_team, check_tensor
from weft.plan.planned import AUTO, Machine, machine_of
from weft.runtime.arithmetic import cdiv
from weft.runtime.copying import upload
from weft.runtime.team.team import Team, find_team
from weft.transport.plans import word_of
from weft.transport.push import launch


class ExchangeHeads(Collective):
    """Base of the two ops. sizes of a case: T, H, D.

    Fields of a case: ``heads`` of further tensors, ``tokens`` of each rank.

    The limits of the push are all_to_all's, which sends as many bytes between the same programs. Copy engines would need a
    permutation before or after (two H100s, 256 MiB: 745 us, the push 398).
    """

    moves_bits = True
    designs = {"push": Push, "copy": Copy}
    copy_engine_from = {8: ENDLESS}
    to_heads: ClassVar[bool]

    # --- running -----------------------------------------------------------------------------------------------------

    def checked(
        self, x: torch.Tensor | Sequence[torch.Tensor], team: Team, tokens: Sequence[int] | None, algorithm: str
    ) -> tuple[list[torch.Tensor], list[int]]:
        """Arguments of ``dispatch``: the tensors, and the tokens of each rank. ValueError for wrong arguments."""
        name = self.name
        check_team(name, team)
        xs = [x] if isinstance(x, torch.Tensor) else check_list(name, "x", x)
        for number, each in enumerate(xs):
            called = "x" if isinstance(x, torch.Tensor) else f"x[{number}]"
            check_tensor(name, called, each, team)
            shape, W = tuple(each.shape), team.size
            if len(shape) != 3:
                raise ValueError(f"{name}: {called} has shape {shape}; it must be [tokens, heads, head_dim]")
            if self.to_heads and shape[1] % W:
                what = f"fewer than world_size={W}" if shape[1] < W else f"which world_size={W} does not divide"
                raise ValueError(
                    f"{name}: {called} has {shape[1]} heads, {what}; each rank gets as many whole heads, so repeat the heads "
                    f"or use gathered_prefill_attention's gathered design"
                )
            if each.dtype != xs[0].dtype or shape[0] != xs[0].shape[0]:
                raise ValueError(
                    f"{name}: {called} is {shape} {each.dtype} and x[0] {tuple(xs[0].shape)} {xs[0].dtype}; all have the same "
                    f"tokens and dtype"
                )
        check_choice(name, "algorithm", algorithm, self.algorithms)
        return xs, self.checked_tokens(xs[0].shape[0], team, tokens)

    def checked_tokens(self, rows: int, team: Team, tokens: Sequence[int] | None) -> list[int]:
        """Tokens of each rank. ValueError unless they fit tensors of ``rows`` tokens."""
        W = team.size
        if tokens is None:
            if not self.to_heads and rows % W:
                raise ValueError(
                    f"{self.name}: x has {rows} tokens, which world_size={W} does not divide; pass tokens= of all ranks"
                )
            return [rows if self.to_heads else rows // W] * W
        if not isinstance(tokens, (list, tuple)) or len(tokens) != W:
            raise ValueError(
                f"{self.name}: tokens={quoted(tokens)} are not the numbers of {W} ranks; pass a tuple of {W}"
            )
        counts = [check_int(f"{self.name}: tokens[{rank}]", count, 0) for rank, count in enumerate(tokens)]
        expected = counts[team.rank] if self.to_heads else sum(counts)
        if rows != expected:
            raise ValueError(
                f"{self.name}: x has {rows} tokens, and tokens={tuple(counts)} say {expected} at rank {team.rank}"
            )
        return counts

    def shape_of_result(self, x: torch.Tensor, tokens: Sequence[int], team: Team) -> tuple[int, int, int]:
        _, heads, D = x.shape
        if self.to_heads:
            return sum(tokens), heads // team.size, D
        return tokens[team.rank], heads * team.size, D

    def plan_of(self, xs: Sequence[torch.Tensor], tokens: Sequence[int], team: Team, algorithm: str) -> Any:
        """Design for the rank with the most tokens, the same on all ranks."""
        row = sum(x.shape[1] * x.shape[2] for x in xs) * xs[0].itemsize * (1 if self.to_heads else team.size)
        return self.plan(CollectiveCall(max(tokens) * row, xs[0].dtype, algorithm), machine_of(team)).design

    def run(
        self, design: Push | Copy, team: Team, xs: Sequence[torch.Tensor], tokens: Sequence[int]
    ) -> list[torch.Tensor]:
        """New contiguous tensors for checked ``xs``."""
        self.check_design(design)
        outs = [x.new_empty(self.shape_of_result(x, tokens, team)) for x in xs]
        if isinstance(design, Copy):
            return [out.copy_(x) for x, out in zip(xs, outs, strict=True)]
        # Tensors without elements have nothing to send, and no words.
        filled = [(x.detach(), out) for x, out in zip(xs, outs, strict=True) if x.shape[1] * x.shape[2] > 0]
        if max(tokens) == 0 or not filled:
            return outs
        width = [out.shape[1] * out.shape[2] // (1 if self.to_heads else team.size) for _, out in filled]
        # The same on all ranks, whatever the layout of their tensors.
        word = word_of(math.gcd(*(count * xs[0].itemsize for count in width)))
        each = xs[0].itemsize / word.itemsize
        widths, parts = tuple(int(count * each) for count in width), []
        for x, out in filled:
            x, out = _words(x, word), _words(out, word)
            parts.append(Part(x, out, x.stride(0), out.stride(0)))
        plan, even = design.push, len(set(tokens)) == 1
        block = plan.row_bytes // max(2, word.itemsize)
        launch(
            exchange_heads_kernel,
            tuple(parts),
            parts[0].out,
            max(tokens),
            sum(cdiv(max(tokens) * count, block) for count in widths),
            team,
            plan,
            parts[0].out if even else _ranges(team, tokens),
            WIDTHS=widths,
            TO_HEADS=self.to_heads,
            EVEN=even,
        )
        return outs

    def forward(
        self, xs: Sequence[torch.Tensor], tokens: Sequence[int], team: str, algorithm: str
    ) -> list[torch.Tensor]:
        members = find_team(team)
        return self.run(self.plan_of(xs, tokens, members, algorithm), members, xs, tokens)

    def fake(self, xs, tokens, team, algorithm):
        return [x.new_empty(self.shape_of_result(x, tokens, find_team(team))) for x in xs]

    def backward(self, given, grads):
        # Every element goes back where it came from.
        way_back = torch.ops.weft.heads_to_sequence if self.to_heads else torch.ops.weft.sequence_to_heads
        return {"xs": way_back.default(list(grads), given.tokens, given.team, given.algorithm)}

    # --- judging -----------------------------------------------------------------------------------------------------

    def call_of_case(self, case: Case, machine: Machine) -> CollectiveCall:
        T, heads, D = case.sizes
        every = heads + sum(case.field("heads") or ())
        return CollectiveCall(
            max(case.field("tokens") or (T,)) * every * D * case.dtype.itemsize, case.dtype, case.design
        )

    def case_of(self, shape: Sequence[int], dtype: torch.dtype, world_size: int, **fields: Any) -> Case:
        """Heads of up to 128 elements, at most 8 of a rank."""
        elements = shape[0] // dtype.itemsize // world_size
        D = math.gcd(elements, 128)
        heads = math.gcd(elements // D, 8)
        sizes = (elements // (D * heads), heads * world_size, D)
        return self.case(world_size, dtype, sizes, **fields)

    def inputs(self, case: Case, rank: int, draw: Draw) -> Inputs:
        T, heads, D = case.sizes
        tokens, W = case.field("tokens") or (T,) * case.world_size, case.world_size
        rows, share = (tokens[rank], 1) if self.to_heads else (sum(tokens), W)
        each = (heads, *(case.field("heads") or ()))
        return tuple(draw.own(f"x{number}", (rows, count // share, D)) for number, count in enumerate(each))

    def reference(self, case: Case, rank: int, by_rank: Sequence[Inputs]) -> Any:
        W, T = case.world_size, case.sizes[0]
        tokens = case.field("tokens") or (T,) * W
        split = (lambda x: x.chunk(W, 1)) if self.to_heads else (lambda x: x.split(tokens))
        joined = [
            torch.cat([split(x)[rank] for x in every], 0 if self.to_heads else 1)
            for every in zip(*by_rank, strict=True)
        ]
        return joined[0] if len(joined) == 1 else tuple(joined)

    def call(self, case: Case, team: Team, *tensors: torch.Tensor) -> Any:
        xs, tokens = list(tensors), case.field("tokens")
        if isinstance(case.design, str):
            outs = self.dispatch(*self.checked(xs, team, tokens, case.design), team.name, case.design)
        else:
            outs = self.run(case.design, team, *self.checked(xs, team, tokens, AUTO))
        return outs[0] if len(outs) == 1 else tuple(outs)

    def cases(self) -> Iterator[Case]:
        case = self.case
        for w in (1, 2, 3, 4, 8):
            yield case(w, FP16, (7, w, 24), tokens=(7, 0, 1, 3, 7, 0, 2, 5)[:w], heads=(3 * w,))
            if w == 8:
                continue
            yield case(w, BF16, (5, 2 * w, 16), heads=(w, w))
        yield case(2, BF16, (40, 4, 16), Push(push=FEW_KEYED), tokens=(40, 7), heads=(2,))
        yield case(3, BF16, (1, 6, 8), tokens=(0, 0, 1), heads=(3,))
        if not self.to_heads:  # which shares all but the direction
            return
        for dtype, D in ((FP32, 20), (BF16, 5), (torch.int8, 3), (torch.int64, 2)):
            yield case(2, dtype, (4, 6, D), "push")
        yield case(2, FP16, (9, 2, 40), data="special", heads=(4,))
        for tokens in ((0, 0), (40, 1)):
            yield case(2, BF16, (max(tokens), 4, 8), tokens=tokens, heads=(2,))
        yield case(2, BF16, (33, 4, 8), layout="transposed")
        yield case(2, BF16, (33, 4, 10), layout="strided")
        yield case(2, BF16, (6, 2, 10), heads=(4,), layout="offset")

    def large_cases(self) -> Iterator[Case]:
        for w in (2, 4):
            for T, heads, D in ((4096 // w, 32, 128), (32768 // w, 64, 128)):
                yield self.case(w, BF16, (T, heads, D), heads=(8, 8))
                yield self.case(w, BF16, (T, heads, D), heads=(8, 8), tokens=(T, T - 1, 3, T)[:w])


def _words(x: torch.Tensor, word: torch.dtype) -> torch.Tensor:
    """``x`` [T, H, D] as words [T, n]: a view if rows are dense and aligned, else a copy."""
    T, heads, D = x.shape
    size = word.itemsize
    dense = x.stride()[1:] == (D, 1) and x.data_ptr() % size == 0 and x.stride(0) * x.itemsize % size == 0
    if T <= 1 or not dense:
        return as_words(x, word).view(T, heads * D * x.itemsize // size)
    return x.as_strided((T, heads * D), (x.stride(0), 1)).view(word)


def _ranges(team: Team, tokens: Sequence[int]) -> torch.Tensor:
    """int32 [W, 2]: (first token, tokens) of each rank, made once: a captured CUDA graph may hold it."""
    known = team.workspace("tokens of ranks", dict)
    key = tuple(tokens)
    if key not in known:
        firsts = [sum(key[:rank]) for rank in range(len(key))]
        known[key] = upload(torch.tensor([*zip(firsts, key, strict=True)], dtype=torch.int32), team.device)
    return known[key]


class SequenceToHeads(ExchangeHeads):
    name, alias = "sequence_to_heads", "sequence-to-heads"
    bits = UNCHANGED
    to_heads = True
    differs = {"xs": (0,)}  # tokens of the rank


SEQUENCE_TO_HEADS = register(SequenceToHeads())


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
    tokens     of each rank, which may differ and be 0; None: T on every rank. Known on the host and equal on all ranks,
               as H, D and dtype are
    algorithm  "auto" or "push"

    Rank r gets heads r * H / W and on; tokens are in rank order. Bits arrive as they were sent, in new contiguous tensors.
    Captured in a CUDA graph it replays correctly with these ``tokens``, after one call outside. ValueError for arguments that
    do not fit, among them heads that W does not divide. The backward is ``heads_to_sequence``.
    """
    xs, counts = SEQUENCE_TO_HEADS.checked(x, team, tokens, algorithm)
    outs = SEQUENCE_TO_HEADS.dispatch(xs, counts, team.name, algorithm)
    return outs[0] if isinstance(x, torch.Tensor) else outs


class HeadsToSequence(ExchangeHeads):
    name, alias = "heads_to_sequence", "heads-to-sequence"
    bits = UNCHANGED
    to_heads = False


HEADS_TO_SEQUENCE = register(HeadsToSequence())


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
