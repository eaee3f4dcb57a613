"""Compile kernels for GPUs that are not here, to assert on what the compiler makes of them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget

from weft.runtime.team.view import MAX_BARRIER_PROGRAMS, RECORD_WORDS, TeamView, make_view
from weft.transport.exchange import exchange_kernel

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# Compiled for by the tests that name it.
FURTHER = {"gfx950": GPUTarget("hip", "gfx950", 64), "gfx90a": GPUTarget("hip", "gfx90a", 64)}
# Bytes of shared memory that one program may have.
SHARED = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}


class _StubDriver:
    """Just enough of a Triton driver for ``kernel.warmup``."""

    def __init__(self, arch: str) -> None:
        targets = {**TARGETS, **FURTHER}
        self._target = targets[arch]
        # Triton keeps what it has compiled by device, not by target: every architecture is a device of its own.
        self._device = list(targets).index(arch)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._device

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextmanager
def compiling_for(arch: str) -> Iterator[None]:
    """Kernels' ``warmup`` compiles for ``arch``, a key of TARGETS or FURTHER."""
    triton.runtime.driver.set_active(_StubDriver(arch))
    try:
        yield
    finally:
        if torch.cuda.is_available():
            triton.runtime.driver.reset_active()


def compiled(kernel: Any, *args: Any, arch: str, **options: Any) -> Any:
    """The compiled kernel: ``.asm["ptx"]``, ``.metadata``."""
    with compiling_for(arch):
        return kernel.warmup(*args, grid=(1,), **options)


def compiled_exchange(body: Any, *args: Any, tokens: tuple = (None, None), sizes: Any = None, **options: Any) -> Any:
    """``exchange_kernel`` with this body. args: x, out, n, buffer, epochs, team."""
    functions = {"KERNEL": body.name, "SEND": body.send, "OWN": body.own, "STORE": body.store, "SIZES": sizes}
    return compiled(exchange_kernel, *args, *tokens, **functions, **options)


def a_view(world_size: int = 4, rank: int = 1, patience_us: int = 0, multicast: int = 0) -> TeamView:
    """A team's view that is good for compiling only."""
    return make_view(
        rank,
        world_size,
        torch.zeros(world_size, dtype=torch.int64),
        torch.zeros((MAX_BARRIER_PROGRAMS, world_size + 1), dtype=torch.int32),
        torch.zeros(RECORD_WORDS, dtype=torch.int64),
        patience_us,
        multicast,
    )


# Bytes that ptxas of Tritons newer than 3.6 (the one of our GPUs) spills: with 3.9 232 in MLA of 128 heads, 16 elsewhere.
SPILLED = 0 if triton.__version__.startswith("3.6.") else 232


def stack_bytes(kernel: Any, directory: Path) -> int:
    """Bytes of local memory a thread beyond SPILLED, spills included, as the cubin states them."""
    listed = dumped(kernel, directory, "--dump-resource-usage")
    return max(0, sum(int(size) for size in re.findall(r"(?:STACK|LOCAL):(\d+)", listed)) - SPILLED)


def broken_sums(kernel: Any, directory: Path) -> list[str]:
    """Sums of 64 bits whose upper half adds a register that nothing has written, or the register that the lower half adds.

    ptxas 12.8, of Triton 3.6, makes such code of descriptors of tensor instructions, whose upper half is a constant plus that
    register in place of plus 0: the instruction then reads shared memory out of range.
    """
    written: set[tuple[str, str]] = set()
    faults, added = [], {}
    for line in dumped(kernel, directory, "--dump-sass").splitlines():
        text = re.search(r"\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s+(.*?);", line)
        if text is None:
            continue
        opcode, operands = text.groups()
        registers = [*re.findall(r"\b(U?R)(\d+)\b", operands)]
        carries = re.findall(r"\bU?P\d\b", operands)
        if re.fullmatch(r"U?IADD3", opcode):
            added |= dict.fromkeys(carries, registers[1:])
        if re.fullmatch(r"U?IADD3\.X", opcode) and "0x" in operands:  # a descriptor's upper half has a constant
            lower = {one for carry in carries for one in added.get(carry, ())}
            if any(one not in written or one in lower for one in registers[1:]):
                faults.append(operands)
        # The first register is the result's; some results have several.
        width = 4 if re.search(r"128|LDSM", opcode) else 2 if re.search(r"64|WIDE|CS2R", opcode) else 1
        width = 128 if "MMA" in opcode else width
        results = {(kind, str(int(number) + more)) for kind, number in registers[:1] for more in range(width)}
        written |= results
        if not re.fullmatch(r"U?IADD3", opcode):
            added = {carry: [one for one in addends if one not in results] for carry, addends in added.items()}
    return faults


def dumped(kernel: Any, directory: Path, option: str) -> str:
    """What cuobjdump prints about the kernel's machine code."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        pytest.skip(f"{tool} is not part of this Triton")
    cubin = directory / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    return subprocess.run([tool, option, cubin], capture_output=True, text=True, check=True).stdout


def sums_of(kernel: Any) -> list[tuple[str, str]]:
    """(shape, layout) of each tensor of fp32 that the kernel sums up, in the order of the code: an order of additions."""
    code = kernel.asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", code, re.MULTILINE))
    reductions = re.findall(r'"tt\.reduce"\(.*?^\s*\}\) : \(tensor<(\w+), (.*?)>\) ->', code, re.MULTILINE | re.DOTALL)
    bodies = re.findall(r'"tt\.reduce"\(.*?tt\.reduce\.return', code, re.DOTALL)
    assert len(bodies) == len(reductions)
    return [
        (shape, re.sub(r"#\w+", lambda name: layouts.get(name[0], name[0]), layout))
        for body, (shape, layout) in zip(bodies, reductions, strict=True)
        if "arith.addf" in body
    ]


def pairs_taken_apart(kernel: Any) -> list[str]:
    """Pairs of bytes in PTX whose register is put beside one that nothing has written, and is read once more.

    ptxas 12.8, of Triton 3.6, may then read the pair from a register that nothing has written.
    """
    code = kernel.asm["ptx"]
    begin = r"^\s*(?:@!?%p\d+\s+)?[a-z][\w.:]*\s+"
    written = {*re.findall(begin + r"(%rs\d+)[,;]", code, re.MULTILINE)}
    for several in re.findall(begin + r"\{([^}]*)\}", code, re.MULTILINE):
        written |= {*re.findall(r"%rs\d+", several)}
    beside = re.findall(r"mov\.b32\s+%r\d+, \{(%rs\d+), (%rs\d+)\};", code)
    halves = [pair for pair, upper in beside if pair in written and upper not in written]
    return [pair for pair in halves if len(re.findall(rf"{pair}\b", code)) > 2]
