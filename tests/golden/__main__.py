"""Digests of what weft computes on virtual ranks, so that two trees can be compared bit for bit.

    python -m tests.golden record FILE [--only GROUP]    run every case in this tree, write the digests as JSON
    python -m tests.golden compare OLD NEW               exit status 1 if a case differs or is missing; prints which

Record once in each tree on the same machine: matrix products of the CPU may differ between machines. Groups:

ops      the calls of tests/golden/ops.json, a table that no later change of the tests' own case tables touches: every op
         that communicates, every design, ragged shapes, world sizes 1, 2, 3, 4 and 8, two calls in a row
local    the ops of one rank
moe      all other ops, by their own cases
layers   TPMLP and TPAttention: prefill, then decode, in each mode, with torch's operations and with fused kernels
model    the built-in model: logits of given tokens and greedy answers of an engine, in each mode

A change of names or of structure changes only how a case is run here, never its name or its inputs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import weft
from tests.golden import layers, local, model, moe, ops

GROUPS: dict[str, Callable[[], Iterator[tuple[str, Callable[[], Any]]]]] = {
    "ops": ops.cases,
    "local": local.cases,
    "moe": moe.cases,
    "layers": layers.cases,
    "model": model.cases,
}


def digest(value: Any) -> str:
    """SHA-256 of tensors by dtype, shape and bits, of containers by their members, of plain values by their text."""
    found = hashlib.sha256()

    def take(part: Any) -> None:
        if isinstance(part, torch.Tensor):
            flat = part.detach().cpu().contiguous().view(-1)
            found.update(f"{part.dtype} {tuple(part.shape)};".encode())
            found.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
        elif isinstance(part, (list, tuple)):
            found.update(f"{len(part)} members;".encode())
            for member in part:
                take(member)
        else:
            assert part is None or isinstance(part, (bool, int, float, str)), type(part)
            found.update(f"{part!r};".encode())

    take(value)
    return found.hexdigest()[:32]


def record(file: Path, only: str | None) -> None:
    digests = {}
    for group in [only] if only else GROUPS:
        started, before = time.perf_counter(), len(digests)
        for name, run in GROUPS[group]():
            assert name not in digests, name
            digests[name] = digest(run())
        print(f"{group}: {len(digests) - before} cases, {time.perf_counter() - started:.0f} s", flush=True)
    file.write_text(json.dumps({"torch": torch.__version__, "digests": digests}, indent=0) + "\n")


def compare(old: Path, new: Path) -> int:
    before, after = (json.loads(file.read_text()) for file in (old, new))
    if before["torch"] != after["torch"]:
        sys.exit(
            f"{old} was recorded with torch {before['torch']}, {new} with {after['torch']}; use one of them for both"
        )
    one, other = before["digests"], after["digests"]
    different = [name for name in one if name in other and one[name] != other[name]]
    missing = [name for name in one if name not in other]
    for title, names in (("different", different), ("missing", missing)):
        for name in names:
            print(f"{title}: {name}")
    print(f"{len(one)} cases: {len(different)} different, {len(missing)} missing, {len(other.keys() - one)} new")
    return 1 if different or missing else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("file", type=Path)
    recording.add_argument("--only", choices=GROUPS)
    comparing = commands.add_parser("compare")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    arguments = parser.parse_args()
    print(f"weft from {Path(weft.__file__).parent}", file=sys.stderr)
    if arguments.command == "compare":
        return compare(arguments.old, arguments.new)
    record(arguments.file, arguments.only)
    return 0


if __name__ == "__main__":
    sys.exit(main())
