"""Every collective kernel compiles for every target without a GPU, and the PTX shows what it promises."""

import re

import pytest
import torch
import triton

from tests.compiling import TARGETS, a_view, compiled
from weft.ops.all_gather import all_gather_kernel
from weft.ops.all_reduce import all_reduce_kernel
from weft.ops.all_to_all import all_to_all_kernel
from weft.ops.barrier import barrier_kernel
from weft.ops.exchange import LAMPORT_ROW_BYTES, LAMPORT_WARPS, MAX_REGISTERS, SIGNALS_TILE_BYTES, SIGNALS_WARPS
from weft.ops.reduce_scatter import reduce_scatter_kernel

# name -> (kernel, transport, constants of its own)
KERNELS = {
    "one_shot": (all_reduce_kernel, "lamport", {"TWO_SHOT": False}),
    "two_shot": (all_reduce_kernel, "lamport", {"TWO_SHOT": True}),
    "two_shot_signals": (all_reduce_kernel, "signals", {"TWO_SHOT": True}),
    "reduce_scatter": (reduce_scatter_kernel, "lamport", {}),
    "reduce_scatter_signals": (reduce_scatter_kernel, "signals", {}),
    "all_gather": (all_gather_kernel, "signals", {}),
    "all_to_all": (all_to_all_kernel, "signals", {}),
}


def compiled_for(arch, name, world_size=4, dtype=torch.bfloat16, n=1 << 20):
    kernel, transport, constants = KERNELS[name]
    if name in ("all_gather", "all_to_all"):
        dtype = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    rows = triton.next_power_of_2(world_size)
    row_bytes = LAMPORT_ROW_BYTES if transport == "lamport" else SIGNALS_TILE_BYTES // rows
    x, words = torch.zeros(16, dtype=dtype), torch.zeros(4, dtype=torch.int32)
    return compiled(
        kernel, x, x, n, x, words, words, a_view(world_size), arch=arch, BLOCK=row_bytes // dtype.itemsize, ROWS=rows,
        TRANSPORT=transport, num_warps=LAMPORT_WARPS if transport == "lamport" else SIGNALS_WARPS, **constants,
        **({"maxnreg": MAX_REGISTERS} if arch.startswith("sm_") else {}),
    )  # fmt: skip


@pytest.mark.triton_internals
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("arch", TARGETS)
def test_compiles(arch, name):
    asm = compiled_for(arch, name).asm
    if arch == "sm_90":
        ptx = asm["ptx"]
        # Tiles move 16 bytes a thread, to peers too: no element is stored or loaded alone.
        assert re.search(r"st\.global\.v4\.b32", ptx), ptx
        assert not re.search(r"(st|ld)(\.volatile)?\.global(\.\w+)*\.b16", ptx), ptx
        assert ".local" not in ptx
        # What team.max_programs() was told, so that the cooperative launch fits.
        assert f".maxnreg {MAX_REGISTERS}" in ptx


@pytest.mark.parametrize("name", ["one_shot", "two_shot", "reduce_scatter"])
@pytest.mark.parametrize(("world_size", "dtype"), [(2, torch.float16), (3, torch.bfloat16), (8, torch.float32)])
def test_compiles_for_world_size(world_size, dtype, name):
    ptx = compiled_for("sm_90", name, world_size, dtype).asm["ptx"]
    assert "st.global.v4.b32" in ptx
    assert ".local" not in ptx


def test_ragged_and_tiny_sizes_compile():
    for n in (1, 1001):
        for name in ("one_shot", "two_shot", "all_to_all"):
            compiled_for("sm_90", name, n=n)


def test_lamport_stages_are_cleared_to_minus_zero():
    """Two bf16 of -0.0 are 0x80008000; a plain fill of -0.0 would be compiled to +0.0, which reads as written."""
    ptx = compiled_for("sm_90", "one_shot").asm["ptx"]
    cleared = re.findall(r"mov\.b32\s+(%r\d+), -2147450880;", ptx)
    assert cleared and any(f"{{ {r}, {r}, {r}, {r} }}" in ptx for r in cleared)


def test_barrier_compiles():
    for arch in TARGETS:
        compiled(barrier_kernel, a_view(), arch=arch, num_warps=1)
