"""How the next token is chosen: the parameters, and top-p sampling that every rank computes alike."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """temperature 0: the most likely token; else one drawn from softmax(logits / temperature).

    top_p: only the most likely tokens that together reach it are drawn
    seed:  the same seed and prompts give the same tokens
    stop:  strings that end an answer
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        if not isinstance(self.max_new_tokens, int) or self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens!r} is not a positive integer")
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature={self.temperature!r} is not 0 (greedy) or a positive number")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p!r} is not in (0, 1]; 1 keeps every token")
        if not isinstance(self.seed, int) or not 0 <= self.seed < 1 << 63:
            raise ValueError(f"seed={self.seed!r} is not an integer in 0 .. 2**63 - 1")
        if not all(isinstance(stop, str) and stop for stop in self.stop):
            raise ValueError(f"stop={self.stop!r} holds something that is not a non-empty string")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def uniforms(self, steps: int, batch: int) -> torch.Tensor:
        """[steps, batch] in [0, 1), drawn on the CPU so that every rank and every device has the same."""
        return torch.rand(steps, batch, generator=torch.Generator().manual_seed(self.seed))


def sample_top_p(
    logits: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor, uniform: torch.Tensor
) -> torch.Tensor:
    """token[b] = the first word whose cumulative kept probability exceeds uniform[b] * (all that is kept)

    logits [B, V] fp32; temperature, top_p: fp32 scalars on the device; uniform [B] in [0, 1) → tokens [B] int64.
    Kept are the most likely words that together reach top_p. The sum runs in the order of words, not of probabilities:
    there, two all but equal ones that swap places between two world sizes would swap answers. It is of integers (units
    of 2**-40), because on a GPU a floating-point scan may differ from run to run in its last bit, and two ranks that
    once choose different tokens never agree again.
    """
    probabilities = torch.softmax((logits - logits.amax(-1, keepdim=True)) / temperature, dim=-1)
    ordered, words = probabilities.sort(dim=-1, descending=True, stable=True)
    mass = (ordered.double() * 2**40).long()
    before = mass.cumsum(dim=-1) - mass
    kept = before < (top_p.double() * mass.sum(dim=-1, keepdim=True)).long().clamp(min=1)
    by_word = torch.zeros_like(mass).scatter(-1, words, mass * kept)
    target = (uniform.double() * by_word.sum(dim=-1)).long()
    return (by_word.cumsum(dim=-1) <= target[:, None]).sum(dim=-1).clamp(max=logits.shape[-1] - 1)
