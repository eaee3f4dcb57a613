"""Flags of ``weft bench mlp | attn | model | generate``, and their workloads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.arguments import did_you_mean
from weft.bench.models.names import DEFAULT_MODEL, LEVELS, MODELS, RUN_TYPES, TINY, WEFT_MODES, is_model
from weft.console import check_simulable, layout_of, one_of
from weft.parallel.modes import OLD_MODES

if TYPE_CHECKING:
    from weft.bench.models.workload import ModelWorkload

# Flags without effect on generate, which times complete generations and always checks every token.
OF_STEPS = ("--run-type", "--breakdown", "--eager", "--random-cache")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlags:
    """Flags as typed; omitted ones are None or empty. ValueError for invalid values."""

    model: str | None = None
    layers: int | None = None
    run_type: str | None = None
    batches: tuple[int, ...] = ()
    contexts: tuple[int, ...] = ()
    modes: tuple[str, ...] = ()
    check: bool = False
    breakdown: bool = False
    random_cache: bool = False
    expert_layout: str | None = None

    def given(self) -> list[str]:
        """Command-line names of the given flags."""
        names = {
            "--model": self.model, "--layers": self.layers, "--run-type": self.run_type, "--bsz": self.batches,
            "--ctx": self.contexts, "--mode": self.modes, "--check": self.check, "--breakdown": self.breakdown,
            "--random-cache": self.random_cache, "--expert-layout": self.expert_layout,
        }  # fmt: skip
        return [name for name, value in names.items() if value not in (None, ()) and value is not False]

    def check_ops(self, ops: dict[str, tuple[str, ...]], eager: bool) -> None:
        """Raise ValueError for contradictory flags, and for those that none of ``ops`` (with shapes) takes."""
        for flag in [*self.given(), *(["--eager"] if eager and all(map(is_model, ops)) else [])]:
            takers = levels_of(flag)
            if any(op in takers for op in ops):
                continue
            if "generate" in ops:
                raise ValueError(
                    f"{flag} belongs to single steps ({', '.join(takers)}); generate times whole answers; leave it out"
                )
            raise ValueError(f"{flag} belongs to {', '.join(takers)}; {', '.join(ops)} takes --shapes")
        if not any(map(is_model, ops)):
            return
        shapes = [words for op, words in ops.items() if is_model(op) and words]
        if shapes and (self.run_type or self.batches or self.contexts):
            raise ValueError("--shapes says all that --run-type, --bsz and --ctx say; leave one of them out")
        if self.model is not None:
            one_of("model", self.model, MODELS)
        if self.run_type is not None:
            one_of("run-type", self.run_type, RUN_TYPES)
        if self.random_cache and self.check:
            raise ValueError("--check compares answers, which --random-cache makes meaningless; leave one of them out")
        for mode in self.modes:
            if OLD_MODES.get(mode, mode) not in WEFT_MODES:
                near = did_you_mean(mode, (*WEFT_MODES, *OLD_MODES))
                raise ValueError(f"--mode {mode} is unknown; choose from {', '.join(WEFT_MODES)}{near}")

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
        layout = layout_of(self.expert_layout)
        if layout is not None:
            if config.experts is None:
                raise ValueError(f"--expert-layout {self.expert_layout}: {model} has no experts; leave it out")
            check_layout("--expert-layout", layout, world_size)
        if self.run_type or self.batches or self.contexts:
            shapes = words_of(level, self.run_type, self.batches, self.contexts)
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
        )


def levels_of(flag: str) -> list[str]:
    """Model benchmarks that accept the flag."""
    return [level for level in LEVELS if level != "generate" or flag not in OF_STEPS]
