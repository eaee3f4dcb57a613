"""Pipeline parallelism: layers over stages of a team, hidden states and tokens over rails.

All ranks schedule alike, and run a pass together; decode steps may overlap (weft.engine.graphs). A pass is cut into
microbatches, which go through the stages in order:

    stage s, for each microbatch m:   receive m from s - 1   layers of m   send m to s + 1
    after the last microbatch:        the last stage chooses tokens and sends them to all stages

    stage 0 | m0 | m1 |              | tokens         P stages take M + P - 1 turns for M microbatches: a stage waits for
    stage 1      | m0 | m1 | choose  | tokens         (P - 1) / (M + P - 1) of the turns

order     a microbatch may hold the rest of a prompt whose first tokens are in the one before: each stage computes them in this
          order, so their keys and values are in its cache
progress  the pieces of all rails have one order, by m + s, and of equal ones the higher stage's first. Every rank's are in it,
          tokens after all hidden states, so no two ranks wait for each other
turns     no kernel runs on a rank while it waits for a piece. Two-sided NCCL runs a kernel; a grid of a stage's ranks that wait
          for each other could start on one and find no room beside that kernel on another
reuse     what a rank sends may be written, and what it receives be freed, after ``Rail.after`` and ``Rail.join``
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from weft.engine.params import Kind
from weft.engine.sampling import WIDTH, Choice, choose_tokens, token_logprobs
from weft.models import Decoder
from weft.parallel.step import PagedCache, Step
from weft.runtime.copying import to_device, upload
from weft.runtime.team.rail import Piece, Rail

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


class Pass(NamedTuple):
    """Tokens [T] of a microbatch, and the rows [n] whose logits are asked for; None: all rows.

    chooses  False: no logits are asked for
    """

    tokens: torch.Tensor
    step: Step
    rows: torch.Tensor | None = None
    chooses: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """This rank's place in a pipeline; of one stage, the model as it is.

    team    all ranks
    stage   ranks of this stage, over which its layers are split, as a whole model is
    rail    to the ranks of equal place in the other stages, by stage; None: one stage
    layers  of this stage
    microbatch_tokens  fewest tokens of a microbatch
    model   this stage's layers; None until they are made
    """

    team: Team
    stage: Team
    rail: Rail | None
    layers: range
    microbatch_tokens: int = 1
    model: Decoder | None = None

    @classmethod
    def whole(cls, model: Decoder) -> Pipeline:
        """Pipeline of one stage, the model."""
        return cls(team=model.team, stage=model.team, rail=None, layers=model.span, model=model)

    @classmethod
    def of(cls, team: Team, stages: int, layers: int, microbatch_tokens: int) -> Pipeline:
        """Pipeline of `stages` stages over the ranks of `team`, for a model of `layers` layers. Collective.

        ValueError, on all ranks, for stages that do not divide the ranks, do not fit the nodes, or have no layer.
        """
        if stages == 1:
            return cls(team=team, stage=team, rail=None, layers=range(layers))
        if team.size % stages:
            raise ValueError(f"pipeline_parallel={stages} does not divide world_size={team.size}; pass a divisor of it")
        if stages > layers:
            raise ValueError(f"pipeline_parallel={stages} is more than the model's {layers} layers; lower it")
        size, node_size = team.size // stages, team.shape.node_size
        if size % node_size and node_size % size:
            raise ValueError(
                f"pipeline_parallel={stages}: stages of {size} ranks are neither whole nodes of {node_size} ranks nor equal "
                f"parts of one; pass {team.shape.nodes}, or a divisor or multiple of it"
            )
        stage, rail = team.workspace(("pipeline", stages), lambda: team.split(stages))
        return cls(
            team=team,
            stage=stage,
            rail=rail,
            layers=layers_of(rail.index, stages, layers),
            microbatch_tokens=microbatch_tokens,
        )

    @property
    def stages(self) -> int:
        return 1 if self.rail is None else self.rail.size

    @property
    def is_last(self) -> bool:
        return self.rail is None or self.rail.index == self.rail.size - 1

    @property
    def most_uncut(self) -> int:
        """Tokens of the longest pass of one microbatch."""
        return sys.maxsize if self.rail is None else 2 * self.microbatch_tokens - 1

    def cuts(self, tokens: int) -> list[tuple[int, int]]:
        """First token of each microbatch of a pass, and the end of the last."""
        count = max(1, min(self.stages, tokens // self.microbatch_tokens))
        ends = [tokens * index // count for index in range(count + 1)]
        return list(zip(ends, ends[1:], strict=False))

    def prefill(
        self,
        tokens: torch.Tensor,
        sequences: Sequence[tuple[int, int]],
        pages: torch.Tensor,
        cache: PagedCache,
        rows: Sequence[int],
        slots: Sequence[int] | None = None,
        adapters: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Logits after the tokens `rows` of prompts, where `run` returns them. Collective.

        sequences, pages, slots  as of ``Decoder.prefill_step``; adapters as of ``Step``
        """
        passes, order = [], []
        for begin, end in self.cuts(len(tokens)):
            first, parts = ranges_between(sequences, begin, end)
            of_states = None if slots is None else slots[first : first + len(parts)]
            step = self.model.prefill_step(parts, pages[first : first + len(parts)], cache.page_size, of_states)
            if adapters is not None:
                step = replace(step, adapters=adapters[begin:end])
            here = [index for index, row in enumerate(rows) if begin <= row < end]
            asked = to_device((rows[index] - begin for index in here), tokens.device) if here else None
            passes.append(Pass(tokens[begin:end], step, asked, bool(here)))
            order += here
        logits = self.run(passes, cache)
        if logits is None or order == sorted(order):
            return logits
        return logits[upload(torch.tensor(order).argsort(), tokens.device)]

    def run(self, passes: Sequence[Pass], cache: PagedCache) -> torch.Tensor | None:
        """Forward passes of microbatches: on the last stage this rank's logits of their rows.

        One pass below another; None on the other stages, and where none are asked for. Collective; may be captured in a CUDA
        graph, after one run outside.
        """
        if self.rail is None:
            return self.compute(passes[0], cache)
        logits = []
        for one in passes:
            result = self.compute(one, cache)
            if not self.is_last:
                self.send(result)
            elif result is not None:
                logits.append(result)
        self.rail.join()
        return logits[0] if len(logits) == 1 else torch.cat(logits) if logits else None

    def compute(self, one: Pass, cache: PagedCache) -> torch.Tensor | None:
        """Compute a microbatch: this rank's logits, if asked for, on the last stage; else its rows to `send`."""
        model = self.model
        given = one.tokens if model.is_first else self._receive(one.step.tokens)
        x, residual = model.hidden(given, one.step, cache)
        if not model.is_last:
            return model.hand_over(x, residual, one.step)
        if one.chooses:
            return model.logits(x, residual, one.step, one.rows)
        if model.taps_output:
            model.output(x, residual, one.step)
        return None

    def choose(
        self, logits: torch.Tensor | None, choice: Choice, kind: Kind
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tokens [n] and their rows of log-probabilities, if `kind` asks for them, on all stages. Collective.

        logits  on the last stage
        """
        if not self.is_last:
            return self.chosen(len(choice.position), kind)
        head, fused = self.model.lm_head, self.model.runs_kernels
        tokens, rows = choose_tokens(head, logits, choice, kind, fused=fused), None
        if Kind.LOGPROBS in kind:
            rows = self.logprobs(logits, tokens)
        self.share(tokens)
        return tokens, rows

    def chosen(self, count: int, kind: Kind) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Receive the result of the last stage's `choose` for `count` rows, on another stage."""
        tokens, rows = torch.empty(count, dtype=torch.int64, device=self.team.device), None
        if Kind.LOGPROBS in kind:
            rows = torch.empty(count, WIDTH, device=self.team.device)
            self.share(rows)
        self.share(tokens)
        return tokens, rows

    def logprobs(self, logits: torch.Tensor | None, tokens: torch.Tensor) -> torch.Tensor:
        """Rows of log-probabilities of tokens under the last stage's logits, on all stages. Collective."""
        if self.is_last:
            rows = token_logprobs(self.model.lm_head, logits, tokens)
        else:
            rows = torch.empty(len(tokens), WIDTH, device=tokens.device)
        self.share(rows)
        return rows

    def _receive(self, tokens: int) -> torch.Tensor:
        """This rank's rows of the hidden states of `tokens` tokens, which the stage before sends."""
        size = -(-tokens // self.stage.size), self.model.config.hidden_size
        rows = torch.empty(size, dtype=self.model.dtype, device=self.team.device)
        self.rail.fork()  # its memory may still be read by kernels before
        [mark] = self.rail.exchange([Piece(receive=rows, source=self.rail.index - 1)])
        self.rail.after(mark)
        return rows

    def send(self, rows: torch.Tensor) -> None:
        """Send them to the next stage. Kernels launched later run once it has them."""
        self.rail.fork()
        [mark] = self.rail.exchange([Piece(send=rows, to=self.rail.index + 1)])
        self.rail.after(mark)

    def share(self, x: torch.Tensor) -> None:
        """Have the last stage's `x` on all stages, in place."""
        if self.rail is None:
            return
        last = self.rail.size - 1
        self.rail.fork()
        if self.is_last:
            self.rail.exchange([Piece(send=x, to=stage) for stage in range(last)])
        else:
            self.rail.exchange([Piece(receive=x, source=last)])
        self.rail.join()


def layers_of(stage: int, stages: int, layers: int) -> range:
    """Layers of a stage. The first ones have the one more that is left over, since the last has the head."""
    each, more = divmod(layers, stages)
    first = stage * each + min(stage, more)
    return range(first, first + each + (stage < more))


def ranges_between(sequences: Sequence[tuple[int, int]], begin: int, end: int) -> tuple[int, list[tuple[int, int]]]:
    """Index of the first sequence with tokens in begin .. end of a pass, and (before, length) of each.

    sequences  (before, length) of all, as for ``Decoder.prefill_step``
    """
    ranges, at, skipped = [], 0, 0
    for before, length in sequences:
        start, stop = max(begin, at), min(end, at + length)
        if start < stop:
            ranges.append((before + start - at, stop - start))
        elif not ranges:
            skipped += 1
        at += length
    return skipped, ranges
