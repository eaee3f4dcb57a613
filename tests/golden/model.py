"""The built-in model: logits of given tokens, and an engine's greedy and sampled answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

import weft
from tests.teacher_forced import all_logits
from weft.models import builtin, load_model

PROMPTS = ("123+456=", "9+9=", "40+2=", "777+1=")
PLANS = (("torch", False), ("gemm_ar", False), ("gemm_ar", True), ("ag_rs", False), ("ag_rs", True))


def logits(team: Any, mode: str, fused: bool) -> torch.Tensor:
    model = load_model(builtin.PATH, team, mode=mode, fused=fused)
    generator = torch.Generator().manual_seed(1)
    return all_logits(model, torch.randint(model.config.vocab_size, (3, 9), generator=generator))


def answers(team: Any, mode: str) -> list[Any]:
    engine = weft.Engine(None, team, mode=mode)
    kinds = ({}, {"temperature": 1.5, "top_p": 0.9, "seed": 3})
    made = [engine.generate(PROMPTS, max_tokens=6, **kind) for kind in kinds]
    return [(answer.text, tuple(answer.token_ids)) for answers in made for answer in answers]


def cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    for world_size in (1, 2, 4):
        for mode, fused in PLANS:
            name = f"{mode}{'-fused' if fused else ''}-W{world_size}"
            yield f"model/logits-{name}", lambda w=world_size, args=(mode, fused): weft.simulate(logits, w, args=args)
        for mode in ("torch", "gemm_ar", "ag_rs", "auto"):
            yield (
                f"model/answers-{mode}-W{world_size}",
                lambda w=world_size, m=mode: weft.simulate(answers, w, args=(m,)),
            )
