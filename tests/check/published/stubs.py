"""Packages of fetched files, without what their packages import beside them."""

import atexit
import re
import shutil
import sys
import tempfile
import types
from pathlib import Path


def package(name, path=None, mend=None, **members):
    """Package of the folder ``path``, or a module with ``members``, under ``name``; its parents are made too.

    mend  {file: [(pattern, replacement)]} for the program's mended twin
    """
    if mend and "mended" in sys.argv:
        path = mended(path, mend)
    parent, _, last = name.rpartition(".")
    if parent and parent not in sys.modules:
        package(parent)
    module = sys.modules.get(name) or types.ModuleType(name)
    if path is not None or not members:
        module.__path__ = [str(path)] if path is not None else []
    for key, value in members.items():
        setattr(module, key, value)
    sys.modules[name] = module
    if parent:
        setattr(sys.modules[parent], last, module)
    return module


def folder():
    """Folder of the fetched projects: the program's first argument."""
    return Path(sys.argv[1])


def plain(function=None, **_):
    """Decorator that changes nothing, with or without arguments."""
    return function if callable(function) else (lambda inner: inner)


def mended(path, mend):
    """Copy of a folder's files with the replacements, each of which must match."""
    to = Path(tempfile.mkdtemp(prefix="weft-mended-")) / path.name
    atexit.register(shutil.rmtree, to.parent, ignore_errors=True)
    for file in path.rglob("*.py"):
        text, copy = file.read_text(), to / file.relative_to(path)
        for pattern, replacement in mend.get(file.relative_to(path).as_posix(), ()):
            text, count = re.subn(pattern, replacement, text)
            assert count, f"{file} has no {pattern}"
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(text)
    return to
