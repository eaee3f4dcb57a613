"""Text in, text out, over all ranks of a team."""

from weft.engine.answers import Completion, Piece, Stats
from weft.engine.engine import Engine
from weft.engine.llm import LLM
from weft.engine.params import SamplingParams
from weft.engine.runner import Runner

__all__ = ["LLM", "Completion", "Engine", "Piece", "Runner", "SamplingParams", "Stats"]
