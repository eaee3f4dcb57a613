"""Providers: ways to solve the problems of a workload, and the verdicts on their answers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from weft.bench.harness.report import RENAMED
from weft.runtime.codec import exchangeable

# Tensors that an op or a step returns.
Result = torch.Tensor | tuple[torch.Tensor, ...]


class Unavailable(Exception):
    """Error: a provider cannot run a problem here. Its message is the reason in the table."""


class Refused(Exception):
    """Error: a design does not take this call, and says so by its op's name. No failure: see ``REFUSED``."""


@exchangeable
@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Comparison of an answer with the reference.

    ``wrong``: reason for its rejection, "" if it is accepted.
    """

    max_abs_error: float = 0.0
    rms_error: float = 0.0
    wrong: str = ""


@dataclass(slots=True, kw_only=True)
class Prepared:
    """Provider set up for one problem.

    run      (number of the set) -> the result; submits to the current stream, and is captured if the provider allows it
    prepare  (number of the set): writes the input where ``run`` reads it, as the kernel before it would; not timed
    local    the result is that of this rank's GEMM alone; for a layer, this rank's rows of it
    compare  result -> (what is checked of it, what that is to be), where the result is not the op's
    roundings  roundings to the dtype that each element goes through, one after the other: more than the last where a library
             stores intermediate results
    in_place the result replaces the input: correct once after each ``prepare``
    close    frees resources that are not freed automatically
    chosen   for a model's step: memory to which ``run`` writes the chosen tokens
    first    for a layer or model: comparisons made before ``run`` is called, as (name, distance on this rank)
    """

    run: Callable[[int], Result]
    prepare: Callable[[int], None] | None = None
    local: bool = False
    compare: Callable[[Result], tuple[Result, Result]] | None = None
    roundings: int = 1
    in_place: bool = False
    close: Callable[[], None] | None = None
    chosen: torch.Tensor | None = None
    first: Callable[[], list[tuple[str, float]]] | None = None

    def release(self) -> None:
        """Close it. An error while a library frees memory must not end the run."""
        if self.close is not None:
            with contextlib.suppress(RuntimeError):
                self.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """Way to solve the problems of ``ops``.

    make        called by all ranks; may be collective and may raise Unavailable
    on_request  on GPUs it runs only if its name or family is given
    rare        on simulated ranks too
    """

    name: str
    ops: tuple[str, ...]
    role: str
    make: Callable[[Any], Prepared]
    on_request: bool = False
    rare: bool = False


def named_by(word: str, name: str) -> bool:
    """True if ``word`` is the provider's name, a former one, or its family's."""
    word = RENAMED.get(word, word)
    return name == word or name.startswith(f"{word}.")
