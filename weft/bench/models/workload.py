"""Plans of model benchmarks: steps of a model, and the protocol."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weft.bench.models import generate
from weft.bench.models.bench import LevelBench
from weft.bench.models.breakdown import profile
from weft.bench.models.problem import StepProblem
from weft.bench.models.providers import choose
from weft.bench.models.step import FORCED_STEPS
from weft.bench.models.steps import config_of
from weft.bench.ops.providers import Provider
from weft.bench.ops.shapes import DTYPES, Shape
from weft.bench.ops.workload import Plan
from weft.models.config import DecoderConfig

if TYPE_CHECKING:
    from weft.bench.harness.meters import Meter
    from weft.bench.harness.runner import Bench
    from weft.runtime.team.team import Team

CHECK = (
    "a layer's output, a model's logits, against eager torch's on the same weights: root mean square of every row's error "
    "over that of the row, of logits at most 0.05 in bf16 or twice what eager torch itself is from fp32; and that the chosen "
    "tokens are the likeliest; before timing, and once more as timed"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelPlan(Plan):
    """Plan of a model benchmark, ``op``.

    model, layers   by name, with this many of its layers; None: all
    modes           of weft's models; all if empty
    teacher_forced  before timing, compare logits over several given tokens, besides those of the step itself; for layers, the
                    outputs of all timed ones
    breakdown       break down the time of a step
    """

    model: str
    layers: int | None = None
    modes: tuple[str, ...] = ()
    teacher_forced: bool = False
    breakdown: bool = False

    @property
    def config(self) -> DecoderConfig:
        return config_of(self.model, self.layers)

    @property
    def subject(self) -> str:
        return self.model if self.layers is None else f"{self.model}, {self.layers} layers"

    def chosen(self, simulated: bool = False) -> tuple[Provider, ...]:
        return choose(self.op, self.modes, self.providers)

    def bench(self, team: Team, empty_us: float | None, say: Callable[[str], None]) -> Bench:
        return (generate.GenerateBench if self.op == "generate" else LevelBench)(team, self, empty_us, say)

    def problem(self, shape: Shape, team: Team) -> Any:
        return (generate.AnswersProblem if self.op == "generate" else StepProblem)(self, shape, team)

    def parts(self, team: Team, meter: Meter | None) -> dict[str, float] | None:
        return profile(team, meter) if self.breakdown and meter is not None else None

    def moved_bytes(self) -> int:
        """Size of the hidden states of the longest prompts."""
        tokens = max((shape.size[0] * shape.size[1] for shape in self.shapes), default=0)
        return tokens * self.config.hidden_size * DTYPES[self.dtype].itemsize

    def protocol(self, simulated: bool, empty_us: float | None) -> dict[str, Any]:
        if self.op == "generate" and not simulated:
            return generate.protocol(self.quick)
        found = Plan.protocol(self, simulated, empty_us) | {"check": generate.CHECK if self.op == "generate" else CHECK}
        if self.op == "model":
            found["data"] = (
                "random weights and prompts; the history of a decoding step is eager torch's, the same for all providers; "
                "one step repeated"
            )
        if self.teacher_forced and self.op == "model":
            found["teacher-forced"] = f"logits after a prompt and {FORCED_STEPS} given tokens, likewise"
        elif self.teacher_forced and self.op != "generate":
            found["every layer"] = "outputs of all layers of mlp and attn that the timing rotates through, likewise"
        return found
