"""Capture and replay on virtual ranks, for tests: what a CUDA graph would record is kept as a list of functions.

Kernel launches and copies are kept, not run. torch's operations run on what is there, which a replay computes again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weft.runtime.launching import Launch
from weft.transport.replays import Replays, all_halves


class Torch(TorchDispatchMode):
    """Keeps torch's operations: a replay writes what they return where it was."""

    def __init__(self, kept: list[Callable[[], object]]) -> None:
        super().__init__()
        self.kept = kept

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.kept.append(partial(_again, func, args, kwargs or {}, out))
        return out


def _again(func, args, kwargs, out) -> None:
    for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
        if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
            old.copy_(new)


class Engine:
    """A team's copy engine, whose calls are kept during a capture."""

    def __init__(self, engine, rank: VirtualGraphs) -> None:
        self.engine, self.rank = engine, rank

    def __getattr__(self, name: str):
        method = getattr(self.engine, name)

        def call(*arguments):
            if self.rank.kept is None:
                return method(*arguments)
            return self.rank.kept.append(partial(method, *arguments))

        return call


class VirtualGraphs:
    """Captures of one virtual rank."""

    def __init__(self, team) -> None:
        self.kept: list[Callable[[], object]] | None = None
        team._platform.copy_engine = Engine(team._platform.copy_engine, self)
        self.replays = Replays(self.record, all_halves(team), team.synchronize)

    def record(self, run: Callable[[], object]) -> Callable[[], None]:
        kept: list[Callable[[], object]] = []
        self.kept = CAPTURING[0] = kept
        try:
            with Torch(kept):
                run()
        finally:
            self.kept = CAPTURING[0] = None

        def replay() -> None:
            for call in kept:
                call()

        return replay


# What the capture that goes on has kept; a rank captures without giving way to another one.
CAPTURING: list[list[Callable[[], object]] | None] = [None]
_LAUNCH = Launch.__call__


def _launch(self: Launch, programs, *varying: object) -> None:
    if CAPTURING[0] is None:
        _LAUNCH(self, programs, *varying)
    else:
        CAPTURING[0].append(partial(_LAUNCH, self, programs, *varying))


@contextmanager
def launches_kept() -> Iterator[None]:
    """Scope in which captures keep launches."""
    Launch.__call__ = _launch
    try:
        yield
    finally:
        Launch.__call__ = _LAUNCH


def replayed(team) -> Replays:
    """Have the team's eager calls replayed; its graphs."""
    team._workspaces["replays"] = made = VirtualGraphs(team).replays
    return made
