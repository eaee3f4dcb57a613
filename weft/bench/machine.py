"""Where a run took place: what a reader of its numbers needs to know."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import triton

import weft

if TYPE_CHECKING:
    from weft.runtime.team import Team


def describe(team: Team) -> dict[str, Any]:
    """GPU, driver and versions, as they go into the JSON. None for what there is not."""
    on_gpus = team.device.type == "cuda"
    return {
        "gpu": team.caps.device_name,
        "simulated": team.is_simulated,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if on_gpus else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip,
        "triton": triton.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpus else None,
        "python": platform.python_version(),
        "weft": weft.__version__,
        "revision": revision(Path(weft.__file__).parent),
    }


def state() -> str | None:
    """Clock, power and temperature of the first GPU, as they are now: large GEMMs are limited by power."""
    query = "--query-gpu=clocks.sm,power.draw,temperature.gpu"
    return _output("nvidia-smi", query, "--format=csv,noheader")


def revision(package: Path) -> str:
    """git's name of the checkout; without git, a digest of the package's source."""
    if (package.parent / ".git").exists():
        name = _output("git", "-C", str(package), "describe", "--always", "--dirty", "--abbrev=12")
        if name:
            return name
    found = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        found.update(file.relative_to(package).as_posix().encode() + file.read_bytes())
    return f"source-{found.hexdigest()[:12]}"


def _output(*command: str) -> str | None:
    """The first line that a program prints; None if it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().split("\n")[0] or None
