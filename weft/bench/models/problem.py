"""One step of one model at one rank: models, the eager baseline's answer, and comparisons with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from weft.bench.harness.provider import Prepared, Result, Verdict
from weft.bench.harness.workload import DTYPES, Problem, Shape, together
from weft.bench.models.baseline import Baseline, Cache
from weft.bench.models.roofline import active_share, weights
from weft.bench.models.sessions import Session, TorchSession, build, in_mode, shard_of
from weft.bench.models.step import FORCED_PROMPT, FORCED_STEPS, Step
from weft.runtime.capabilities import COLD_BYTES
from weft.runtime.codec import exchangeable

if TYPE_CHECKING:
    from weft.layers.moe import Layout
    from weft.models import Decoder
    from weft.models.config import DecoderConfig
    from weft.runtime.team.team import Team

# Largest RMS of a row's error over the RMS of the eager baseline's row. Both round, at different places: over the 4 layers of a
# small model that is 0.01 .. 0.03 in bf16; a wrong RoPE base gives 0.27 and swapped halves of a fused weight 0.2 or more.
MODEL_LIMIT = {"bf16": 0.05, "fp16": 0.01, "fp32": 1e-4}
LAYER_LIMIT = {"bf16": 0.02, "fp16": 0.004, "fp32": 1e-4}
# With weights in fp8 a row that differs in its last bit may round to the next byte, a 16th away.
QUANTIZED_LIMIT = 0.08
# Rounding adds up over layers, to 0.07 in 64 random ones. The limit is at least this multiple of the eager baseline's distance
# from fp32, since two models that round independently may be further apart than MODEL_LIMIT. A few sequences show it.
NOISE_FACTOR, NOISE_ROWS = 2.0, 2


@exchangeable
class Choice(NamedTuple):
    """This rank's largest logit, the chosen token id, and its logit if it is one of this rank's."""

    best: float
    token: int
    logit: float | None


class StepProblem(Problem):
    """Problem of one step of ``level``: weft's models and the baseline share their weights.

    teacher_forced  compare answers before timing: logits over given tokens; of layers, all that are timed
    compares        answers with the eager baseline's; else what comes before a decoding step is random, for each provider anew,
                    and answers need only be finite
    expert_layout   of a mixture of experts, as ``weft.models.Decoder`` takes it
    """

    def __init__(
        self,
        level: str,
        shape: Shape,
        config: DecoderConfig,
        dtype: str,
        team: Team,
        *,
        teacher_forced: bool = False,
        compares: bool = True,
        expert_layout: Layout | None = None,
    ) -> None:
        self.shape, self.team, self.teacher_forced, self.compares = shape, team, teacher_forced, compares
        self.dtype, self.dtype_name = DTYPES[dtype], dtype
        if level != "model":
            on_gpus = team.device.type == "cuda"
            layers = (
                cold_layers(level, config, team.size, self.dtype, shape)
                if on_gpus
                else min(2, config.num_hidden_layers)
            )
            config = replace(config, num_hidden_layers=layers)
        self.config, self.expert_layout = config, expert_layout
        self.share(self.weights())
        self.step = Step(level, shape, config, self.dtype, team)
        self.sets, self.replicas = self.step.sets, 1 if level == "model" else max(2, len(self.step.sets))
        self._answers: dict[bool, torch.Tensor] = {}
        self._history: Cache | None = None
        self._noise = 0.0
        self._forced: list[torch.Tensor] = []

    def session(self, model: Baseline | None = None, batch: int | None = None) -> TorchSession:
        """Session of the eager baseline."""
        return TorchSession(model or self.baseline, batch or self.step.batch, self.step.length)

    def prepared(self, session: Session) -> Prepared:
        return self.step.prepared(session, self.history if self.compares else None)

    def history(self) -> Cache:
        """Keys and values before a decoding step, by eager torch; all providers start from them."""
        if self._history is None:
            session = self.session()
            self.step.remember(session)
            self._history = session.cache
        return self._history

    # --- models --------------------------------------------------------------------------------------------------------

    def model(self, mode: str) -> Decoder:
        """weft's model on the baseline's weights."""
        return in_mode(self._weights, mode)

    @property
    def baseline(self) -> Baseline:
        if self._baseline is None:
            self.share(self.weights())
        return self._baseline

    def weights(self) -> Decoder:
        """Model with random weights."""
        return build(self.config, self.team, "torch", self.dtype, self.expert_layout)

    def share(self, model: Decoder | None) -> None:
        """Let the baseline use the weights of ``model``, filled as `build` does.

        None: it frees the weights it has, before a model makes the same ones; they are made again unless one is shared.
        """
        self._weights, self._baseline = model, None if model is None else Baseline(model)

    # --- the baseline's answer --------------------------------------------------------------------------------------

    def expect(self) -> None:
        if not self.compares:
            return

        def answered() -> float:
            self.answer()
            return self.distance_to_fp32()

        distance = together(self.team, answered, launches=f"eager torch at {self.shape.label}")
        self.agree(self.team.exchange(distance))

    def distance_to_fp32(self) -> float:
        """Distance of the eager baseline's logits on this rank from fp32, of a few sequences; 0 for layers."""
        if not self.step.is_model:
            return 0.0
        few = min(self.step.batch, NOISE_ROWS)
        rounded, exact = (self.step.logits(self.session(m, few)) for m in (self.baseline, self.baseline.in_fp32()))
        return self.distance(rounded, exact)[1]

    def agree(self, distances: Sequence[float]) -> None:
        """Set the limit from ``distances`` to fp32 of all ranks."""
        self._noise = max(distances)

    @property
    def limit(self) -> float:
        """Largest accepted `distance`, equal on all ranks after `agree`."""
        least = (MODEL_LIMIT if self.step.is_model else LAYER_LIMIT)[self.dtype_name]
        if self.config.quantization is not None:
            least = max(least, QUANTIZED_LIMIT)
        return max(least, NOISE_FACTOR * self._noise)

    def answer(self, local: bool = False) -> torch.Tensor:
        """Expected result of set 0. ``local``: this rank's rows of it, if tokens are sharded."""
        if False not in self._answers:
            self._answers[False] = self.prepared(self.session()).run(0)
        if local and True not in self._answers:
            self._answers[True] = shard_of(self._answers[False], self.team)
        return self._answers[local]

    def poison(self, prepared: Prepared) -> None:
        if not self.compares:
            return
        expected = self.answer(prepared.local)
        torch.empty(expected.shape, dtype=self.dtype, device=expected.device).fill_(math.nan)

    def forget(self) -> None:
        self._answers.clear()
        self._forced.clear()

    # --- comparisons before timing ----------------------------------------------------------------------------------

    def compare_first(self, make: Callable[[int, int], Session]) -> list[tuple[str, float]]:
        """(name, `distance` on this rank) between a session's answers and the eager baseline's.

        For a model the logits after given tokens; for layers the output of each that the timing rotates through. ``make``:
        (batch, max_len) -> the session.
        """
        if self.step.is_model:
            size = self.step.batch, FORCED_PROMPT + FORCED_STEPS
            if not self._forced:
                self._forced = list(self.step.forced(TorchSession(self.baseline, *size)))
            pairs = zip(self.step.forced(make(*size)), self._forced, strict=True)
            names = ["after the prompt", *(f"after given token {number}" for number in range(1, FORCED_STEPS + 1))]
            return [(name, self._apart(*pair)) for name, pair in zip(names, pairs, strict=True)]
        compared, expected = (self.prepared(one) for one in (make(self.step.batch, self.step.length), self.session()))
        distances = []
        for number in self.sets:
            right = expected.run(number)
            right = shard_of(right, self.team) if compared.local else right
            distances.append((f"of layer {number}", self._apart(compared.run(number), right)))
        return distances

    def _apart(self, actual: torch.Tensor, expected: torch.Tensor) -> float:
        return self.distance(actual, expected)[1] if actual.shape == expected.shape else math.inf

    def rehearse(self, prepared: Prepared, what: str) -> str:
        if prepared.first is None:
            return ""
        for ranks in zip(*self.team.exchange(together(self.team, prepared.first, launches=what)), strict=True):
            worst = max(distance for _, distance in ranks)
            if not worst <= self.limit:
                return f"wrong answer: relative RMS {worst:.3g} of a row {ranks[0][0]}, more than {self.limit:g}"
        return ""

    # --- judging ----------------------------------------------------------------------------------------------------

    def check(self, prepared: Prepared, out: Result, what: str) -> Verdict:
        verdict = Problem.check(self, prepared, out, what)
        if verdict.wrong or prepared.chosen is None:
            return verdict
        choices = self.team.exchange(together(self.team, lambda: self.choices(out, prepared.chosen)))
        return replace(verdict, wrong=self.wrong_choice(choices))

    def verdict(self, prepared: Prepared, out: torch.Tensor) -> Verdict:
        return self.judge(out, prepared.local)

    def judge(self, actual: torch.Tensor, local: bool = False) -> Verdict:
        if not self.compares:
            real = actual[:, : self.baseline.real] if self.step.is_model else actual
            return Verdict(wrong="" if bool(real.isfinite().all()) else "NaN or infinite numbers")
        expected = self.answer(local)
        if tuple(actual.shape) != tuple(expected.shape):
            wrong = f"shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
            return Verdict(max_abs_error=math.inf, rms_error=math.inf, wrong=wrong)
        worst, relative = self.distance(actual, expected)
        wrong = ""
        if not relative <= self.limit:
            wrong = f"relative RMS {relative:.3g} of a row to the eager baseline, more than {self.limit:g}"
        return Verdict(max_abs_error=worst, rms_error=relative, wrong=wrong)

    def distance(self, actual: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
        """(largest error, largest relative RMS of a row's error); NaN counts as infinite."""
        real = self.baseline.real if self.step.is_model else actual.shape[1]  # without padding
        actual, expected = actual[:, :real].float(), expected[:, :real].float()
        if actual.numel() == 0:
            return 0.0, 0.0
        error = (actual - expected).nan_to_num(math.inf, math.inf, math.inf)
        scale = expected.square().mean(dim=1).sqrt().clamp_min(torch.finfo(torch.float32).tiny)
        # Padding rows of a shard are zero in both.
        return float(error.abs().max()), float((error.square().mean(dim=1).sqrt() / scale).max())

    def choices(self, logits: torch.Tensor, tokens: torch.Tensor) -> list[Choice]:
        """This rank's `Choice` for each sequence's token in ``tokens`` [batch], from its ``logits``."""
        start, size = self.baseline.start, logits.shape[1]
        best = logits.max(dim=-1).values.tolist()
        return [
            Choice(best[row], token, float(logits[row, token - start]) if start <= token < start + size else None)
            for row, token in enumerate(tokens.tolist())
        ]

    def wrong_choice(self, all_ranks: Sequence[Sequence[Choice]]) -> str:
        """Reason why the chosen tokens are not the likeliest of all ranks; "" if they are.

        ``all_ranks``: the ranks' `choices`.
        """
        for row, ranks in enumerate(zip(*all_ranks, strict=True)):
            best = max(choice.best for choice in ranks)
            for rank, choice in enumerate(ranks):
                if not 0 <= choice.token < self.config.vocab_size:
                    return f"rank {rank}: sequence {row}: {choice.token} is no token id"
                if choice.logit is not None and choice.logit != best:
                    return f"rank {rank}: sequence {row}: token {choice.token} is not the likeliest"
        return ""


def cold_layers(level: str, config: DecoderConfig, world_size: int, dtype: torch.dtype, shape: Shape) -> int:
    """Number of layers that puts COLD_BYTES between two uses of one.

    Only experts that some token chooses count.
    """
    sizes, (batch, _, new) = weights(config, world_size), shape.size
    names = ("gate_up", "down") if level == "mlp" else ("qkv", "o")
    nbytes = sum(sizes[name] for name in names) * (dtype.itemsize if config.quantization is None else 1)
    if level == "mlp" and config.experts is not None:
        nbytes *= active_share(config, batch * new)
    return min(24, 1 + math.ceil(COLD_BYTES / nbytes))
