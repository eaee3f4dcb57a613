"""A decode step on static tensors, launched kernel by kernel or captured in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from weft.engine.adjustments import Adjustments
from weft.engine.logprobs import WIDTH
from weft.engine.params import Kind
from weft.engine.pipeline import Pass, Pipeline
from weft.engine.sampling import Choice
from weft.engine.slots import Slots, rows_of
from weft.parallel.step import PagedCache


class DecodeGraph:
    """Decode step of batch slots: tokens[slot] at positions[slot] → next tokens[slot], in place.

    slots        positions, page tables and sampling parameters
    tokens       [max_batch] int64, the newest of each slot
    logprobs     [max_batch, WIDTH] fp32: rows of weft.engine.logprobs, of slots that ask for them
    cache        keys and values of this stage; None: not allocated yet
    adjustments  None until a request asks for changes of logits

    Collective. It reads and writes tensors at fixed addresses only. Slots are given as a slice: the first of them, or with a
    step.
    """

    def __init__(self, pipeline: Pipeline, slots: Slots, page_size: int) -> None:
        self.pipeline, self.slots, self.page_size = pipeline, slots, page_size
        max_batch, device = len(slots.positions), pipeline.team.device
        self.tokens = torch.zeros(max_batch, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(max_batch, WIDTH, dtype=torch.float32, device=device)
        self.cache: PagedCache | None = None
        self.adjustments: Adjustments | None = None
        self._kept: dict[int, torch.Tensor] = {}  # logits by number of slots

    def run(self, batch: int, kind: Kind, between: Callable[[], None] | None = None) -> None:
        """Decode slots 0 .. batch - 1; `between`: called between the forward pass and the choice of tokens."""
        logits = self.forward(batch)
        if between is not None:
            between()
        self.choose(slice(batch), kind, logits)

    def forward(self, batch: int) -> torch.Tensor | None:
        """This rank's logits after the slots' tokens, where Pipeline.run returns them."""
        slots = self.slots.positions[:batch], self.slots.table[:batch]
        return self.pipeline.decode(self.tokens[:batch], *slots, self.cache)

    def forward_and_keep(self, batch: int) -> None:
        """Forward pass whose logits `choose_kept` reads: a step with grammars has a graph for each of both."""
        if (logits := self.forward(batch)) is not None:
            if batch not in self._kept:
                self._kept[batch] = torch.empty_like(logits)
            self._kept[batch].copy_(logits)

    def choose_kept(self, batch: int, kind: Kind) -> None:
        """Choose tokens by the logits of `forward_and_keep`."""
        self.choose(slice(batch), kind, self._kept.get(batch))

    def compute(self, slots: slice) -> torch.Tensor | None:
        """Result of this stage's layers for these slots alone, as of Pipeline.compute."""
        tokens, positions, table = (rows_of(x, slots) for x in (self.tokens, self.slots.positions, self.slots.table))
        one = Pass(tokens, self.pipeline.model.decode_step(positions, table, self.page_size))
        return self.pipeline.compute(one, self.cache)

    def choose(self, slots: slice, kind: Kind, logits: torch.Tensor | None) -> None:
        """Choose the slots' next tokens, by logits on the last stage, and advance their positions."""
        choice = Choice(
            temperature=rows_of(self.slots.temperature, slots),
            top_p=rows_of(self.slots.top_p, slots),
            top_k=rows_of(self.slots.top_k, slots),
            min_p=rows_of(self.slots.min_p, slots),
            seed=rows_of(self.slots.seed, slots),
            position=self.next_positions(slots),
            adjustments=self.adjustments,
            rows=slots,
        )
        tokens, logprobs = self.pipeline.choose(logits, choice, kind)
        self.put(slots, tokens, logprobs)
        if Kind.ADJUSTED in kind and self.pipeline.is_last:
            self.note(choice.rows, tokens, choice.position)

    def note(self, rows: slice | torch.Tensor, tokens: torch.Tensor, position: torch.Tensor) -> None:
        """Note chosen tokens among the changes of logits, as ``Adjustments.note``."""
        self.adjustments.note(rows, tokens, position, fused=self.pipeline.model.runs_kernels)

    def next_positions(self, slots: slice) -> torch.Tensor:
        """Positions of the tokens that these slots get; -1 stays."""
        positions = self.slots.positions[slots]
        positions.add_(positions >= 0)
        return rows_of(self.slots.positions, slots)

    def put(self, slots: slice, tokens: torch.Tensor, logprobs: torch.Tensor | None) -> None:
        """Set the slots' newest tokens, and their rows of log-probabilities if there are some."""
        self.tokens[slots].copy_(tokens)
        if logprobs is not None:
            self.logprobs[slots].copy_(logprobs)

    @contextmanager
    def on_empty_slots(self) -> Iterator[None]:
        """Decode steps within write no cache, and leave `tokens` and positions as they are."""
        kept = self.tokens.clone(), self.slots.positions.clone()
        self.slots.positions.fill_(-1)
        yield
        self.tokens.copy_(kept[0])
        self.slots.positions.copy_(kept[1])


def without_autograd(device: torch.device) -> AbstractContextManager:
    """Inference mode, to save host time; not on virtual ranks, which share a thread."""
    return torch.inference_mode() if device.type == "cuda" else nullcontext()
