"""Description of the machine and the sources of a run."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import triton

import weft

if TYPE_CHECKING:
    from weft.runtime.team.team import Team


def describe(team: Team) -> dict[str, Any]:
    """GPU, driver, versions and sources for the JSON; None for absent ones.

    ``uuid``: of the first GPU, which tells machines apart.
    """
    on_gpus = team.device.type == "cuda"
    return {
        "gpu": team.caps.device_name,
        "simulated": team.is_simulated,
        "uuid": _nvidia_smi("uuid") if on_gpus else None,
        "driver": _nvidia_smi("driver_version") if on_gpus else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip,
        "triton": triton.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpus else None,
        "python": platform.python_version(),
        "weft": weft.__version__,
        **_running_sources(),
    }


def versions() -> str:
    """Versions of weft, with its revision, of torch and of Triton, for rows of files."""
    return f"weft {weft.__version__} {_running_sources()['revision']}, torch {torch.__version__}, triton {triton.__version__}"


@cache  # they were read when this process imported them
def _running_sources() -> dict[str, Any]:
    package = Path(weft.__file__).parent
    commit, clean = commit_of(package)
    return {"revision": revision(package), "commit": commit, "clean": clean}


def state() -> str | None:
    """Current clock, power and temperature of the first GPU: large GEMMs are limited by power."""
    return _nvidia_smi("clocks.sm,power.draw,temperature.gpu")


def _nvidia_smi(fields: str) -> str | None:
    """Fields of the first GPU."""
    return _output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader")


def commit_of(package: Path) -> tuple[str | None, bool]:
    """(hash of the commit, True if it holds the present files of ``package``); (None, False) without git."""
    git = ("git", "-C", str(package), "rev-parse")
    commit = _output(*git, "HEAD") if (package.parent / ".git").exists() else None
    return commit, commit is not None and _output(*git, "HEAD:./") == tree(package)


def revision(package: Path) -> str:
    """Revision of the running sources: the commit, and git's tree name of ``package`` with local changes.

    ``git rev-parse COMMIT:weft`` gives the same name for every commit with these sources.
    """
    here, (commit, clean) = f"{package.name}/ {tree(package)[:12]}", commit_of(package)
    if commit is None:
        return here
    return f"{commit} ({here})" if clean else f"{commit} with changes ({here})"


def check_clean(flag: str, target: Path | None) -> None:
    """ValueError if ``target`` lies in benchmarks/results of a checkout whose sources no commit holds."""
    package = Path(weft.__file__).parent
    results = package.parent / "benchmarks" / "results"
    if target is None or not target.resolve().is_relative_to(results) or commit_of(package)[1]:
        return
    raise ValueError(
        f"{flag} {target}: weft/ has changes that no commit holds, and results there name one that does; commit them, or "
        f"write to another folder"
    )


def tree(folder: Path) -> str:
    """SHA-1 that git would give to ``folder`` with its present files, without caches and hidden files."""
    entries = []
    for path in folder.iterdir():
        if path.name.startswith(".") or path.name == "__pycache__":
            continue
        if path.is_dir():
            name, name_of_object = b"40000", tree(path)
            if name_of_object == _object(b"tree", b""):
                continue  # git has no empty folders
        else:
            name = b"100755" if path.stat().st_mode & 0o100 else b"100644"
            name_of_object = _object(b"blob", path.read_bytes())
        # Folders are sorted as if their names ended with a slash.
        entries.append(
            (path.name + "/" * path.is_dir(), name + b" " + path.name.encode() + b"\0" + bytes.fromhex(name_of_object))
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
