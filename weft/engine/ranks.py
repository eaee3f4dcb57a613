"""Ranks of an LLM: their placement, by its arguments, and virtual ranks that answer requests."""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from weft.arguments import check_choice, check_optional, check_virtual_ranks, positive, shortened
from weft.engine.config import EngineConfig, Watchers
from weft.engine.engine import check_model
from weft.engine.loop import Command, Make, ParentClosed, RequestLoop, Take, check_process, llm_closed
from weft.engine.params import SamplingParams, sampling_defaults
from weft.errors import NotEnoughGPUs, WeftError
from weft.models import DecoderConfig
from weft.models.builtin import PATH as BUILTIN
from weft.models.checkpoint import Checkpoint
from weft.models.config import check_simulable
from weft.models.hub import find_checkpoint
from weft.parallel.step_plan import Mode
from weft.runtime.environment import Coordinates, coordinates
from weft.runtime.launch import DEFAULT_VIRTUAL_RANKS, DEVICES, is_simulated, launch
from weft.runtime.virtual_rank import on_virtual_rank

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Model and ranks of an LLM.

    source    directory of a checkpoint, or a configuration: random weights
    device    "cuda" or "sim"
    torchrun  this process is one of the ranks
    """

    source: Path | DecoderConfig
    world_size: int
    device: str
    torchrun: bool

    @classmethod
    def of(
        cls,
        model: str | PathLike[str] | DecoderConfig | None,
        world_size: int | None,
        device: str,
        config: EngineConfig,
    ) -> Placement:
        """Placement by the arguments of LLM, whose docstring has the rules and the errors."""
        check_model(model)
        check_choice("device", device, DEVICES)
        world_size = check_optional(positive, "world_size", world_size)
        if config.plan is not None:
            world_size = config.plan.check_world_size(world_size)
        source = model
        if not isinstance(model, DecoderConfig):
            source = BUILTIN if model is None else find_checkpoint(model)
        gpus = torch.cuda.device_count()
        if device != "sim" and (started := coordinates()) is not None:
            _check_started(started, world_size, gpus)
            return cls(source=source, world_size=started.world_size, device="cuda", torchrun=True)
        simulated = is_simulated(world_size, device)
        world_size = world_size or (DEFAULT_VIRTUAL_RANKS if simulated else gpus)
        if simulated:
            check_virtual_ranks("world_size", world_size)
            too_few = f"world_size={world_size} needs {world_size} GPUs and this machine has {gpus}"
            _check_virtual(source, config.mode, too_few if device == "auto" and gpus else "run it on GPUs")
        elif not 0 < world_size <= gpus:
            raise NotEnoughGPUs(world_size or 1, gpus)
        return cls(source=source, world_size=world_size, device="sim" if simulated else "cuda", torchrun=False)

    @property
    def directory(self) -> Path | None:
        """Directory of the checkpoint; None for random weights."""
        return None if isinstance(self.source, DecoderConfig) else self.source

    @property
    def defaults(self) -> SamplingParams:
        """Sampling parameters of the checkpoint."""
        return SamplingParams() if self.directory is None else sampling_defaults(Checkpoint(self.directory))

    @property
    def longest(self) -> int:
        """Tokens that a sequence of this model may have."""
        sizes = self.source if self.directory is None else DecoderConfig.from_dict(Checkpoint(self.directory).config)
        return sizes.max_position_embeddings


def _check_started(started: Coordinates, world_size: int | None, gpus: int) -> None:
    """ValueError for another world_size than torchrun's; WeftError for its rank without a GPU."""
    if world_size not in (None, started.world_size):
        raise ValueError(f"world_size={world_size}, but torchrun has started {started.world_size} ranks; leave it out")
    if gpus <= started.local_rank and not on_virtual_rank():
        raise WeftError(
            f"torchrun started {started.world_size} ranks, and this machine has {gpus} GPUs; run it without torchrun, "
            f"as LLM(world_size={started.world_size}, device='sim') (virtual ranks)"
        )


def _check_virtual(model: Path | DecoderConfig, mode: Mode, remedy: str) -> None:
    """ValueError for a model too large for virtual ranks; WeftError on a virtual rank."""
    if on_virtual_rank():
        raise WeftError(
            "LLM starts virtual ranks, and this code runs on one that exists already; use weft.Engine(model, team)"
        )
    name, config = "this model", model
    if not isinstance(model, DecoderConfig):
        name, config = f"model={shortened(repr(str(model)))}", DecoderConfig.from_dict(Checkpoint(model).config)
    check_simulable(name, config, remedy, mode=mode, reference="mode='reference'")


class VirtualRanks:
    """Virtual ranks that answer requests as they come, until `close`; or one call.

    An engine's tensors belong to one simulation, and a process has one simulation at a time: the thread that runs it holds
    `turn`. So no second one begins, wherever the calling thread is interrupted.

    one_call  True: they begin with the first command, a call, and end with it; what they tell last comes once they have ended.
              False: they load at once, and until `close` this process has no other virtual ranks
    """

    turn = threading.Lock()
    latest: ClassVar[VirtualRanks | None] = None  # in this process

    def __init__(
        self,
        world_size: int,
        make: Make,
        heap_bytes: int | None,
        watchers: Watchers,
        take: Take,
        *,
        one_call: bool = False,
    ) -> None:
        self._world_size, self._make, self._heap_bytes, self._watchers = world_size, make, heap_bytes, watchers
        self._take, self._one_call, self._owner = take, one_call, os.getpid()
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._drawn: dict[int, tuple[list[Command | None], int]] = {}  # by step, and how many ranks have them
        self._loaded: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._last: tuple[str, Any] | None = None  # what the one call has ended with
        self.left, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="weft virtual ranks", daemon=True)
        if not one_call:
            self._begin()
            try:
                if (error := self._loaded.get()) is not None:
                    raise error
            except BaseException:
                self.close()
                raise

    def put(self, command: Command) -> None:
        """Send a command; from any thread, without waiting. A cancelled call ends its ranks."""
        check_process(self._owner)
        if self._one_call and command[0] == "cancel":
            self._leave()
            return
        self._commands.put(command)
        if self._one_call:
            self._begin()

    def close(self) -> None:
        """End the ranks with the step that runs, and wait until their thread is gone."""
        self._leave()
        # Not `join`: Python forgets a thread whose `join` was interrupted.
        while self._thread.is_alive():
            if self._ended.wait(timeout=0.1):
                time.sleep(1e-3)  # it is about to go

    @classmethod
    def check_free(cls) -> None:
        """WeftError while virtual ranks of this process serve an AsyncLLM."""
        if cls.latest is None or cls.latest._ended.is_set():
            return
        check_process(cls.latest._owner)
        if not cls.latest._one_call:
            raise WeftError("the virtual ranks of this process serve an AsyncLLM; close it first")

    @classmethod
    def end_latest(cls) -> None:
        """End the latest ranks of this process, which ends. A further interrupt ends it at once."""
        if cls.latest is not None:
            try:
                cls.latest.close()
            except KeyboardInterrupt:
                os._exit(130)

    def _begin(self) -> None:
        self.check_free()
        VirtualRanks.latest = self
        self._thread.start()

    def _leave(self) -> None:
        self.left.set()
        self._commands.put(None)

    def _run(self) -> None:
        error: BaseException = llm_closed()
        try:
            with self.turn:
                if not self.left.is_set():
                    launch(self._rank, self._world_size, "sim", heap_bytes=self._heap_bytes)
        except BaseException as caught:
            error, self._last = caught, None
        self._ended.set()  # before the caller goes on: its next simulation may not find this one
        self._loaded.put(error)
        self._take(*(self._last or ("error", error)))

    def _rank(self, team: Team) -> None:
        engine = self._make(team, **(self._watchers if team.rank == 0 else {}))
        if team.rank == 0:
            self._loaded.put(None)
        steps = 0

        def hear(wait: float | None, commands: list[Command]) -> list[Command]:
            nonlocal steps
            if wait != 0.0:
                team.barrier()  # a rank that waits for a command holds up all, so it is the last to have work
            steps += 1
            return self._commands_of(steps, wait, commands, team.size)

        RequestLoop(engine, hear, self._tell if team.rank == 0 else lambda kind, value: None).run()

    def _tell(self, kind: str, value: object) -> None:
        if self._one_call and kind in ("ended", "rejected"):
            self._last = kind, value
            self._leave()
        else:
            self._take(kind, value)

    def _commands_of(self, step: int, wait: float | None, commands: list[Command], ranks: int) -> list[Command]:
        """Commands before a step, drawn by the first rank that asks. Ranks take turns: no lock."""
        commands, have = self._drawn.pop(step, None) or (self._draw(0.0 if commands else wait) + commands, 0)
        if have + 1 < ranks:
            self._drawn[step] = commands, have + 1
        if None in commands:
            raise ParentClosed
        return commands

    def _draw(self, wait: float | None) -> list[Command | None]:
        drawn = []
        with suppress(queue.Empty):
            if wait != 0.0:
                drawn.append(self._commands.get(timeout=wait))
            while True:
                drawn.append(self._commands.get_nowait())
        return drawn


# The end of the process would cut off a thread in the middle of torch, which aborts.
atexit.register(VirtualRanks.end_latest)
