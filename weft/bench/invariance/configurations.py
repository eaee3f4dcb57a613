"""Configurations of an engine whose answers must have the same bits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.engine.config import EngineConfig

DRAFTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """Options of an engine, and the share of the requests that it answers.

    share    of the requests, for batches that take long
    scored   log-probabilities of prompts are asked for, so that no prefix is shared
    crowded  the KV cache holds a third of what a full batch takes, so requests are preempted
    finished no answers: log-probabilities of prompts and answers in one forward pass
    """

    batch: int
    chunk: int = 4096
    prefix: bool = False
    drafts: bool = False
    graphs: bool = True
    share: float = 1.0
    crowded: bool = False
    finished: bool = False

    @property
    def scored(self) -> bool:
        return not self.prefix

    def __str__(self) -> str:
        parts = [f"batch {self.batch}", f"chunks of {self.chunk}", "graphs" if self.graphs else "eager"]
        parts += ["prefix cache"] * self.prefix + ["n-gram drafts"] * self.drafts + ["crowded cache"] * self.crowded
        return ", ".join(parts) + (": prompt and answer in one pass" if self.finished else "")

    def engine(self, base: EngineConfig, longest: int) -> EngineConfig:
        """Options of the engine; longest: tokens of a prompt and its answer at most."""
        each = -(-longest // base.page_size)
        pages = 1 + (max(each + 1, self.batch * each // 3) if self.crowded else self.batch * each)
        drafts: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": DRAFTS, "adaptive": False}
        return replace(
            base,
            max_batch=self.batch,
            chunk_tokens=self.chunk,
            mixed_chunk_tokens=min(self.chunk, base.mixed_chunk_tokens),
            prefix_caching=self.prefix,
            cuda_graph=self.graphs,
            pages=pages,
            speculative=drafts if self.drafts else None,
        )


def configurations(simulated: bool, quick: bool = False) -> list[Configuration]:
    """The first one is what the rest is compared with. quick: fewer, one for each option."""
    if simulated:
        of_chunk = [
            Configuration(batch=4, chunk=256),
            Configuration(batch=1, chunk=16, share=0.5),
            Configuration(batch=3, chunk=24, prefix=True, drafts=True),
            Configuration(batch=2, chunk=256, crowded=True),
        ]
        return [*of_chunk, Configuration(batch=4, chunk=40, finished=True)]
    if quick:
        return [
            Configuration(batch=128),
            Configuration(batch=32, chunk=256, prefix=True, drafts=True),
            Configuration(batch=8, share=0.1, graphs=False, crowded=True),
            Configuration(batch=1, share=0.02),
            Configuration(batch=32, chunk=256, finished=True),
        ]
    return [
        Configuration(batch=128),
        Configuration(batch=128, chunk=256, prefix=True),
        Configuration(batch=128, chunk=256, drafts=True),
        Configuration(batch=96, graphs=False, prefix=True),
        Configuration(batch=64, chunk=256, crowded=True),
        Configuration(batch=32),
        Configuration(batch=32, prefix=True, drafts=True),
        Configuration(batch=8, chunk=256, share=0.1, graphs=False),
        Configuration(batch=8, prefix=True, drafts=True, share=0.1),
        Configuration(batch=1, share=0.02),
        Configuration(batch=1, chunk=256, prefix=True, drafts=True, share=0.02),
        Configuration(batch=128, finished=True),
        Configuration(batch=32, chunk=256, finished=True),
    ]
