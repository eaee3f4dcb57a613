"""Plan of ``weft plan`` that an engine follows: its options, and predicted beside measured times."""

from __future__ import annotations

import json
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from weft.arguments import is_integer, quoted
from weft.runtime.files import put, text_of

if TYPE_CHECKING:
    from weft.models import DecoderConfig

SCHEMA = 1
# Options of an EngineConfig that a plan decides, and their types in JSON.
OPTIONS = (
    "mode", "expert_layout", "max_seq_len", "max_batch", "page_size", "pages", "kv_cache_dtype", "quantization",
    "chunk_tokens", "mixed_chunk_tokens", "context_parallel", "pipeline_parallel", "speculative",
)  # fmt: skip
# Sizes by which a model is told from another one.
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
# Steps whose times are kept, of a batch size, and the fewest that are reported.
KEPT, FEWEST = 4096, 8


class StepPlanned(NamedTuple):
    """Decode step of a plan: ``batch`` sequences at ``length`` tokens. error: relative."""

    batch: int
    length: int
    seconds: float
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPlan:
    """Parts of a plan's file that an engine takes.

    file        as it was named
    model, sizes  name that was planned, and its sizes by name
    gpu         driver's name
    world_size  ranks of a server, of all stages
    options     of the EngineConfig, by name
    steps       decode steps by batch
    """

    file: str
    model: str
    sizes: tuple[tuple[str, int], ...]
    gpu: str
    world_size: int
    options: tuple[tuple[str, Any], ...]
    steps: tuple[StepPlanned, ...]

    def check_model(self, config: DecoderConfig) -> None:
        """ValueError, with the size that differs, for another model."""
        for name, size in self.sizes:
            if (here := getattr(config, name)) != size:
                raise ValueError(
                    f"plan {self.file} is for {self.model}: {name}={size}, and this model has {here}; plan this one"
                )

    def check_gpu(self, gpu: str) -> None:
        if gpu != self.gpu:
            raise ValueError(f"plan {self.file} is for {self.gpu}, and this machine has {gpu}; plan for it")

    def check_world_size(self, world_size: int | None) -> int:
        """The plan's; ValueError for another one."""
        if world_size is not None and world_size != self.world_size:
            raise ValueError(_differs(self.file, "world_size", world_size, self.world_size))
        return self.world_size


def read(path: str | PathLike[str]) -> ServingPlan:
    """Plan of a file. ValueError, with file and field, for another content."""
    try:
        content = json.loads(text_of(Path(path)))
        if not isinstance(content, dict) or content.get("schema") != SCHEMA or content.get("kind") != "weft plan":
            raise ValueError(f"it is not a plan of weft plan, schema {SCHEMA}")
        server, options = content["server"], content["server"]["engine"]
        if unknown := [name for name in options if name not in OPTIONS]:
            raise ValueError(f"server.engine.{unknown[0]} is not one of {', '.join(OPTIONS)}")
        if not is_integer(server["world_size"]) or server["world_size"] < 1:
            raise ValueError(f"server.world_size={quoted(server['world_size'])} is not a positive integer")
        if isinstance(options.get("expert_layout"), list):
            options["expert_layout"] = tuple(options["expert_layout"])
        return ServingPlan(
            file=fspath(path),
            model=str(content["model"]["name"]),
            sizes=tuple((name, int(content["model"][name])) for name in SIZES),
            gpu=str(content["gpus"]["gpu"]),
            world_size=server["world_size"],
            options=tuple(options.items()),
            steps=tuple(_step(one) for one in content["decode_steps"]),
        )
    except KeyError as error:
        raise ValueError(f"plan {fspath(path)}: {error.args[0]} is missing; run weft plan again") from None
    except (OSError, UnicodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(
            f"plan {fspath(path)} cannot be read as JSON: {error}; write one by weft plan MODEL --out FILE"
        ) from None
    except (ValueError, OverflowError, TypeError, AttributeError) as error:
        raise ValueError(f"plan {fspath(path)}: {error}") from None


def _step(content: Mapping[str, Any]) -> StepPlanned:
    names = StepPlanned._fields
    return StepPlanned(int(content["batch"]), int(content["length"]), *(float(content[name]) for name in names[2:]))


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write a plan's file, atomically."""
    put(path, json.dumps({"schema": SCHEMA, "kind": "weft plan", **content}, indent=1, ensure_ascii=False) + "\n")


def followed(plan: ServingPlan, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The plan's options. ValueError, with its name, for a given option that differs.

    given  options by name; one that has its default counts as not given
    """
    options = dict(plan.options)
    for name, planned in options.items():
        value = given.get(name, defaults[name])
        if value != defaults[name] and _plain(value) != planned:
            raise ValueError(_differs(plan.file, name, _plain(value), planned))
    return options


def _plain(value: Any) -> Any:
    """An option as a plan has it: a SpeculativeConfig by its method and number of drafts."""
    method = getattr(value, "method", None)
    return value if method is None else {"method": method, "num_speculative_tokens": value.num_speculative_tokens}


def _differs(file: str, name: str, value: object, planned: object) -> str:
    return f"{name}={quoted(value)} differs from {name}={quoted(planned)} of plan {file}; leave it out, or plan again"


class Measured:
    """Times of decode steps beside the plan's.

    A step counts if the one before it had the same batch and neither read prompts: the host then waits for the GPU's step.
    """

    def __init__(self, plan: ServingPlan) -> None:
        self.plan = plan
        self._seconds: dict[int, deque[float]] = {}
        self._last: tuple[int, float] | None = None  # batch of the step before, and its end

    def note(self, batch: int, now: float, *, reads: bool) -> None:
        """Note that a step has ended. batch: size of its graph; reads: it read prompts."""
        if reads or batch == 0:
            self._last = None
            return
        if self._last is not None and self._last[0] == batch:
            self._seconds.setdefault(batch, deque(maxlen=KEPT)).append(now - self._last[1])
        self._last = batch, now

    def median(self, batch: int) -> float:
        """Median of the steps of a batch size, in seconds; 0: there is none."""
        return statistics.median(self._seconds.get(batch) or (0.0,))

    def lines(self) -> list[str]:
        """A line for each batch size with enough steps: measured, predicted, and their ratio."""
        lines = []
        for batch, seconds in sorted(self._seconds.items()):
            planned = min(self.plan.steps, key=lambda step: abs(step.batch - batch), default=None)
            if len(seconds) < FEWEST or planned is None:
                continue
            measured = self.median(batch)
            if planned.batch != batch:
                lines.append(f"plan: decode of {batch}: measured {measured * 1e3:.2f} ms, not in the plan")
                continue
            lines.append(
                f"plan: decode of {batch}: measured {measured * 1e3:.2f} ms in {len(seconds)} steps, predicted "
                f"{planned.seconds * 1e3:.2f} ms ± {planned.error:.0%} at {planned.length} tokens: ratio "
                f"{measured / planned.seconds:.2f}"
            )
        return lines
