"""weft: communication overlapped with computation across GPUs, in plain Python on stock Triton."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft import language, layers, models, ops, tiles
    from weft.check import check
    from weft.engine import LLM, AsyncLLM, Engine, SamplingParams, SpeculativeConfig, StructuredOutputsParams
    from weft.runtime.codec import exchangeable
    from weft.runtime.launch import launch
    from weft.runtime.simulate import simulate
    from weft.runtime.team.rail import Piece
    from weft.runtime.team.team import Team, init
    from weft.trace import trace

__version__ = "0.2.0"

# Name -> the module that defines it. Loaded on first use: `import weft` costs nothing and needs neither GPU nor greenlet.
_EXPORTS = {
    "init": "weft.runtime.team.team",
    "Team": "weft.runtime.team.team",
    "Piece": "weft.runtime.team.rail",
    "launch": "weft.runtime.launch",
    "simulate": "weft.runtime.simulate",
    "exchangeable": "weft.runtime.codec",
    "check": "weft.check",
    "trace": "weft.trace",
    "AsyncLLM": "weft.engine",
    "Engine": "weft.engine",
    "LLM": "weft.engine",
    "SamplingParams": "weft.engine",
    "SpeculativeConfig": "weft.engine",
    "StructuredOutputsParams": "weft.engine",
    "ops": "weft.ops",
    "tiles": "weft.tiles",
    "layers": "weft.layers",
    "models": "weft.models",
    "language": "weft.language",
}
__all__ = [
    "AsyncLLM", "check", "Engine", "exchangeable", "init", "language", "launch", "layers", "LLM", "models", "ops",
    "Piece", "SamplingParams", "simulate", "SpeculativeConfig", "StructuredOutputsParams", "Team", "tiles", "trace",
    "__version__",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    module = importlib.import_module(_EXPORTS[name])
    return module if module.__name__ == f"weft.{name}" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
