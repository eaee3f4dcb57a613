"""One step of one model at one rank: inputs, models, and the eager baseline's answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from weft.bench.models.baseline import Baseline, Cache
from weft.bench.models.roofline import weights
from weft.bench.models.sessions import TorchSession, build, in_mode, shard_of
from weft.bench.models.step import remember, step, step_alone
from weft.bench.models.steps import is_decode
from weft.bench.ops.problem import COLD_BYTES, Verdict
from weft.bench.ops.providers import Attempt
from weft.bench.ops.shapes import DTYPES, Shape
from weft.runtime.codec import exchangeable

if TYPE_CHECKING:
    from weft.bench.models.workload import LevelPlan
    from weft.models import Decoder
    from weft.runtime.team.team import Team

# Largest RMS of a row's error over the RMS of the eager baseline's row. Both round, at different places: over the 4 layers of a
# small model that is 0.01 .. 0.03 in bf16; a wrong RoPE base gives 0.27 and swapped halves of a fused weight 0.2 or more.
MODEL_LIMIT = {"bf16": 0.05, "fp16": 0.01, "fp32": 1e-4}
LAYER_LIMIT = {"bf16": 0.02, "fp16": 0.004, "fp32": 1e-4}
# Rounding adds up over layers, to 0.07 in 64 random ones. The limit is at least this multiple of the eager baseline's distance
# from fp32, since two models that round independently may be further apart than MODEL_LIMIT. A few sequences show it.
NOISE_FACTOR, NOISE_ROWS = 2.0, 2


@exchangeable
class Choice(NamedTuple):
    """This rank's largest logit, the chosen token id, and its logit if it is one of this rank's."""

    best: float
    word: int
    logit: float | None


class StepProblem:
    """Problem of one step.

    `sets` are layers in rotation, so that weights are cold; a "model" benchmark has one.

    tokens     [batch, length], the same on all ranks; x [batch * new, H] likewise, for single layers
    positions  [batch]: of the new tokens, if the step decodes
    """

    def __init__(self, plan: LevelPlan, shape: Shape, team: Team) -> None:
        self.op, self.shape, self.team, self.plan = plan.op, shape, team, plan
        self.dtype, self.dtype_name = DTYPES[plan.dtype], plan.dtype
        self.batch, self.length, self.new = shape.size
        self.decodes = is_decode(shape.size)
        config = plan.config
        if self.op != "model":
            layers = self._cold_layers() if team.device.type == "cuda" else min(2, config.num_hidden_layers)
            config = replace(config, num_hidden_layers=layers)
        self.config = config
        self.sets = list(range(1 if self.op == "model" else config.num_hidden_layers))
        self.share(build(config, team, "torch", self.dtype))
        generator = torch.Generator().manual_seed(7)
        tokens = torch.randint(config.vocab_size, (self.batch, self.length), generator=generator)
        self.tokens = tokens.to(team.device)
        self.positions = torch.full((self.batch,), self.length - 1, device=team.device)
        shared = torch.Generator(team.device).manual_seed(8)
        self._inputs = [
            torch.empty(self.batch * n, config.hidden_size, dtype=self.dtype, device=team.device).normal_(
                generator=shared
            )
            for n in ((self.new, self.length - self.new) if self.op != "model" else ())
        ]
        self._answers: dict[bool, torch.Tensor] = {}
        self._history: Cache | None = None
        self._noise = 0.0
        self.forced: list[torch.Tensor] = []  # see attempts.compare_forced

    @property
    def replicas(self) -> int:
        return 1 if self.op == "model" else max(2, len(self.sets))

    def expect(self) -> float:
        """Make the eager baseline's answer and return `distance_to_fp32`."""
        self.answer()
        return self.distance_to_fp32()

    def distance_to_fp32(self) -> float:
        """Distance of the eager baseline's logits on this rank from fp32, of a few sequences; 0 for layers."""
        if self.op != "model":
            return 0.0
        few = min(self.batch, NOISE_ROWS)
        both = self.baseline, self.baseline.in_fp32()
        found, exact = (step_alone(self, TorchSession(model, few, self.length)) for model in both)
        return self.distance(found, exact)[1]

    def agree(self, distances: Sequence[float]) -> None:
        """Set the limit from ``distances`` to fp32 of all ranks."""
        self._noise = max(distances)

    @property
    def limit(self) -> float:
        """Largest accepted `distance`, equal on all ranks after `agree`."""
        if self.op != "model":
            return LAYER_LIMIT[self.dtype_name]
        return max(MODEL_LIMIT[self.dtype_name], NOISE_FACTOR * self._noise)

    @property
    def x(self) -> torch.Tensor:
        return self._inputs[0]

    @property
    def earlier(self) -> torch.Tensor:
        """Input of a single layer's history, [batch * (length - new), H]."""
        return self._inputs[1]

    def history(self) -> Cache:
        """Keys and values before a decoding step, by eager torch; all providers start from them."""
        if self._history is None:
            self._history = remember(self, TorchSession(self.baseline, self.batch, self.length))
        return self._history

    def _cold_layers(self) -> int:
        """Number of layers that puts COLD_BYTES between two uses of one."""
        sizes = weights(self.plan.config, self.team.size)
        names = ("gate_up", "down") if self.op == "mlp" else ("qkv", "o")
        nbytes = sum(sizes[name] for name in names) * self.dtype.itemsize
        return min(24, 1 + math.ceil(COLD_BYTES / nbytes))

    def model(self, mode: str) -> Decoder:
        """weft's model on the baseline's weights."""
        return in_mode(self._weights, mode)

    @property
    def baseline(self) -> Baseline:
        if self._baseline is None:
            self.share(build(self.config, self.team, "torch", self.dtype))
        return self._baseline

    def share(self, model: Decoder | None) -> None:
        """Let the baseline use the weights of ``model``, filled as `build` does.

        None: it frees its own weights, before a model makes the same ones; they are made again unless one is shared.
        """
        self._weights, self._baseline = model, None if model is None else Baseline(model)

    # --- the baseline's answer --------------------------------------------------------------------------------------

    def answer(self, local: bool = False) -> torch.Tensor:
        """Expected result of set 0. ``local``: this rank's rows of it, if tokens are sharded."""
        if False not in self._answers:
            self._answers[False] = step(self, TorchSession(self.baseline, self.batch, self.length)).run(0)
        if local and True not in self._answers:
            self._answers[True] = shard_of(self._answers[False], self.team)
        return self._answers[local]

    def forget(self) -> None:
        self._answers.clear()
        self.forced.clear()

    # --- judging ----------------------------------------------------------------------------------------------------

    def verdict(self, attempt: Attempt, actual: torch.Tensor) -> Verdict:
        """Verdict on the result of ``attempt.run`` on this rank."""
        return self.judge(actual, attempt.local)

    def judge(self, actual: torch.Tensor, local: bool = False) -> Verdict:
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
        words = self.baseline.real if self.op == "model" else actual.shape[1]
        actual, expected = actual[:, :words].float(), expected[:, :words].float()
        if actual.numel() == 0:
            return 0.0, 0.0
        error = (actual - expected).nan_to_num(math.inf, math.inf, math.inf)
        scale = expected.square().mean(dim=1).sqrt().clamp_min(torch.finfo(torch.float32).tiny)
        # Padding rows of a shard are zero in both.
        return float(error.abs().max()), float((error.square().mean(dim=1).sqrt() / scale).max())

    def wrong_first(self, all_ranks: Sequence[Sequence[tuple[str, float]]]) -> str:
        """Reason to reject the first comparisons of any rank; "" if there is none.

        ``all_ranks``: the ranks' `compare_first`.
        """
        for ranks in zip(*all_ranks, strict=True):
            worst = max(distance for _, distance in ranks)
            if not worst <= self.limit:
                return f"wrong answer: relative RMS {worst:.3g} of a row {ranks[0][0]}, more than {self.limit:g}"
        return ""

    def choices(self, logits: torch.Tensor, tokens: torch.Tensor) -> list[Choice]:
        """This rank's `Choice` for each sequence's token in ``tokens`` [batch], from its ``logits``."""
        start, size = self.baseline.start, logits.shape[1]
        best = logits.max(dim=-1).values.tolist()
        return [
            Choice(best[row], word, float(logits[row, word - start]) if start <= word < start + size else None)
            for row, word in enumerate(tokens.tolist())
        ]

    def wrong_choice(self, all_ranks: Sequence[Sequence[Choice]]) -> str:
        """Reason why the chosen tokens are not the likeliest of all ranks; "" if they are.

        ``all_ranks``: the ranks' `choices`.
        """
        for row, ranks in enumerate(zip(*all_ranks, strict=True)):
            best = max(choice.best for choice in ranks)
            for rank, choice in enumerate(ranks):
                if not 0 <= choice.word < self.config.vocab_size:
                    return f"rank {rank}: sequence {row}: {choice.word} is no token id"
                if choice.logit is not None and choice.logit != best:
                    return f"rank {rank}: sequence {row}: token {choice.word} is not the likeliest"
        return ""
