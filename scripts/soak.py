"""Soak of a server in one command: it starts one, sends requests with tools, grammars and cancels, and ends it.

    python scripts/soak.py --world-size 2 --requests 2000 --seconds 90        # on GPUs
    python scripts/soak.py --device sim --world-size 1 --requests 200 --seconds 300    # without a GPU, some two minutes

The server has the model of tests/serve/talking.py, which adds. Needs fastapi, uvicorn, prometheus-client, llguidance, openai.
Exit status 0 and a line with the number of requests of each kind, if all answers are right and the server ends with status 0;
else the end of its log. Ctrl-C and SIGTERM end the server too.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from scripts import clients  # noqa: E402
from tests.serve import talking  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=90, help="no request begins later")
    parser.add_argument("--at-once", type=int, default=16)
    chosen = parser.parse_args()
    # So that SIGTERM, as of `timeout`, unwinds to where the server is ended, which has a session of its own.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory() as folder:
        soak(chosen, talking.write(Path(folder) / "adder"))


def soak(chosen: argparse.Namespace, model: Path) -> None:
    """Start a server with a model, soak it, and end it."""
    flags = ["--world-size", str(chosen.world_size), "--device", chosen.device, "--port", "0", "--max-batch", "16"]
    flags += ["--mode", "reference"] if chosen.device == "sim" else []
    command = [sys.executable, "-m", "weft", "serve", str(model), "--served-model-name", "adder", *flags]
    begin, lines, address = time.monotonic(), list[str](), list[str]()
    listening = threading.Event()

    def read() -> None:
        for line in process.stdout:
            lines.append(line)
            if at := re.search(r"at (http://\S+/v1)", line):
                address.append(at[1])
                listening.set()
        listening.set()

    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            listening.wait(timeout=240)
            if not address:
                raise RuntimeError("the server does not listen")
            print(f"listens after {time.monotonic() - begin:.1f} s", flush=True)
            begin = time.monotonic()
            counts = asyncio.run(clients.soak(address[0], chosen.requests, chosen.at_once, seconds=chosen.seconds))
            print(f"soak in {time.monotonic() - begin:.1f} s: {counts}", flush=True)
            print(f"five forced calls: {clients.by_openai(address[0])}", flush=True)
        except BaseException:
            print("".join(lines[-40:]), file=sys.stderr)
            process.kill()
            raise
        process.send_signal(signal.SIGTERM)
        status = process.wait(timeout=60)
        reader.join(timeout=10)
    if status or any("Traceback" in line for line in lines):
        raise SystemExit(f"the server ended with status {status}:\n{''.join(lines[-40:])}")


if __name__ == "__main__":
    main()
