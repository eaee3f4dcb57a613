"""Text in, text out, over all ranks of a team."""

from weft.engine.engine import Completion, Engine, Piece, Stats

__all__ = ["Completion", "Engine", "Piece", "Stats"]
