"""``Step``: inputs of one step of a model or of its layers, and how a session runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from weft.bench.harness.provider import Prepared
from weft.bench.models.baseline import Cache
from weft.bench.models.sessions import Session, shard_of
from weft.bench.models.steps import is_decode

if TYPE_CHECKING:
    from weft.bench.harness.workload import Shape
    from weft.models.config import DecoderConfig
    from weft.runtime.team.team import Team

FORCED_PROMPT, FORCED_STEPS = 24, 8


class Step:
    """Step of ``level``, the same for all providers.

    sets       layers in rotation, so that weights are cold; a "model" benchmark has one
    tokens     [batch, length], the same on all ranks; x [batch * new, H] too, for single layers
    earlier    input of a single layer's history, [batch * (length - new), H]
    positions  [batch]: of the new tokens, if the step decodes
    """

    def __init__(self, level: str, shape: Shape, config: DecoderConfig, dtype: torch.dtype, team: Team) -> None:
        self.level, self.team, self.config = level, team, config
        self.batch, self.length, self.new = shape.size
        self.decodes, self.is_model = is_decode(shape.size), level == "model"
        self.sets = list(range(1 if self.is_model else config.num_hidden_layers))
        generator = torch.Generator().manual_seed(7)
        tokens = torch.randint(config.vocab_size, (self.batch, self.length), generator=generator)
        self.tokens = tokens.to(team.device)
        self.positions = torch.full((self.batch,), self.length - 1, device=team.device)
        if not self.is_model:
            shared = torch.Generator(team.device).manual_seed(8)
            self.x, self.earlier = (
                torch.empty(self.batch * n, config.hidden_size, dtype=dtype, device=team.device).normal_(
                    generator=shared
                )
                for n in (self.new, self.length - self.new)
            )

    def prepared(self, session: Session, history: Callable[[], Cache] | None) -> Prepared:
        """The session's timed step.

        history  for its caches, the tokens before a decoding step; None: random numbers
        """
        if self.is_model:
            self._remind(session, history)
            return self._of_model(session)
        tokens = self.batch * self.new
        sharded = session.is_sharded(tokens)
        x = shard_of(self.x, self.team) if sharded else self.x
        if self.level == "mlp":
            return Prepared(run=lambda number: session.mlp(number, x, tokens), local=sharded)
        self._remind(session, history)
        at = session.one_each(self.positions) if self.decodes else session.prompts(self.length)
        return Prepared(run=lambda number: session.attend(number, x, at), local=sharded)

    def _remind(self, session: Session, history: Callable[[], Cache] | None) -> None:
        if self.decodes and history is None:
            session.fill_at_random()
        elif self.decodes:
            session.recall(history(), self.length - 1)

    def _of_model(self, session: Session) -> Prepared:
        """Step of a model after the history in the session's caches, which may be of the first sequences only."""
        tokens, positions = self.tokens[: session.batch], self.positions[: session.batch]
        chosen = torch.empty(session.batch, dtype=torch.int64, device=self.team.device)
        last = tokens[:, -1].contiguous()
        at = None if self.decodes else session.prompts(self.length)

        def run(number: int) -> torch.Tensor:
            logits = session.decode(last, positions) if self.decodes else session.prefill(tokens, at)
            chosen.copy_(session.choose(logits))
            return logits

        return Prepared(run=run, prepare=lambda number: chosen.fill_(-1), chosen=chosen)

    def logits(self, session: Session) -> torch.Tensor:
        """Logits of a model's step after the session's own history."""
        if self.decodes and self.length > 1:
            session.prefill(self.tokens[: session.batch, :-1], session.prompts(self.length - 1))
        return self._of_model(session).run(0)

    def remember(self, session: Session) -> None:
        """Fill the session's caches with all tokens of the sequences but the last ones."""
        before = self.length - 1
        if before and self.is_model:
            session.prefill(self.tokens[:, :-1], session.prompts(before))
        elif before:
            at = session.prompts(before)
            for number in self.sets:
                session.attend(number, self.earlier, at)

    def forced(self, session: Session) -> Iterator[torch.Tensor]:
        """Logits after a prompt, and after each of FORCED_STEPS tokens that are given, not chosen."""
        generator = torch.Generator().manual_seed(9)
        size = self.batch, FORCED_PROMPT + FORCED_STEPS
        tokens = torch.randint(self.config.vocab_size, size, generator=generator).to(self.team.device)
        yield session.prefill(tokens[:, :FORCED_PROMPT], session.prompts(FORCED_PROMPT)).clone()
        for place in range(FORCED_PROMPT, size[1]):
            positions = torch.full((self.batch,), place, device=tokens.device)
            yield session.decode(tokens[:, place].contiguous(), positions).clone()
