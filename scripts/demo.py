"""`make demo`: the built-in models add two numbers over all ranks, in each mode, and the answers are checked.

The first is dense, the second has experts, and the demo shows which of them compute each character. Exit status 1, with one
line that says what differed, if ranks or modes disagree or the sum is wrong.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch
from torch.nn import functional as F

import weft
from weft.layers import MODES
from weft.models import Decoder
from weft.models.builtin import PATHS
from weft.parallel import plain
from weft.parallel.recipe import StepPlan
from weft.parallel.reference import Reference
from weft.parallel.tensors import MoEWeights
from weft.text.tokenizer import load_tokenizer

PROMPT = "123+456="
SUM = "579"
EXPERTS = "adder-moe"

ABOUT_EXPERTS = """
Its layers have {experts} small MLPs each, the experts, in place of a large one. Every rank holds {held} of them. A router
scores the experts for each character. The best {chosen} compute it, on the ranks that hold them, and the ranks add up
the results. Characters, and the experts that the first layer's router chose for them:
"""


def answer(team: weft.Team, model: str | None, mode: str, fused: bool | None) -> tuple[str, tuple[int, ...]]:
    """What each rank runs: the answer and its tokens. Rank 0 prints the answer as it comes."""
    show = print if team.rank == 0 else lambda *args, **kwargs: None
    engine = weft.Engine(model, team, mode=mode, fused=fused)
    where = f"{team.size} {'virtual ranks' if team.is_simulated else 'GPUs'}"
    show(f"  {mode:<17} on {where}   {PROMPT}", end="", flush=True)
    pieces = []
    for piece in engine.stream(PROMPT, max_tokens=8):
        show(piece.text, end="", flush=True)
        pieces.append(piece)
    show(flush=True)
    return "".join(piece.text for piece in pieces), tuple(piece.token_id for piece in pieces)


def routing(team: weft.Team) -> None:
    """Print which experts the first layer chooses for each character, and the ranks that hold them."""
    chosen = []

    def watched(x: torch.Tensor, w: MoEWeights) -> torch.Tensor:
        logits, _ = w.logits(F.linear(x, w.router))
        chosen.append(plain.routing_of(logits, w.bias, w.gating)[0].tolist())
        return plain.experts(x, w)

    model = Decoder.from_pretrained(PATHS[EXPERTS], team, mode="reference")
    tokens = torch.tensor(load_tokenizer(PATHS[EXPERTS]).encode(PROMPT).ids, device=team.device)
    pages = torch.ones((1, 1), dtype=torch.int32, device=team.device)
    step = model.prefill_step([(0, len(tokens))], pages)
    step = replace(step, plan=StepPlan(recipe=Reference(team=team, experts=watched)))
    model(tokens, step, model.new_cache(2))
    if team.rank == 0:
        options, held = model.config.experts, model.layers[0].mlp.experts.count
        print(ABOUT_EXPERTS.format(experts=options.num_experts, held=held, chosen=options.num_experts_per_tok))
        for character, experts in zip(PROMPT, chosen[0], strict=True):
            print(f"  {character}   " + "   ".join(f"expert {expert} of rank {expert // held}" for expert in experts))
        print(flush=True)


def check(model: str | None, modes: tuple[str, ...], fused: bool | None = None) -> None:
    """Let a model answer in some modes; exit unless all ranks give the sum by the same tokens."""
    by_mode = {mode: weft.launch(answer, args=(model, mode, fused)) for mode in modes}
    expected = by_mode[modes[0]][0]
    for mode, by_rank in by_mode.items():
        for rank, got in enumerate(by_rank):
            if got != expected:
                sys.exit(f"demo: mode {mode}, rank {rank} answered {got}; mode {modes[0]}, rank 0 answered {expected}")
    if expected[0].strip() != SUM:
        sys.exit(f"demo: {PROMPT}{expected[0]}, but the sum is {SUM}")
    print(f"{PROMPT}{SUM}, the same tokens in every mode and on every rank\n", flush=True)


def main() -> None:
    print(f"weft generate --prompt {PROMPT} in every mode", flush=True)
    check(None, MODES)
    print(f"weft generate --model {EXPERTS} --prompt {PROMPT}: a mixture of experts", flush=True)
    weft.launch(routing)
    check(EXPERTS, ("reference", "sequence_parallel", "replicated"), fused=True)


if __name__ == "__main__":
    main()
