"""Main program of a process with limits on time and memory. It imports nothing of weft.

Its argument is the file of a worker: there `begin(hello)` imports what is needed and returns a function from a request to its
answer, both dictionaries. Requests and answers are lines of JSON. The first request is `hello`: {"path", "memory"} (sys.path,
bytes beyond what the begun worker has) and what the worker reads of it; its answer is {}, or {"refused"} for a ValueError
of `begin`. Each further one has "seconds".
"""

from __future__ import annotations

import json
import resource
import runpy
import signal
import sys
from typing import Any


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # which may go to the whole group: the parent's end closes stdin
        signal.signal(number, signal.SIG_IGN)
    hello = json.loads(sys.stdin.buffer.readline())
    sys.path[:] = hello["path"]
    try:
        answer = runpy.run_path(sys.argv[1])["begin"](hello)
    except ValueError as error:
        say({"refused": str(error)})
        return
    with open("/proc/self/statm") as pages:
        used = int(pages.read().split()[0]) * resource.getpagesize()
    limit(resource.RLIMIT_AS, used + hello["memory"])
    limit(resource.RLIMIT_FSIZE, 0)
    limit(resource.RLIMIT_CORE, 0)
    say({})
    while line := sys.stdin.buffer.readline():
        request = json.loads(line)
        # The parent ends this process when the time is up; the alarm does if the parent is gone.
        signal.setitimer(signal.ITIMER_REAL, request["seconds"] + 1)
        say(answer(request))
        signal.setitimer(signal.ITIMER_REAL, 0)


def limit(kind: int, value: int) -> None:
    """Lower a resource limit; a lower one stays."""
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def say(message: dict[str, Any]) -> None:
    try:
        line = json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass")
    except MemoryError:
        line = b'{"failed": "MemoryError"}'
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
