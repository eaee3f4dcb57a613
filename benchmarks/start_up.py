"""Seconds from the start of `weft serve` to its first answer, of `weft.launch`, and until a killed rank is told.

    python -m benchmarks.start_up --model qwen3-0.6b --world-size 2 --caches cold,warm
    python -m benchmarks.start_up --launch --world-size 2
    python -m benchmarks.start_up --imports

cold     Triton's cache is an empty folder of this run; warm: the folder of the run before. A server has random weights of a
         published model's sizes. Lines tell when it listens, when it has answered, and when its last graph is captured
launch   of a small kernel: seconds until its results are there, and until the program has ended
kill     rank 1 of the last server gets SIGKILL while a stream runs: seconds until the stream ends by an error
imports  of the modules of a server and of a rank, each in a new process, twice: the files are in memory the second time

Lines of the log that tell the steps of a start have the second at which they came. Each result is also in the JSON file of
--json.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import weft
from weft.bench.harness.machine import revision
from weft.runtime.files import put

READY_SECONDS = 140.0
# Each process would compile weft's modules anew, 0.3 s, which pip compiles as it installs weft.
WITHOUT_BYTECODE = "PYTHONDONTWRITEBYTECODE"
# Modules that --imports measures: each has the modules before it.
IMPORTS = "torch", "triton", "weft.runtime.launch", "weft.engine.engine", "weft.engine", "weft.serve.app"
# Lines of a log that tell the steps of a start and of an end.
STEPS = "start: ", "end: ", "engine ready", "warm-up:", "captured the CUDA graph"


def main() -> None:
    chosen = _arguments()
    rows: list[dict[str, Any]] = []

    def say(**row: Any) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)

    if chosen.imports:
        for _ in range(2):
            say(what="imports", **_import_seconds())
        chosen.caches = ""
    with tempfile.TemporaryDirectory() as folder:
        for cache in filter(None, chosen.caches.split(",")):
            if chosen.launch:
                say(what="launch", cache=cache, world_size=chosen.world_size, **_launch_seconds(chosen, folder))
                continue
            say(what="serve", cache=cache, model=chosen.model, world_size=chosen.world_size, late=chosen.late,
                early=chosen.early,
                **_serve_seconds(chosen, folder, kill=cache == chosen.caches.split(",")[-1]))  # fmt: skip
    if chosen.json is not None:
        put(chosen.json, json.dumps({"revision": revision(Path(weft.__file__).parent), "rows": rows}, indent=1))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--caches", default="cold,warm", help="runs, in order")
    yes_or_no = {"action": argparse.BooleanOptionalAction, "default": True}
    parser.add_argument("--late", **yes_or_no, help="most graphs are captured beside requests")
    parser.add_argument("--early", **yes_or_no, help="processes of ranks start with the server's")
    parser.add_argument("--launch", action="store_true", help="weft.launch of a small kernel in place of a server")
    parser.add_argument("--imports", action="store_true", help="imports alone")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _launch_seconds(chosen: argparse.Namespace, folder: str) -> dict[str, float]:
    code = f"""
import weft
from benchmarks.small_launch import add_one
from weft.runtime import logs

if __name__ == "__main__":
    logs.show(2)
    print("end: results", weft.launch(add_one, {chosen.world_size}, {chosen.device!r}, heap_bytes=64 << 20), flush=True)
"""
    with tempfile.NamedTemporaryFile("w", suffix=".py", dir=".") as file:
        file.write(code)
        file.flush()
        log = Log([sys.executable, file.name], {"TRITON_CACHE_DIR": folder, "PYTHONPATH": os.getcwd()})
        status = log.process.wait()
        seconds = round(time.monotonic() - log.begin, 2)
        log.join()
    if status or (results := log.second("end: results")) is None:
        raise SystemExit(log.text())
    log.print_steps()
    return {"results": results, "seconds": seconds}


def _import_seconds() -> dict[str, float]:
    seconds = {}
    for module in IMPORTS:
        begin = time.monotonic()
        subprocess.run([sys.executable, "-c", f"import {module}"], check=True)
        seconds[module] = round(time.monotonic() - begin, 2)
    return seconds


def _serve_seconds(chosen: argparse.Namespace, folder: str, *, kill: bool) -> dict[str, float]:
    seconds: dict[str, float] = {}
    with _server(chosen, folder) as (url, log):
        begin = log.begin

        def note(name: str) -> None:
            seconds[name] = round(time.monotonic() - begin, 2)

        while not _answers(f"{url}/health"):
            if time.monotonic() - begin > READY_SECONDS or log.ended():
                raise SystemExit(f"the server is not ready:\n{log.text()[-3000:]}")
            time.sleep(0.05)
        note("listens")
        _post(url, {"prompt": [1, 2, 3], "max_tokens": 1})
        note("first_answer")
        _post(url, {"prompt": [1, 2, 3], "max_tokens": 16, "ignore_eos": True})
        note("sixteen_tokens_more")
        while chosen.late and "captured the last graph" not in log.text() and time.monotonic() - begin < READY_SECONDS:
            time.sleep(0.1)
        note("last_graph")
        if kill and chosen.device == "cuda":
            seconds["killed_is_told"] = _killed(url, log.process.pid)
        log.print_steps()
    return seconds


class Log:
    """A process that runs a command, and what it has printed, each line with the second at which it came."""

    def __init__(self, command: list[str], variables: dict[str, str]) -> None:
        self.begin, self._lines = time.monotonic(), list[tuple[float, str]]()
        environment = {name: value for name, value in os.environ.items() if name != WITHOUT_BYTECODE} | variables
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            start_new_session=True,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append((time.monotonic() - self.begin, line))

    def text(self) -> str:
        return "".join(line for _, line in self._lines)

    def print_steps(self) -> None:
        for second, line in self._lines:
            if any(text in line for text in STEPS):
                print(f"  {second:6.2f} s  {line.rstrip()}", flush=True)

    def second(self, text: str) -> float | None:
        """Second at which the first line with this text came; None: none has come."""
        return next((round(second, 2) for second, line in self._lines if text in line), None)

    def join(self) -> None:
        """Wait until all is read."""
        self._reader.join(timeout=5)

    def ended(self) -> bool:
        return self.process.poll() is not None


@contextmanager
def _server(chosen: argparse.Namespace, folder: str) -> Iterator[tuple[str, Log]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "weft",
        "serve",
        "--port",
        str(port),
        "--world-size",
        str(chosen.world_size),
        "-vv",
    ]
    if chosen.device == "cuda":
        command += [chosen.model, "--dummy-weights", "--device", "cuda", "--max-seq-len", "4096"]
    else:
        command += ["--device", chosen.device]
    command += [] if chosen.late else ["--no-warm-up-late"]
    command += [] if chosen.early else ["--no-early-ranks"]
    log = Log(command, {"TRITON_CACHE_DIR": folder})
    process = log.process
    try:
        yield f"http://127.0.0.1:{port}", log
    finally:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=20)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def _request(url: str, body: dict[str, Any]) -> urllib.request.Request:
    return urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )


def _post(url: str, body: dict[str, Any]) -> None:
    with urllib.request.urlopen(_request(url, body), timeout=READY_SECONDS) as answer:
        answer.read()


def _killed(url: str, server: int) -> float:
    """Seconds from the end of rank 1's process to the error of a stream."""
    ranks = sorted(_children(server))
    body = {"prompt": [1, 2, 3], "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with urllib.request.urlopen(_request(url, body), timeout=READY_SECONDS) as stream:
        for _ in range(8):
            stream.readline()
        begin = time.monotonic()
        os.kill(ranks[-1], signal.SIGKILL)
        with suppress(OSError):
            while (line := stream.readline()) and b'"error"' not in line:
                pass
    return round(time.monotonic() - begin, 2)


def _children(process: int) -> list[int]:
    """Processes of ranks: the children that multiprocessing has spawned."""
    listed = Path(f"/proc/{process}/task/{process}/children")
    ids = [int(one) for task in listed.parents[1].glob("*/children") for one in task.read_text().split()]
    return [one for one in ids if b"spawn_main" in Path(f"/proc/{one}/cmdline").read_bytes()]


if __name__ == "__main__":
    main()
