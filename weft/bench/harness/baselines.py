"""Baselines that are not part of the package: providers in the Python files of a folder.

A file lists them in ``PROVIDERS``, a tuple of `Provider`. ``Provider.ops`` says what they solve: ops by their names on the
command line, "mlp", "attn", "model" and "generate", or "train". ``Provider.make`` is given the `Problem` of one shape on this
rank, and returns a `Prepared` or raises `Unavailable` with a reason. Files import each other by relative imports; a file
without ``PROVIDERS`` serves other files.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
import zlib
from pathlib import Path

from weft.bench.harness.provider import Provider

_CHECKOUT = Path(__file__).resolve().parents[3]
WITHOUT = (
    "baselines of experts, attention, training, tiles and torch.compile are not installed with weft; pass --baselines "
    "FOLDER, which a checkout of weft has as benchmarks/providers"
)


def folder_of(folder: Path | None) -> Path | None:
    """``folder``, by default that of a checkout around the package; None if there is none."""
    if folder is None and (_CHECKOUT / "pyproject.toml").is_file():
        folder = _CHECKOUT / "benchmarks" / "providers"
        return folder if folder.is_dir() else None
    return folder


def baselines_for(name: str, folder: Path | None) -> tuple[Provider, ...]:
    """Providers of an op, a model benchmark or "train" in the folder."""
    place = folder_of(folder)
    return () if place is None else tuple(one for one in _loaded(place.resolve()) if name in one.ops)


def package_of(folder: Path) -> str:
    """Name under which the files of a folder are imported."""
    return f"weft_baselines_{zlib.crc32(bytes(folder.resolve())):08x}"


@functools.cache
def _loaded(folder: Path) -> tuple[Provider, ...]:
    """All providers of a folder, its files in alphabetical order. ValueError for one that cannot be used."""
    files = sorted(folder.glob("*.py"))
    package = sys.modules[package_of(folder)] = types.ModuleType(package_of(folder))
    package.__path__ = [str(folder)]
    providers: list[Provider] = []
    for file in files:
        try:
            providers += getattr(importlib.import_module(f"{package.__name__}.{file.stem}"), "PROVIDERS", ())
        except Exception as error:
            raise ValueError(
                f"--baselines {file}: {type(error).__name__}: {error}; mend it, or move it away"
            ) from error
    if not providers:
        raise ValueError(
            f"--baselines {folder}: no Python file there has PROVIDERS; name a folder as benchmarks/providers"
        )
    return tuple(providers)
