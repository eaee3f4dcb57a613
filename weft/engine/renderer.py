"""Renderer of untrusted chat templates, in a process with limits on time, memory and output."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from weft.errors import WeftError

SECONDS = 5.0
# Limit on the output: a context of a million tokens has four million characters.
CHARACTERS = 16 << 20
MEMORY = 1 << 30
# Limit on the start of the process, which is slow on a busy machine.
_START_SECONDS = 60.0
_PROCESS = Path(__file__).with_name("template_process.py")


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
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize | None = None
        self._owner = os.getpid()

    def compile(self, source: str) -> None:
        """RenderError unless `source` is a template."""
        self._ask(source, None)

    def render(self, source: str, variables: dict[str, Any]) -> str:
        """Rendered text, with JSON values as variables. RenderError where there is none."""
        return self._ask(source, variables)["text"]

    def close(self) -> None:
        if self._end is not None:
            self._end()
        self._process = self._end = None

    def _ask(self, source: str, variables: dict[str, Any] | None) -> dict[str, str]:
        request = {"source": source, "variables": variables, "seconds": self.seconds, "characters": self.characters}
        with self._lock:
            try:
                if self._owner != os.getpid() and self._end is not None:  # after a fork: another process's child
                    self._end.detach()
                    self._process = self._end = None
                if self._process is None or self._process.poll() is not None:
                    self._start()
                answer = self._exchange(request, self.seconds)
            except BaseException:  # also interrupts: a late answer would be taken for the next one
                self.close()
                raise
        for kind in ("invalid", "refused", "failed"):
            if kind in answer:
                raise RenderError(kind, answer[kind])
        return answer

    def _start(self) -> None:
        self.close()
        # -I: only the path of this process decides what it imports, not the current folder or the environment.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-B", str(_PROCESS)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0,
        )  # fmt: skip
        self._end, self._owner = weakref.finalize(self, _end, self._process), os.getpid()
        for pipe in (self._process.stdin, self._process.stdout):
            os.set_blocking(pipe.fileno(), False)
        path = [os.path.abspath(folder) for folder in sys.path]
        try:
            self._exchange({"path": path, "memory": self.memory}, _START_SECONDS)
        except RenderError as error:
            raise WeftError(f"the process that renders chat templates does not start: {error}") from None

    def _exchange(self, message: dict[str, Any], seconds: float) -> dict[str, str]:
        """Answer of the process to a message; each is one line. RenderError "failed" if none arrives."""
        process, deadline = self._process, time.monotonic() + seconds
        left = memoryview(json.dumps(message).encode() + b"\n")
        found = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdin, selectors.EVENT_WRITE)
            selector.register(process.stdout, selectors.EVENT_READ)
            while not found.endswith(b"\n"):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise RenderError("failed", f"it does not end within {seconds:g} s")
                for key, _ in ready:
                    if key.fileobj is process.stdin:
                        try:
                            left = left[os.write(key.fd, left[: 1 << 16]) :]
                        except BrokenPipeError:
                            left = left[:0]
                        if not left:
                            selector.unregister(process.stdin)
                        continue
                    piece = os.read(key.fd, 1 << 20)
                    if not piece:
                        raise RenderError("failed", "its process ended, as for want of memory or by too deep a nesting")
                    found += piece
                    if len(found) > 8 * self.characters + (1 << 16):
                        raise RenderError("failed", f"it writes more than {self.characters:,} characters")
        return json.loads(found.decode("utf-8", "surrogatepass"))


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


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
