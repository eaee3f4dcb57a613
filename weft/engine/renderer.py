"""Renderer of untrusted chat templates, in a process with limits on time, memory and output."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from weft.engine.limited_process import LimitedProcess, ProcessFailed

SECONDS = 5.0
# Limit on the output: a context of a million tokens has four million characters.
CHARACTERS = 16 << 20
MEMORY = 1 << 30
_WORKER = Path(__file__).with_name("template_process.py")


class RenderError(Exception):
    """Rendering error. ``kind``: "invalid" (not a template), "refused" (by the template) or "failed"."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind, self.reason = kind, reason


class Renderer:
    """Process that renders templates, started when first needed and after it had to be ended.

    It ends with this object. Threads take turns. 0.2 s for the first text, under a millisecond for each further one of an
    ordinary template.
    """

    def __init__(self, seconds: float = SECONDS, characters: int = CHARACTERS, memory: int = MEMORY) -> None:
        self.seconds, self.characters, self.memory = seconds, characters, memory
        self._lock = threading.Lock()
        self._process: LimitedProcess | None = None

    def compile(self, source: str) -> None:
        """RenderError unless `source` is a template."""
        self._ask(source, None)

    def render(self, source: str, variables: dict[str, Any]) -> str:
        """Rendered text, with JSON values as variables. RenderError where there is none."""
        return self._ask(source, variables)["text"]

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    def _ask(self, source: str, variables: dict[str, Any] | None) -> dict[str, str]:
        request = {"source": source, "variables": variables, "seconds": self.seconds, "characters": self.characters}
        with self._lock:
            try:
                if self._process is None or not self._process.usable:
                    self.close()
                    # A character has up to 6 bytes in JSON.
                    self._process = LimitedProcess(
                        _WORKER, {}, memory=self.memory, most=8 * self.characters + (1 << 16)
                    )
                answer = self._process.ask(request, self.seconds)
            except BaseException as error:  # also interrupts
                self.close()
                if isinstance(error, ProcessFailed):
                    raise RenderError("failed", str(error)) from None
                raise
        for kind in ("invalid", "refused", "failed"):
            if kind in answer:
                raise RenderError(kind, answer[kind])
        return answer


def as_json(name: str, value: Any, depth: int = 0) -> Any:
    """Convert `value` to JSON's types. ValueError, which names the place, where that is impossible."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Real):  # NumPy's
        return int(value) if isinstance(value, Integral) else float(value)
    if isinstance(value, str):
        return str(value)
    if depth < 64 and isinstance(value, Mapping):
        if wrong := [key for key in value if not isinstance(key, str)]:
            raise ValueError(
                f"{name} has the key {wrong[0]!r}, which is not text; chat templates get what JSON can hold"
            )
        return {str(key): as_json(f"{name}[{key!r}]", one, depth + 1) for key, one in value.items()}
    if depth < 64 and isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [as_json(f"{name}[{index}]", one, depth + 1) for index, one in enumerate(value)]
    raise ValueError(
        f"{name} is a {type(value).__name__}{' too deep' if depth >= 64 else ''}, which chat templates do not get; pass text, "
        f"numbers, lists and dictionaries"
    )
