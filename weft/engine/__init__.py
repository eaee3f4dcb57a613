"""Text in, text out, over all ranks of a team."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.engine.answers import Completion, Fault, Load, Piece, Stats
    from weft.engine.async_llm import AsyncLLM, Request
    from weft.engine.config import EngineConfig
    from weft.engine.engine import Engine
    from weft.engine.llm import LLM
    from weft.engine.params import SamplingParams
    from weft.engine.runner import Runner
    from weft.engine.speculation.options import SpeculativeConfig
    from weft.text.structure import StructuredOutputsParams

# Loaded on first use: the command line needs the defaults of EngineConfig before it needs torch and Triton.
_MODULES = {
    "AsyncLLM": "async_llm",
    "Completion": "answers",
    "Engine": "engine",
    "EngineConfig": "config",
    "Fault": "answers",
    "LLM": "llm",
    "Load": "answers",
    "Piece": "answers",
    "Request": "async_llm",
    "Runner": "runner",
    "SamplingParams": "params",
    "SpeculativeConfig": "speculation.options",
    "Stats": "answers",
    "StructuredOutputsParams": "params",  # of weft.text.structure
}
__all__ = [
    "AsyncLLM", "Completion", "Engine", "EngineConfig", "Fault", "LLM", "Load", "Piece", "Request", "Runner",
    "SamplingParams", "SpeculativeConfig", "Stats", "StructuredOutputsParams",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'weft.engine' has no attribute {name!r}")
    return getattr(importlib.import_module(f"weft.engine.{_MODULES[name]}"), name)
