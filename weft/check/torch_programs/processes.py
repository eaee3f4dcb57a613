"""Process state of each virtual rank, which is a thread: modules, random numbers, environment."""

from __future__ import annotations

import random
import site
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import filterfalse
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from weft.errors import NotInterpretable
from weft.runtime.environment import replaced

# Folders of Python, of installed packages and of weft itself, which may be installed by a link to its repository.
_INSTALLED = tuple({
    *site.getsitepackages(), site.getusersitepackages(), sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"),
    f"{Path(__file__).parents[2]}/",
})  # fmt: skip


class Process:
    """State that a rank has to itself while it runs."""

    def __init__(self, rank: int, size: int) -> None:
        # As torchrun sets it.
        self.environment = {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "GROUP_RANK": "0",
        }  # fmt: skip
        self.arguments: list[str] = []
        self._has_peers, self._half_imported = size > 1, ""
        self.folders: list[str] = []  # where it finds modules first
        self._modules: dict[str, ModuleType] = {}
        self._torch = torch.Generator().get_state()
        self._python: Any = random.Random(rank).getstate()

    @contextmanager
    def turn(self, shared: set[str]) -> Iterator[None]:
        """Scope in which this rank's host code runs.

        ``shared``: modules of all ranks, to which installed ones are added.
        """
        before, python, main = torch.get_rng_state(), random.getstate(), sys.modules["__main__"]
        arguments, path = sys.argv, sys.path
        sys.argv, sys.path = self.arguments or arguments, [*self.folders, *path]
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        sys.modules.update(self._modules)
        try:
            with replaced(self.environment):
                yield
        finally:
            self._torch, self._python = torch.get_rng_state(), random.getstate()
            sys.argv, sys.path = arguments, path
            torch.set_rng_state(before)
            random.setstate(python)
            self._modules = self._taken_out(shared)
            if sys.modules["__main__"] is not main:
                self._modules["__main__"], sys.modules["__main__"] = sys.modules["__main__"], main
        if (
            self._half_imported and self._has_peers
        ):  # Python would have a peer that imports it wait for this rank's thread
            raise NotInterpretable(
                f"module {self._half_imported} waits for other ranks or a kernel while it is imported; "
                f"move the call into a function that the program calls after its imports"
            )

    def _taken_out(self, shared: set[str]) -> dict[str, ModuleType]:
        """Modules that this rank has imported, taken out of ``sys.modules``."""
        new = list(filterfalse(shared.__contains__, sys.modules))
        self._half_imported = next((name for name in reversed(new) if _is_half_imported(sys.modules[name])), "")
        # All before the first is taken out: a package without a file looks for its parent there.
        shared.update([name for name in new if is_installed(sys.modules[name])])
        return {name: sys.modules.pop(name) for name in new if name not in shared}


def _is_half_imported(module: ModuleType) -> bool:
    return getattr(getattr(module, "__spec__", None), "_initializing", False)


def is_installed(module: ModuleType) -> bool:
    """True for a module that all ranks share: of Python, of an installed package, or an extension."""
    file = getattr(module, "__file__", None)
    if file is None:  # a package without a file, or a module that a program has made
        places = getattr(module, "__path__", None)
        spec = getattr(module, "__spec__", None)
        if not places:
            return spec is not None and spec.origin in ("built-in", "frozen")
        file = next(iter(places), "")
    return file.startswith(_INSTALLED) or not file.endswith(".py") and "." in file.rpartition("/")[2]
