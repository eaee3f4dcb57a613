"""Worker of weft.runtime.limited_main that renders chat templates.

It imports jinja2, and nothing of weft. Requests are {"source", "variables", "characters"}, where variables null compiles
only. Answers are {"text"}, {"invalid"}, {"refused"} or {"failed"}.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache, partial
from typing import Any


def begin(hello: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, str]]:
    """Function that answers requests."""
    compiled = lru_cache(8)(make_environment().from_string)  # compiling takes milliseconds
    compiled("{{ range(2) | list | tojson }}").render()  # late imports of jinja2, before the limits
    return partial(answer, compiled)


def answer(compiled: Callable[[str], Any], request: dict[str, Any]) -> dict[str, str]:
    from jinja2 import TemplateError

    try:
        template = compiled(request["source"])
    except TemplateError as error:
        return {"invalid": line_of(error)}
    except Exception as error:  # in constants, which are computed here
        return {"invalid": f"{type(error).__name__}: {line_of(error)}".removesuffix(": ")}
    if request["variables"] is None:
        return {}
    try:
        pieces, left = [], request["characters"]
        for piece in template.generate(request["variables"]):
            left -= len(piece)
            if left < 0:
                return {"failed": f"it writes more than {request['characters']:,} characters"}
            pieces.append(piece)
        return {"text": "".join(pieces)}
    except TemplateError as error:
        return {"refused": line_of(error)}
    except Exception as error:  # in its own arithmetic, or where content is None
        return {"failed": f"{type(error).__name__}: {line_of(error)}".removesuffix(": ")}


def make_environment() -> Any:
    """Jinja environment with transformers' settings, names and tag `generation`."""
    from jinja2 import nodes  # torch needs it too
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Tag around the assistant's text, for training; here only a scope."""

        tags = {"generation"}

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    extensions = [loopcontrols, Generation]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Filter `tojson` without Jinja's escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def refuse(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def line_of(error: Exception) -> str:
    return " ".join(str(error).split())[:500]
