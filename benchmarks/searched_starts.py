"""Search of a model's calls by `weft tune`, and starts that read it: a second search, and a start of ``LLM(tune=…)``.

    python -m benchmarks.searched_starts OUT.json [--model qwen3-0.6b] [--seconds 14]

Random weights, one GPU, a new folder of results. OUT has the lines that each step printed. Exit status 1 unless the first step
finds rows, and each later one knows at least all calls that were known or searched before it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from weft.bench.harness import machine as sources
from weft.runtime.files import put

MOST_BATCH, LONGEST = 4, 2048
ANSWER = "--prompt-tokens 64 --max-tokens 8 --ignore-eos"
TOLD = re.compile(r"(\d+) calls: (\d+) known, (\d+) searched")


def lines_of(words: Sequence[str], model: str, folder: Path) -> list[str]:
    """Lines that a command of weft prints."""
    command = [
        sys.executable,
        "-m",
        "weft",
        *words,
        "--model",
        model,
        "--world-size",
        "1",
        "--max-batch",
        str(MOST_BATCH),
    ]
    command += ["--max-seq-len", str(LONGEST), "--tune-cache", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    return [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]


def counts(lines: list[str]) -> tuple[int, int, int] | None:
    """(calls, known, searched) of the last line that tells them."""
    told = [match for line in lines if (match := TOLD.search(line))]
    return tuple(map(int, told[-1].groups())) if told else None


def agree(steps: list[tuple[int, int, int] | None]) -> bool:
    """True if rows were searched first, and each later step knew what was known or searched before it."""
    if None in steps or steps[0][2] == 0:
        return False
    return all(later[1] >= before[1] + before[2] for before, later in zip(steps, steps[1:], strict=False))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--seconds", type=float, default=14.0, help="of the first search; later ones have half")
    options = parser.parse_args()
    document = {
        "gpu": torch.cuda.get_device_name(), "versions": sources.versions(), "date": datetime.date.today().isoformat(),
        "model": options.model, "steps": [],
    }  # fmt: skip
    steps = []
    with tempfile.TemporaryDirectory() as name:
        tune, start = "tune --seconds {}", "generate --dummy-weights --tune --tune-seconds {} -v " + ANSWER
        for command in (
            tune.format(options.seconds),
            tune.format(options.seconds / 2),
            start.format(options.seconds / 2),
        ):
            begin = time.monotonic()
            lines = lines_of(command.split(), options.model, Path(name))
            steps.append(counts(lines))
            took = round(time.monotonic() - begin, 1)
            document["steps"].append(
                {"step": f"weft {command}", "seconds": took, "counts": steps[-1], "lines": lines[-60:]}
            )
            print(
                f"weft {command}: (calls, known, searched) {steps[-1]}, {took} s", *lines[-4:], sep="\n  ", flush=True
            )
        document["files"] = {
            one.name: len(one.read_text().splitlines()) for one in Path(name).iterdir() if one.is_file()
        }
    document["agree"] = agree(steps)
    put(options.out, json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    print(f"found, kept and read by later starts: {document['agree']}; lines of files: {document['files']}")
    return 0 if document["agree"] else 1


if __name__ == "__main__":
    sys.exit(main())
