"""Description of the machine and the sources of a run."""

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
    from weft.runtime.team.team import Team


def describe(team: Team) -> dict[str, Any]:
    """GPU, driver and versions for the JSON; None for absent ones."""
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
    """Current clock, power and temperature of the first GPU: large GEMMs are limited by power."""
    query = "--query-gpu=clocks.sm,power.draw,temperature.gpu"
    return _output("nvidia-smi", query, "--format=csv,noheader")


def revision(package: Path) -> str:
    """Revision of the running sources: the commit, and git's tree name of ``package`` with local changes.

    ``git rev-parse COMMIT:weft`` gives the same name for every commit with these sources.
    """
    here = f"{package.name}/ {tree(package)[:12]}"
    if not (package.parent / ".git").exists():
        return here
    commit = _output("git", "-C", str(package), "rev-parse", "--short=12", "HEAD")
    if commit is None:
        return here
    same = _output("git", "-C", str(package), "rev-parse", "HEAD:./") == tree(package)
    return f"{commit} ({here})" if same else f"{commit} with changes ({here})"


def tree(folder: Path) -> str:
    """SHA-1 that git would give to ``folder`` with its present files, without caches and hidden files."""
    entries = []
    for path in folder.iterdir():
        if path.name.startswith(".") or path.name == "__pycache__":
            continue
        if path.is_dir():
            name, found = b"40000", tree(path)
            if found == _object(b"tree", b""):
                continue  # git has no empty folders
        else:
            name = b"100755" if path.stat().st_mode & 0o100 else b"100644"
            found = _object(b"blob", path.read_bytes())
        # Folders are sorted as if their names ended with a slash.
        entries.append(
            (path.name + "/" * path.is_dir(), name + b" " + path.name.encode() + b"\0" + bytes.fromhex(found))
        )
    return _object(b"tree", b"".join(entry for _, entry in sorted(entries)))


def _object(kind: bytes, content: bytes) -> str:
    return hashlib.sha1(kind + b" %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _output(*command: str) -> str | None:
    """First line of a program's output; None if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().split("\n")[0] or None
