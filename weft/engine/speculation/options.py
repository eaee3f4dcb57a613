"""Options of speculative decoding.

A drafter proposes tokens that may follow, and one pass of the model verifies them all. A token is still drawn by the noise
of (seed, position, token id), and a draft is accepted where it equals that token: so a request has the same answer with and
without speculation, whatever is drafted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from weft.arguments import (
    check_bool,
    check_choice,
    check_int,
    check_number,
    check_optional,
    did_you_mean,
    positive,
    quoted,
)

METHODS = ("ngram", "draft_model", "eagle3", "mtp")
# Methods that take a model beside the one whose tokens are drafted.
WITH_MODEL = ("draft_model", "eagle3")
DRAFT_HEADS = ("model", "fp8")
# Drafts of a step at most: a pass of nine tokens a sequence.
MOST_DRAFTS = 8
# Tokens of an n-gram that is looked up, at most, and by default.
MOST_LOOKED_UP, LOOKED_UP = 16, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Options of speculative decoding, by vLLM's names. ValueError for impossible values.

    method                  "ngram": what followed the last tokens where they stood before in the prompt or answer;
                            "draft_model": by a smaller model of the same tokenizer; "eagle3": by an EAGLE-3 head of the model;
                            "mtp": by the MTP head in the model's checkpoint
    model                   for "draft_model" and "eagle3": a checkpoint directory or name, as for Engine, or a configuration
                            of weft.models, for random weights
    num_speculative_tokens  tokens drafted for a sequence in a step at most, 1 .. 8
    prompt_lookup_max, prompt_lookup_min  for "ngram": lengths of the n-grams that are looked up, the longest first; where one
                            is not given it is the other one, or 5
    adaptive                True: a step drafts up to num_speculative_tokens, as measured acceptance and the batch make it pay,
                            and none where it does not; False: always num_speculative_tokens
    draft_head              for "mtp", what drafts are chosen by: "model": the model's head; "fp8": a copy of it in blocks of
                            fp8, half as many bytes to read. Answers are the same, some drafts are not
    rejection_sample_method  "strict": a draft is accepted where it equals the token that is drawn; "synthetic", for benchmarks:
                            as many as synthetic_acceptance_length says, so answers mean nothing
    synthetic_acceptance_length  tokens of a step on average, 1 .. num_speculative_tokens + 1
    """

    method: str = "ngram"
    num_speculative_tokens: int
    model: Any = None
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    adaptive: bool = True
    draft_head: str = "model"
    rejection_sample_method: str = "strict"
    synthetic_acceptance_length: float | None = None

    def __post_init__(self) -> None:
        check_choice("method", self.method, METHODS)
        check_int("num_speculative_tokens", self.num_speculative_tokens, 1, MOST_DRAFTS)
        check_bool("adaptive", self.adaptive)
        check_choice("draft_head", self.draft_head, DRAFT_HEADS)
        check_choice("rejection_sample_method", self.rejection_sample_method, ("strict", "synthetic"))
        length, most = self.synthetic_acceptance_length, self.num_speculative_tokens + 1
        if (length is None) == (self.rejection_sample_method == "synthetic"):
            raise ValueError(
                'rejection_sample_method="synthetic" and synthetic_acceptance_length go together; pass both, or none'
            )
        if length is not None:
            check_number("synthetic_acceptance_length", length, 1, most, f"in 1 .. num_speculative_tokens + 1 = {most}")
        lookup = {name: getattr(self, name) for name in ("prompt_lookup_max", "prompt_lookup_min")}
        self._check_model()
        if self.method != "ngram":
            if (one := next((name for name, value in lookup.items() if value is not None), None)) is not None:
                raise ValueError(f'{one}={quoted(lookup[one])} is for method="ngram"; leave it out')
            return
        given = [check_optional(positive, name, value) for name, value in lookup.items()]
        most, least = (one or given[1 - index] or LOOKED_UP for index, one in enumerate(given))
        if most > MOST_LOOKED_UP:
            raise ValueError(f"prompt_lookup_max={most} is more than {MOST_LOOKED_UP}; lower it")
        if least > most:
            raise ValueError(f"prompt_lookup_min={least} is more than prompt_lookup_max={most}; lower it")
        object.__setattr__(self, "prompt_lookup_max", most)
        object.__setattr__(self, "prompt_lookup_min", least)

    def _check_model(self) -> None:
        if self.method in WITH_MODEL and self.model is None:
            raise ValueError(f'method="{self.method}" needs model, the one that drafts; pass it')
        if self.method not in WITH_MODEL and self.model is not None:
            raise ValueError(
                f'model={quoted(self.model)} is for method="draft_model" or "eagle3"; leave it out, or pass that method'
            )
        if self.draft_head != "model" and self.method != "mtp":
            raise ValueError(f'draft_head={quoted(self.draft_head)} is for method="mtp"; leave it out')

    @classmethod
    def of(cls, name: str, given: object) -> SpeculativeConfig:
        """The options of a SpeculativeConfig, a mapping, or JSON text. ValueError for another value or name."""
        if isinstance(given, cls):
            return given
        options = given
        if isinstance(given, str):
            try:
                options = json.loads(given)
            except ValueError as error:
                raise ValueError(f"{name}={quoted(given)} is not JSON: {error}") from None
        if not isinstance(options, Mapping):
            raise ValueError(f'{name}={quoted(given)} is not an object such as {{"num_speculative_tokens": 4}}')
        known = [field.name for field in fields(cls)]
        if (unknown := next((option for option in options if option not in known), None)) is not None:
            raise ValueError(
                f"{name}: {quoted(unknown)} is not one of {', '.join(known)}{did_you_mean(unknown, known)}"
            )
        if "num_speculative_tokens" not in options:
            raise ValueError(f"{name} has no num_speculative_tokens; pass 1 .. {MOST_DRAFTS}")
        return cls(**options)

    @property
    def lengths(self) -> list[int]:
        """Draft lengths that a step may have, ascending: each has CUDA graphs."""
        most = self.num_speculative_tokens
        if not self.adaptive:
            return [most]
        return [0, *(length for length in (1, 2, 4) if length < most), most]
