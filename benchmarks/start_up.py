"""Seconds from the start of `weft serve` to its first answer, of `weft.launch`, and until a killed rank is told.

    python -m benchmarks.start_up --model qwen3-0.6b --world-size 2 --caches cold,warm --late
    python -m benchmarks.start_up --launch --world-size 2

cold  Triton's cache is an empty folder of this run; warm: the folder of the run before. A server has random weights of a
      published model's sizes. Lines tell when it listens, when it has answered, and with --late when its last graph is captured
kill  rank 1 of the last server gets SIGKILL while a stream runs: seconds until the stream ends by an error

Each line is also in the JSON file of --json.
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
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

import weft
from weft.runtime.files import put

READY_SECONDS = 140.0


def add_one(team: weft.Team) -> int:
    """Sum of a one of each rank, by a kernel that exchanges them."""
    ones = team.zeros((256,), torch.float32)
    ones.fill_(1.0)
    return int(weft.ops.all_reduce(ones, team)[0])


def main() -> None:
    chosen = _arguments()
    rows: list[dict[str, Any]] = []

    def say(**row: Any) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)

    with tempfile.TemporaryDirectory() as folder:
        for cache in chosen.caches.split(","):
            if chosen.launch:
                say(what="launch", cache=cache, world_size=chosen.world_size, **_launch_seconds(chosen, folder))
                continue
            say(what="serve", cache=cache, model=chosen.model, world_size=chosen.world_size, late=chosen.late,
                early=chosen.early,
                **_serve_seconds(chosen, folder, kill=cache == chosen.caches.split(",")[-1]))  # fmt: skip
    if chosen.json is not None:
        put(chosen.json, json.dumps(rows, indent=1))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--caches", default="cold,warm", help="runs, in order")
    parser.add_argument("--late", action="store_true", help="most graphs are captured beside requests")
    parser.add_argument("--early", action="store_true", help="processes of ranks start with the server's")
    parser.add_argument("--launch", action="store_true", help="weft.launch of a small kernel in place of a server")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _launch_seconds(chosen: argparse.Namespace, folder: str) -> dict[str, float]:
    code = (
        f"import weft; from benchmarks.start_up import add_one; "
        f"print(weft.launch(add_one, {chosen.world_size}, {chosen.device!r}, heap_bytes=64 << 20))"
    )
    with tempfile.NamedTemporaryFile("w", suffix=".py", dir=".") as file:
        file.write(f"if __name__ == '__main__':\n    {code}\n")
        file.flush()
        begin = time.monotonic()
        environment = {**os.environ, "TRITON_CACHE_DIR": folder, "PYTHONPATH": os.getcwd()}
        done = subprocess.run([sys.executable, file.name], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return {"seconds": round(time.monotonic() - begin, 2)}


def _serve_seconds(chosen: argparse.Namespace, folder: str, *, kill: bool) -> dict[str, float]:
    begin = time.monotonic()
    seconds: dict[str, float] = {}

    def note(name: str) -> None:
        seconds[name] = round(time.monotonic() - begin, 2)

    with _server(chosen, folder) as (url, log):
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
        for line in log.text().splitlines():
            if "engine ready" in line or "warm-up:" in line:
                print(f"  {line}", flush=True)
    return seconds


class Log:
    """Process of a server, and what it has printed."""

    def __init__(self, process: subprocess.Popen[bytes], file: Path) -> None:
        self.process, self._file = process, file

    def text(self) -> str:
        return self._file.read_text(errors="replace")

    def ended(self) -> bool:
        return self.process.poll() is not None


@contextmanager
def _server(chosen: argparse.Namespace, folder: str) -> Iterator[tuple[str, Log]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "weft", "serve", "--port", str(port), "--world-size", str(chosen.world_size), "-v"]
    if chosen.device == "cuda":
        command += [chosen.model, "--dummy-weights", "--device", "cuda", "--max-seq-len", "4096"]
    else:
        command += ["--device", chosen.device]
    command += ["--warm-up-late"] if chosen.late else []
    command += ["--early-ranks"] if chosen.early else []
    environment = {**os.environ, "TRITON_CACHE_DIR": folder}
    file = Path(folder) / "server.log"
    with file.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        yield f"http://127.0.0.1:{port}", Log(process, file)
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
