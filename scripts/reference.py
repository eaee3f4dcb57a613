"""The API reference: a page of HTML for each public module, by pdoc, from the docstrings.

`make docs` writes it to build/reference. It needs pdoc (`pip install -e '.[docs]'`), and neither a GPU nor a network.
"""

from __future__ import annotations

import html
import importlib
import inspect
import re
import sys
import types
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
MODULES = (
    "weft", "weft.ops", "weft.layers", "weft.models", "weft.tiles", "weft.language", "weft.language.shmem",
    "weft.integrations.torch", "weft.integrations.transformers", "weft.integrations.vllm", "weft.integrations.sglang",
    "weft.errors",
)  # fmt: skip
# Docstrings are aligned text, so they are shown as they are.
TEMPLATE = """{% extends "default/module.html.jinja2" %}
{% macro docstring(var) %}{% if var.docstring %}
<pre class="docstring">{{ var.docstring | as_text | linkify(namespace=var.qualname, shorten=False) }}</pre>
{% endif %}{% endmacro %}"""
STYLE = "pre.docstring { white-space: pre-wrap; background: none; padding: 0; }"


def public(name: str) -> dict[str, Any]:
    """Public names of a module with what they are: ``__all__``, else the classes and functions that it defines."""
    module = importlib.import_module(name)
    names = getattr(module, "__all__", None)
    if names is None:
        names = [
            each
            for each, value in vars(module).items()
            if getattr(value, "__module__", None) == name and callable(value) and not each.startswith("_")
        ]
    return {each: getattr(module, each) for each in names}


def documented(name: str) -> types.ModuleType:
    """Stand-in of a module for pdoc: its public names but modules, and primitives as the functions that they compile."""
    text = inspect.getdoc(importlib.import_module(name)) or ""
    if name == "weft":
        text += f"\n\nModules: {', '.join(f'`{each}`' for each in MODULES[1:])}"
    module = types.ModuleType(name, text)
    for each, value in public(name).items():
        if callable(value) and isinstance(value, types.ModuleType):  # weft.check and weft.trace
            value = getattr(value, each)
        if not isinstance(value, types.ModuleType):
            setattr(module, each, getattr(value, "fn", value) if inspect.isroutine(value) else value)
    module.__all__ = [each for each in vars(module) if not each.startswith("_")]  # type: ignore[attr-defined]
    return module


def as_text(docstring: str) -> str:
    """HTML of a docstring, words between backquotes as code."""
    return re.sub(r"(`+)([^`]+)\1", r"<code>\2</code>", html.escape(docstring, quote=False))


def write(folder: Path) -> None:
    """Write the pages, their index and its search into ``folder``."""
    import jinja2
    from pdoc import doc, render

    # Of tuples whose fields' types are not imported at run time; they are shown as written.
    warnings.filterwarnings("ignore", "Error parsing type annotation")
    render.configure(show_source=False, include_undocumented=True)
    pages = {"module.html.jinja2": TEMPLATE, "custom.css": STYLE}
    render.env.loader = jinja2.ChoiceLoader([jinja2.DictLoader(pages), render.env.loader])
    render.env.filters["as_text"] = as_text
    modules = {name: doc.Module(documented(name)) for name in MODULES}
    files = {f"{name.replace('.', '/')}.html": render.html_module(module, modules) for name, module in modules.items()}
    files |= {"index.html": render.html_index(modules), "search.js": render.search_index(modules)}
    for file, text in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "reference")
