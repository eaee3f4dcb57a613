"""`make demo`: the built-in model adds two numbers over all ranks, in each mode, and the answers are checked.

Exit status 1, with one line that says what differed, if ranks or modes disagree or the sum is wrong.
"""

from __future__ import annotations

import sys

import weft
from weft.layers import MODES

PROMPT = "123+456="
SUM = "579"


def answer(team: weft.Team, mode: str) -> tuple[str, tuple[int, ...]]:
    """What each rank runs: the answer and its tokens. Rank 0 prints the answer as it comes."""
    show = print if team.rank == 0 else lambda *args, **kwargs: None
    engine = weft.Engine(None, team, mode=mode)
    where = f"{team.size} {'virtual ranks' if team.is_simulated else 'GPUs'}"
    show(f"  {mode:<17} on {where}   {PROMPT}", end="", flush=True)
    pieces = []
    for piece in engine.stream(PROMPT, max_tokens=8):
        show(piece.text, end="", flush=True)
        pieces.append(piece)
    show(flush=True)
    return "".join(piece.text for piece in pieces), tuple(piece.token_id for piece in pieces)


def main() -> None:
    print(f"weft generate --prompt {PROMPT} in every mode", flush=True)
    by_mode = {mode: weft.launch(answer, args=(mode,)) for mode in MODES}
    expected = by_mode[MODES[0]][0]
    for mode, by_rank in by_mode.items():
        for rank, got in enumerate(by_rank):
            if got != expected:
                sys.exit(f"demo: mode {mode}, rank {rank} answered {got}; mode {MODES[0]}, rank 0 answered {expected}")
    if expected[0].strip() != SUM:
        sys.exit(f"demo: {PROMPT}{expected[0]}, but the sum is {SUM}")
    print(f"{PROMPT}{SUM}, the same tokens in every mode and on every rank")


if __name__ == "__main__":
    main()
