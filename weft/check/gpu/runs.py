"""Runs of a main on real GPUs, under GSan and without it."""

from __future__ import annotations

import importlib
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from weft import triton_api
from weft.check.gpu.assertions import Assertion, assertions
from weft.check.script import load
from weft.errors import NoEnd, Unsupported
from weft.runtime.launch import launch_watched

# Bytes of symmetric memory of a rank. GSan keeps six bytes beside each.
HEAP_BYTES = 512 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Main that a rank's process can find by itself.

    module, function  of an importable main; with ``script`` the file that is loaded as a module
    args              further arguments of main
    """

    function: str
    module: str = ""
    script: Path | None = None
    args: tuple[Any, ...] = ()

    def main(self) -> Callable[..., Any]:
        if self.script is not None:
            return load(self.script, self.function)
        return getattr(importlib.import_module(self.module), self.function)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """End of one run.

    said     device assertions of all ranks
    error    first error of a rank, or NoEnd; None if main returned on all ranks
    seconds  of main at the second call, the slowest rank's; None where it was not called twice
    errors   standard error of each rank
    """

    said: tuple[Assertion, ...]
    error: Exception | None
    seconds: float | None
    errors: tuple[str, ...]

    @property
    def is_hung(self) -> bool:
        return isinstance(self.error, NoEnd)


def device_name() -> str:
    gpus = torch.cuda.device_count()
    return f"{torch.cuda.get_device_name(0)}{f' x {gpus}' if gpus > 1 else ''}"


def check_available() -> None:
    """Unsupported, in one line, where GSan cannot run here."""
    if torch.version.hip:
        raise Unsupported(
            "weft check --gpu: GSan is for NVIDIA GPUs, and this torch is built for AMD GPUs; leave --gpu out"
        )
    if not torch.cuda.is_available():
        raise Unsupported("weft check --gpu: torch finds no GPU here; leave --gpu out to check on virtual ranks")
    check_versions()
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        raise Unsupported(
            "weft check --gpu: GSan compiles its allocator, and g++ and clang++ are missing here; install g++"
        )


def check_versions() -> None:
    """Unsupported unless this Triton has GSan and this torch lets it allocate."""
    try:
        triton_api.gsan()
    except ImportError:
        raise Unsupported(
            f"weft check --gpu: GSan comes with Triton 3.8 and later, and this is Triton {triton.__version__}; "
            f'pip install "triton>=3.9,<3.10"'
        ) from None
    if not hasattr(tl, "atomic_load") or not hasattr(triton_api.gsan(), "configure"):
        raise Unsupported(
            f"weft check --gpu: GSan of Triton {triton.__version__} lacks what weft takes of it; "
            f'pip install "triton>=3.9,<3.10"'
        )
    if not hasattr(torch.cuda, "MemPool"):
        raise Unsupported(
            f"weft check --gpu: GSan allocates through torch.cuda.MemPool, which torch {torch.__version__} lacks; "
            f"install torch 2.11 or later"
        )


def run(
    program: Program, world_size: int, *, sanitized: bool, seconds: float, twice: bool, heap_bytes: int = HEAP_BYTES
) -> Run:
    """Run a program on GPUs, which ranks share where there are too few.

    twice  call main a second time, for its time without compilation
    """
    with tempfile.TemporaryDirectory(prefix="weft-check-") as folder:
        error: Exception | None = None
        times: list[float | None] = [None]
        try:
            times = launch_watched(
                _timed, world_size, args=(program, sanitized, twice), heap_bytes=heap_bytes, sanitized=sanitized,
                errors=folder, seconds=seconds,
            )  # fmt: skip
        except Exception as raised:
            error = raised
        texts = tuple(_text(Path(folder, f"rank{rank}")) for rank in range(world_size))
    said = tuple(one for rank, text in enumerate(texts) for one in assertions(text, rank))
    known = [one for one in times if one is not None]
    return Run(said=said, error=error, seconds=max(known) if known else None, errors=texts)


def slowdown(sanitized: Run, plain: Run) -> float | None:
    """Time under GSan over the time without, of the whole of main; None if either is unknown."""
    if sanitized.seconds is None or not plain.seconds:
        return None
    return sanitized.seconds / plain.seconds


def _timed(team: Any, program: Program, sanitized: bool, twice: bool) -> float | None:
    """Seconds of main's second call. On each rank."""
    main = program.main()
    # For kernels that make tensor descriptors; main may set another one.
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=team.device))
    if not sanitized:
        return _second(team, main, program.args, twice)
    from weft.runtime.platforms.sanitized import in_checked_memory

    return in_checked_memory(_second, team, main, program.args, twice)


def _second(team: Any, main: Callable[..., Any], args: Sequence[Any], twice: bool) -> float | None:
    main(team, *args)
    team.barrier()
    if not twice:
        return None
    began = time.perf_counter()
    main(team, *args)
    team.synchronize()
    took = time.perf_counter() - began
    team.barrier()
    return took


def _text(file: Path) -> str:
    return file.read_text(errors="replace") if file.is_file() else ""
