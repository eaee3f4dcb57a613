"""Process with limits on time and memory, for work on files of unknown origin: the parent's side."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any

from weft.errors import WeftError
from weft.runtime.signals import held_for_children

# Limit on the start of the process, which is slow on a busy machine.
_START_SECONDS = 60.0
_MAIN = Path(__file__).with_name("limited_main.py")


class ProcessFailed(Exception):
    """A process that gave no answer: it took too long, ended or wrote too much."""


class LimitedProcess:
    """Process that answers requests by the worker of a file, which weft.runtime.limited_main describes.

    It ends with this object. One thread uses it at a time; `kill` may come from another.

    hello  what the worker reads when it begins
    most   bytes of an answer

    ValueError where the worker refuses `hello`, WeftError where it does not start.
    """

    def __init__(self, worker: Path, hello: dict[str, Any], *, memory: int, most: int) -> None:
        self._most, self._owner = most, os.getpid()
        # -I: only the path of this process decides what it imports, not the current folder or the environment.
        with held_for_children():
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-B", str(_MAIN), str(worker)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0,
            )  # fmt: skip
        self.end = weakref.finalize(self, _end, self.process)
        try:
            for pipe in (self.process.stdin, self.process.stdout):
                os.set_blocking(pipe.fileno(), False)
            path = [os.path.abspath(folder) for folder in sys.path]
            answer = self.ask({**hello, "path": path, "memory": memory}, _START_SECONDS)
        except BaseException as error:
            self.close()
            if isinstance(error, ProcessFailed):
                raise WeftError(f"the process of {worker.name} does not start: {error}") from None
            raise
        if "refused" in answer:
            self.close()
            raise ValueError(answer["refused"])

    @property
    def usable(self) -> bool:
        """True unless it has ended, or is that of the process that this one was forked from."""
        return self._owner == os.getpid() and self.process.poll() is None

    def kill(self) -> None:
        """End the process; `ask` then raises ProcessFailed."""
        self.process.kill()

    def close(self) -> None:
        """End the process, except after a fork, where it is another process's child."""
        if self._owner == os.getpid():
            self.end()
        else:
            self.end.detach()

    def ask(self, message: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Answer to a message.

        After any error, also an interrupt, close the process: a late answer would be taken for the next one.
        """
        process, deadline = self.process, time.monotonic() + seconds
        left = memoryview(json.dumps(message).encode() + b"\n")
        line = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdin, selectors.EVENT_WRITE)
            selector.register(process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise ProcessFailed(f"it does not end within {seconds:g} s")
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
                        raise ProcessFailed("its process ended, as for want of memory or by too deep a nesting")
                    line += piece
                    if len(line) > self._most:
                        raise ProcessFailed(f"it writes more than {self._most:,} bytes")
        return json.loads(line.decode("utf-8", "surrogatepass"))


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()
