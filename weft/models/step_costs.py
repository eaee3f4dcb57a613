"""Costs of whole steps beside their launches', fitted by ``python -m benchmarks.step_errors --fit``."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from weft.runtime.files import put

FILE = Path(__file__).parent / "step_costs.json"
# Tokens of a pass from which all multiplications run at the clocks that the power allows.
SUSTAINED_TOKENS = 2048
# Rows up to which a GEMM reads its weights for longer than it multiplies.
FEW_ROWS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Costs of a step.

    attention  µs of decode attention in a step, beside its time in a row: negative, it begins before the previous kernel ends
    sustained  factor of GEMMs and grouped GEMMs in passes of SUSTAINED_TOKENS tokens and more
    fp8        factor of GEMMs of fp8 weights and more than FEW_ROWS rows; fp8_few: of fewer rows, not of experts
    errors     relative errors by kind of step, of committed rows that the fit has not seen
    """

    attention: float = 0.0
    sustained: float = 1.0
    fp8: float = 1.0
    fp8_few: float = 1.0
    errors: tuple[tuple[str, float], ...] = ()

    def seconds(self, op: str, seconds: float, tokens: int) -> float:
        """Time of a launch of ``op`` in a step of ``tokens`` tokens, from its time in a row of its kind."""
        factor = 1.0
        if "matmul" in op and tokens >= SUSTAINED_TOKENS:
            factor *= self.sustained
        if "matmul" in op and "fp8" in op and (tokens > FEW_ROWS or not op.startswith("grouped")):
            factor *= self.fp8 if tokens > FEW_ROWS else self.fp8_few
        beside = self.attention if op in ("decode_attention", "sharded_decode_attention") else 0.0
        return max(0.5e-6, factor * seconds + beside * 1e-6)

    def error(self, kind: str) -> float:
        """Error bar of a kind of step; the largest for another kind."""
        known = dict(self.errors)
        return known.get(kind, max(known.values(), default=0.2))


@lru_cache
def fitted() -> StepCosts:
    """The costs that weft ships."""
    content = json.loads(FILE.read_text())
    return StepCosts(**{**content, "errors": tuple(content["errors"].items())})


def write(costs: StepCosts) -> None:
    content = {name: float(f"{value:.4g}") for name, value in asdict(costs).items() if name != "errors"}
    put(FILE, json.dumps({**content, "errors": dict(costs.errors)}, indent=1) + "\n")
