"""Flags of ``weft bench mlp | attn | model | generate``, and their plans. weft.bench.command calls it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.bench.models.names import LEVELS
from weft.console import check_simulable

if TYPE_CHECKING:
    from weft.bench.models.workload import LevelPlan

# Flags without effect on generate, which times complete generations and always checks every token.
OF_STEPS = ("--run-type", "--breakdown", "--eager")


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelFlags:
    """Flags as typed; omitted ones are None or empty. ValueError for invalid values."""

    model: str | None = None
    layers: int | None = None
    run_type: str | None = None
    batches: tuple[int, ...] = ()
    contexts: tuple[int, ...] = ()
    modes: tuple[str, ...] = ()
    check: bool = False
    breakdown: bool = False

    def given(self) -> list[str]:
        """Command-line names of the given flags."""
        names = {
            "--model": self.model, "--layers": self.layers, "--run-type": self.run_type, "--bsz": self.batches,
            "--ctx": self.contexts, "--mode": self.modes, "--check": self.check, "--breakdown": self.breakdown,
        }  # fmt: skip
        return [name for name, value in names.items() if value not in (None, ()) and value is not False]

    def check_op(self, op: str, shapes: tuple[str, ...], eager: bool) -> None:
        """Raise ValueError for model flags with another op, and for contradictory flags."""
        if op not in LEVELS:
            for flag in self.given():
                raise ValueError(f"{flag} belongs to {', '.join(levels_of(flag))}; {op} takes --shapes")
            return
        from weft.bench.models.providers import OLD_NAMES, WEFT_MODES
        from weft.bench.models.steps import RUN_TYPES

        if shapes and (self.run_type or self.batches or self.contexts):
            raise ValueError("--shapes says all that --run-type, --bsz and --ctx say; leave one of them out")
        if op == "generate" and self.run_type:
            raise ValueError(f"--run-type {self.run_type}: generate prefills and decodes; leave it out")
        for name, given in (("--breakdown", self.breakdown), ("--eager", eager)):
            if op == "generate" and given:
                others = ", ".join(levels_of(name))
                raise ValueError(
                    f"{name} belongs to single steps ({others}); generate times whole answers; leave it out"
                )
        if self.run_type is not None and self.run_type not in RUN_TYPES:
            raise ValueError(f"--run-type {self.run_type} is unknown; choose one of {', '.join(RUN_TYPES)}")
        for mode in self.modes:
            if OLD_NAMES.get(mode, mode) not in WEFT_MODES:
                raise ValueError(f"--mode {mode} is unknown; choose from {', '.join(WEFT_MODES)}")


def levels_of(flag: str) -> list[str]:
    """Model benchmarks that accept the flag."""
    return [level for level in LEVELS if level != "generate" or flag not in OF_STEPS]


def level_plan(
    level: str,
    flags: LevelFlags,
    shapes: tuple[str, ...],
    world_size: int,
    *,
    simulated: bool,
    dtype: str,
    providers: tuple[str, ...],
    check_only: bool,
    quick: bool,
    eager: bool,
    command: str,
) -> LevelPlan:
    """Plan of ``weft bench LEVEL`` at one world size. Simulated ranks use the tiny model by default."""
    from weft.bench.models.steps import DEFAULT_MODEL, TINY, check_split, config_of, parse_steps, words_of
    from weft.bench.models.workload import LevelPlan

    model = flags.model or (TINY if simulated else DEFAULT_MODEL)
    config = config_of(model, flags.layers)
    if simulated:
        check_simulable(model, config, f"--model {TINY}")
    check_split(model, config, world_size)
    words = shapes
    if flags.run_type or flags.batches or flags.contexts:
        words = words_of(level, flags.run_type, flags.batches, flags.contexts)
    return LevelPlan(
        op=level,
        model=model,
        layers=flags.layers,
        shapes=parse_steps(level, words, config, tiny=simulated),
        dtype=dtype,
        providers=providers,
        modes=flags.modes,
        teacher_forced=flags.check and level != "generate",
        breakdown=flags.breakdown,
        check_only=check_only,
        quick=quick,
        eager=eager,
        command=command,
    )
