"""Workload of a model: steps of it, steps of its layers alone, or complete generations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from weft.bench.harness.limits import Limits
from weft.bench.harness.meters import Meter
from weft.bench.harness.provider import Provider
from weft.bench.harness.workload import DTYPES, Problem, Shape, Workload
from weft.bench.models import generate
from weft.bench.models.baseline import lacks
from weft.bench.models.breakdown import profile
from weft.bench.models.problem import StepProblem
from weft.bench.models.providers import providers_for, unavailable
from weft.bench.models.roofline import roofline
from weft.bench.models.speculate import speculation_of
from weft.bench.models.step import FORCED_PROMPT, FORCED_STEPS
from weft.bench.models.steps import config_of
from weft.console import layout_of
from weft.engine.config import EngineConfig
from weft.models.config import DecoderConfig

if TYPE_CHECKING:
    from weft.runtime.team.team import Team

# Parts of a report's subject after the name of the model.
LAYERS, EXPERTS, QUANTIZED, SPECULATES = " layers", "experts ", "weights in ", "speculating "
CHECK = (
    "a layer's output, a model's logits, against eager torch's on the same weights: root mean square of every row's error "
    "over that of the row, of logits at most 0.05 in bf16 or twice what eager torch itself is from fp32; and that the chosen "
    "tokens are the likeliest; before timing, and once more as timed"
)

FINITE = "finite logits, and that the chosen tokens are the likeliest"
EVERY_LAYER = "outputs of all layers that the timing rotates through"
DATA = (
    "random weights and prompts; the history of a decoding step is eager torch's, the same for all providers; "
    "one step repeated"
)
RANDOM_DATA = "random weights and prompts; one step repeated"
FIRST_TOKENS = "In brackets: time until the first tokens were on the host, and new tokens of all sequences per second."
WHOLE_STEPS = "Whole steps: embedding, layers, head and greedy choice."
LAYERS_DATA = "random; several layers in rotation: 120 MB of weights lie between two uses of one"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWorkload(Workload):
    """Model benchmark: ``name`` is "mlp", "attn", "model" or "generate".

    model, layers   by name, with this many of its layers; None: all
    modes           of weft's models; all if empty
    teacher_forced  before timing, compare logits over several given tokens, besides the step's; for layers, the
                    outputs of all timed ones
    breakdown       break down the time of a step
    random_cache    what comes before a decoding step is random; answers, of prompts too, need only be finite
    expert_layout   of a mixture of experts, as ``weft.models.Decoder`` takes it
    quantization    of the layers' matrices, as ``weft.models.Decoder`` takes it
    speculate       DRAFTS:TOKENS: drafts of a step, and its tokens on average, a stated acceptance
    """

    model: str
    layers: int | None = None
    modes: tuple[str, ...] = ()
    teacher_forced: bool = False
    breakdown: bool = False
    random_cache: bool = False
    expert_layout: str | tuple[int, int] | None = None
    quantization: str | None = None
    speculate: str | None = None

    @property
    def config(self) -> DecoderConfig:
        config = config_of(self.model, self.layers).quantized(self.quantization)
        if self.random_cache:  # as many positions as the longest step has
            longest = max((shape.size[1] for shape in self.shapes), default=1)
            config = replace(config, max_position_embeddings=max(config.max_position_embeddings, longest))
        return config

    @property
    def subject(self) -> str:
        parts = [self.model, *([] if self.layers is None else [f"{self.layers}{LAYERS}"])]
        if self.expert_layout is not None:
            layout = self.expert_layout
            parts.append(EXPERTS + (layout if isinstance(layout, str) else "x".join(map(str, layout))))
        if self.quantization is not None:
            parts.append(QUANTIZED + self.quantization)
        if self.speculate is not None:
            parts.append(SPECULATES + self.speculate)
        return ", ".join(parts)

    @classmethod
    def of_subject(cls, name: str, subject: str, dtype: str) -> ModelWorkload:
        """Workload without shapes whose `subject` this is. ValueError if there is none."""
        model, *parts = subject.split(", ")
        made = cls(name=name, shapes=(), dtype=dtype, model=model)
        for part in parts:
            if part.startswith(EXPERTS):
                made = replace(made, expert_layout=layout_of(part.removeprefix(EXPERTS)))
            elif part.startswith(QUANTIZED):
                made = replace(made, quantization=part.removeprefix(QUANTIZED))
            elif part.startswith(SPECULATES):
                made = replace(made, speculate=part.removeprefix(SPECULATES))
            else:
                made = replace(made, layers=int(part.removesuffix(LAYERS)))
        return made

    @property
    def generates(self) -> bool:
        return self.name == "generate"

    @property
    def is_whole(self) -> bool:
        """True for all layers of a model, False for single layers."""
        return self.name in ("model", "generate")

    @property
    def lacked(self) -> str:
        """Name of blocks that eager torch does not compute, so that weft runs alone; "" if there are none."""
        return "" if self.name == "mlp" else lacks(self.config)

    def available(self) -> tuple[Provider, ...]:
        providers = providers_for(self.name, self.modes, self.words, self.baselines)
        # Eager torch converts all weights in each call: right, and no baseline. A stated acceptance leaves nothing to compare.
        if self.config.quantization is not None or self.speculate is not None:
            return tuple(one for one in providers if one.role == "weft")
        if not self.lacked:
            return providers
        refusing = partial(unavailable, reason=f"it does not compute {self.lacked}")
        return tuple(one if one.role == "weft" else replace(one, make=refusing) for one in providers)

    def problem(self, shape: Shape, team: Team) -> Problem:
        if self.generates:
            speculative = None if self.speculate is None else speculation_of(self.speculate)
            return generate.AnswersProblem(
                shape,
                self.config,
                self.dtype,
                team,
                self.expert_layout,
                speculative,
                compares=speculative is None and not self.lacked,
            )
        return StepProblem(
            self.name,
            shape,
            self.config,
            self.dtype,
            team,
            teacher_forced=self.teacher_forced,
            compares=not (self.random_cache or self.lacked),
            expert_layout=self.expert_layout,
        )

    def parts(self, team: Team, meter: Meter) -> dict[str, float] | None:
        return profile(team, meter) if self.breakdown else None

    def moved_bytes(self) -> int:
        """Size of the hidden states of the largest pass of weft's model."""
        tokens = max((self._tokens_at_once(shape) for shape in self.shapes), default=0)
        return tokens * self.config.hidden_size * DTYPES[self.dtype].itemsize

    def _tokens_at_once(self, shape: Shape) -> int:
        batch, length, new = shape.size
        if self.generates:
            return max(batch, min(batch * length, EngineConfig().chunk_tokens))
        return batch * (max(new, FORCED_PROMPT) if self.teacher_forced and self.name == "model" else new)

    @property
    def check_rule(self) -> str:
        if self.generates:
            return generate.CHECK if self.speculate is None and not self.lacked else generate.COUNTED
        if self.random_cache or self.lacked:
            return FINITE
        if not self.teacher_forced:
            return CHECK
        before = f"logits after a prompt and {FORCED_STEPS} given tokens" if self.name == "model" else EVERY_LAYER
        return f"{CHECK}; {before}, likewise"

    def protocol(self, common: dict[str, Any], quick: bool) -> dict[str, Any]:
        if self.generates:
            return generate.protocol(quick) | {"check": self.check_rule}
        is_random = bool(self.random_cache or self.lacked)
        data = (RANDOM_DATA if is_random else DATA) if self.name == "model" else LAYERS_DATA
        return common | {"data": f"{data}; caches random, another one for each provider" if is_random else data}

    def floor_us(self, world_size: int, size: Sequence[int], limits: Limits | None) -> float | None:
        """The roofline of a step; of a generation, of the step of a token in the middle of the answers."""
        if self.generates:
            batch, prompt, new = size
            size = (batch, prompt + (new + 1) // 2, 1)
        level = "model" if self.generates else self.name
        bound = roofline(level, self.config, world_size, size, self.dtype, limits)
        return None if bound is None else bound.floor

    @property
    def axis(self) -> str:
        return "prompts" if self.generates else "step"

    @property
    def timed(self) -> str:
        return "a token after the first" if self.generates else "a step"

    @property
    def in_milliseconds(self) -> bool:
        return self.is_whole

    @property
    def time_unit(self) -> str:
        return "ms per token after the first" if self.generates else "ms" if self.in_milliseconds else "µs"

    @property
    def step_layers(self) -> int:
        return self.config.num_hidden_layers if self.is_whole else 1

    @property
    def notes(self) -> tuple[str, ...]:
        notes = (FIRST_TOKENS,) if self.generates else (WHOLE_STEPS,) if self.is_whole else ()
        if not self.lacked:
            return notes
        checked = "counted" if self.generates else "only checked to be finite, after random caches"
        return (*notes, f"Eager torch does not compute {self.lacked}: answers are {checked}.")
