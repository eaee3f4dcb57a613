"""Flags of ``weft bench mlp | attn | model | generate``, and their workloads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.arguments import did_you_mean
from weft.bench.models.names import DEFAULT_MODEL, LEVELS, MODELS, RUN_TYPES, TINY, WEFT_MODES, is_model
from weft.bench.models.speculate import speculation_of
from weft.console import TypedFlags, check_simulable, layout_of, numbers, one_of, option, words
from weft.parallel.modes import OLD_MODES

if TYPE_CHECKING:
    from weft.bench.models.workload import ModelWorkload
    from weft.models.config import DecoderConfig

# Flags without effect on generate, which times complete generations and always checks every token.
OF_STEPS = ("--run-type", "--breakdown", "--eager", "--random-cache")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlags(TypedFlags):
    """Flags of model benchmarks as typed; omitted ones are None. ValueError for invalid values."""

    model: str | None = option(None, "Published model, such as qwen3-32b, with random weights [of layers and models]")
    layers: int | None = option(None, "Number of the model's layers [default: all]")
    run_type: str | None = option(None, "Steps to time: prefill or decode [default: both]")
    bsz: str | None = option(None, "Numbers of sequences, as in 1,32")
    ctx: str | None = option(None, "Tokens per sequence, as in 128,1024")
    mode: str | None = option(None, "Parallel modes: auto, sequence_parallel, replicated [default: all]")
    check: bool = option(False, "Compare logits over given tokens, or all layers, before timing [generate: always]")
    breakdown: bool = option(False, "Print which kernels a step's time goes to, with -v each by its name")
    random_cache: bool = option(
        False, "Decode after a random cache, of any length; compare no answers, also after prompts"
    )
    expert_layout: str | None = option(
        None, "Layout of a mixture of experts: whole, slices, or EPxTP [default: whole where the ranks divide them]"
    )
    quantization: str | None = option(None, "Put the layers' matrices in fp8 as they are filled: fp8, fp8_per_channel")

    speculate: str | None = option(
        None,
        "DRAFTS:TOKENS such as 3:2.5: verify drafts by look-up, and take this number of tokens a step on average, a "
        "stated acceptance; answers mean nothing and are only counted [generate]",
    )

    @property
    def modes(self) -> tuple[str, ...]:
        return words("mode", self.mode)

    @property
    def steps(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Numbers of sequences, and tokens of each."""
        return numbers("bsz", self.bsz), numbers("ctx", self.ctx)

    def check_ops(self, ops: dict[str, tuple[str, ...]], eager: bool) -> None:
        """Raise ValueError for contradictory flags, and for flags that none of ``ops`` (with shapes) takes."""
        self._check_takers(ops, eager)
        if not any(map(is_model, ops)):
            return
        shapes = [given for op, given in ops.items() if is_model(op) and given]
        if shapes and (self.run_type or any(self.steps)):
            raise ValueError("--shapes says all that --run-type, --bsz and --ctx say; leave one of them out")
        for flag, value, known in (("model", self.model, MODELS), ("run-type", self.run_type, RUN_TYPES)):
            if value is not None:
                one_of(flag, value, known)
        if self.speculate is not None:
            speculation_of(self.speculate)
        if self.quantization is not None:
            from weft.models.quantization import MADE  # needs torch

            one_of("quantization", self.quantization, MADE)
        if self.random_cache and self.check:
            raise ValueError("--check compares answers, which --random-cache makes meaningless; leave one of them out")
        for mode in self.modes:
            if OLD_MODES.get(mode, mode) not in WEFT_MODES:
                near = did_you_mean(mode, (*WEFT_MODES, *OLD_MODES))
                raise ValueError(f"--mode {mode} is unknown; choose from {', '.join(WEFT_MODES)}{near}")

    def _check_takers(self, ops: dict[str, tuple[str, ...]], eager: bool) -> None:
        for flag in [*self.given(), *(["--eager"] if eager and all(map(is_model, ops)) else [])]:
            takers = levels_of(flag)
            if any(op in takers for op in ops):
                continue
            if "generate" in ops:
                raise ValueError(
                    f"{flag} belongs to single steps ({', '.join(takers)}); generate times whole answers; leave it out"
                )
            raise ValueError(f"{flag} belongs to {', '.join(takers)}; {', '.join(ops)} takes --shapes")

    def _check_blocks(self, level: str, model: str, config: DecoderConfig) -> None:
        """Raise ValueError for what ``level`` does not do with the model's blocks."""
        from weft.bench.models.baseline import lacks

        lacked = lacks(config)
        if lacked and level == "attn":
            raise ValueError(
                f"--model {model}: attn does not time {lacked}; take weft bench model with --layers 1 or more"
            )
        if lacked and self.check and level == "model":
            raise ValueError(
                f"--check compares with eager torch, which does not compute {lacked} of {model}; leave it out"
            )

    def workload(
        self,
        level: str,
        shapes: tuple[str, ...],
        world_size: int,
        *,
        simulated: bool,
        dtype: str,
        words: tuple[str, ...],
    ) -> ModelWorkload:
        """Workload of ``weft bench LEVEL`` at one world size. Simulated ranks use the tiny model by default."""
        from weft.bench.models.steps import check_split, config_of, parse_steps, words_of
        from weft.bench.models.workload import ModelWorkload
        from weft.layers.moe import check_layout

        model = self.model or (TINY if simulated else DEFAULT_MODEL)
        config = config_of(model, self.layers)
        if simulated:
            check_simulable(model, config, f"--model {TINY}")
        check_split(model, config, world_size)
        self._check_blocks(level, model, config)
        layout = layout_of(self.expert_layout)
        if layout is not None:
            if config.experts is None:
                raise ValueError(f"--expert-layout {self.expert_layout}: {model} has no experts; leave it out")
            check_layout("--expert-layout", layout, world_size)
        if self.run_type or any(self.steps):
            shapes = words_of(level, self.run_type, *self.steps)
        return ModelWorkload(
            name=level,
            model=model,
            layers=self.layers,
            shapes=parse_steps(level, shapes, config, tiny=simulated, random_cache=self.random_cache),
            dtype=dtype,
            words=words,
            modes=self.modes,
            teacher_forced=self.check and level != "generate",
            breakdown=self.breakdown,
            random_cache=self.random_cache,
            expert_layout=layout,
            quantization=self.quantization,
            speculate=self.speculate,
        )


def levels_of(flag: str) -> list[str]:
    """Model benchmarks that accept the flag."""
    if flag == "--speculate":
        return ["generate"]
    return [level for level in LEVELS if level != "generate" or flag not in OF_STEPS]
