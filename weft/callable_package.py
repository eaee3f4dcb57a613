"""Package that is also its function: ``weft.check`` and ``weft.trace``."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any


class _CallablePackage(types.ModuleType):
    """Package with a function of its name, loaded on first use, so that the command line loads no PyTorch.

    Importing a submodule binds ``weft.check`` to the package, but it must be the function, so that it can be called.
    """

    _source: str

    def __getattr__(self, name: str) -> Any:
        if name != self.__name__.rpartition(".")[2]:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(self._source), name)

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.__getattr__(self.__name__.rpartition(".")[2])(*args, **kwargs)


def make_callable(package: str, source: str) -> None:
    """Let a package be called as the function of its name in the module ``source``."""
    module = sys.modules[package]
    module.__class__ = _CallablePackage
    module._source = source  # type: ignore[attr-defined]
