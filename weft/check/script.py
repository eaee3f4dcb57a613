"""Checked script, imported as a module."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


def import_file(name: str, file: Path) -> ModuleType:
    """File of Python as the module ``name``."""
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError("it is not a Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load(script: Path, function: str) -> Callable[..., Any]:
    """``function`` of a script, imported as a module. ValueError if there is none."""
    if not script.is_file():
        raise ValueError(f"{script}: no such file; pass a Python file that defines {function}(team)")
    folder = str(script.parent.resolve())
    if folder not in sys.path:  # for good, as Python does for a script: main may import from it as well
        sys.path.insert(0, folder)
    try:
        module = import_file("weft_checked_script", script)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{script} cannot be imported: {type(error).__name__}: {error}") from error
    main = getattr(module, function, None)
    if not callable(main):
        raise ValueError(f"{script} defines no {function}(team); write one, or name another with --function")
    return main
