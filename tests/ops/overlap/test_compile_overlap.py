"""Every GEMM kernel compiles for every target without a GPU, in the configs it gets there, and fits the target.

On sm_90 the machine code shows what the design counts on: TMA and wgmma, tiles stored 16 bytes a thread, and no local
memory: nothing is spilled, along K or around a tile, in any config that a call may get.
"""

import re

import pytest
import torch
import triton.language as tl

from tests.compiling import SHARED, TARGETS, a_view, compiled, stack_bytes
from tests.sampled import sampled
from weft.kernels.gemm_tile import Sizes, SplitK
from weft.kernels.operands import descriptor_or_self
from weft.kernels.tile_schedule import as_argument, make_tiles
from weft.ops.gemm.matmul import matmul_kernel
from weft.ops.op import find_op
from weft.ops.overlap.fused_reduce import Buffers, matmul_reduce_kernel
from weft.ops.overlap.pipelined import SUM_BLOCK, SUM_WARPS, Shares, share_kernel, sum_kernel
from weft.plan import table
from weft.plan.planned import machine
from weft.runtime.capabilities import Capabilities
from weft.runtime.team.channel import ChannelView
from weft.transport.copy_channel import MAX_CHUNKS, wait_kernel
from weft.transport.halves import Half, begin_kernel

# The design with a kernel of its own.
FUSED = {
    "matmul": "persistent",
    "matmul_reduce_scatter": "fused",
    "matmul_all_reduce": "fused",
}
KERNELS = tuple(FUSED)
N, WORDS = 12800, torch.zeros(4, dtype=torch.int32)
LANDED = ChannelView(WORDS, WORDS, tl.constexpr(MAX_CHUNKS))


def design_for(arch, rows, dtype=torch.bfloat16, op="matmul_reduce_scatter", world_size=4):
    """The fused design for panels of ``rows`` rows: of a row, or by default."""
    caps = Capabilities(device_name=arch, arch=arch, sms=132, memory_bytes=0, peer_access=(True,) * world_size)
    here, found = machine(caps, world_size), find_op(op)
    return found.plan(
        found.call_of((rows if op == "matmul" else world_size * rows, N, 5120), dtype, here, FUSED[op]), here
    ).design


def tuned_designs(op):
    """(world size, design) of every kernel of ``op`` that a shipped row asks for."""
    found = {}
    for world_size in (2, 4):
        for row in table.read(table.file_for("NVIDIA H200", world_size)).rows:
            if row.op == op and row.design == "fused":
                chosen = row.as_design(find_op(op).designs)
                found[world_size, chosen] = world_size, chosen
    return list(found.values())


def built(op, arch, rows, descriptors=True, dtype=torch.bfloat16, world_size=4, own_first=False, chosen=None):
    """The kernel of ``op`` with what its host function would give it for panels of ``rows`` rows."""
    chosen = chosen or design_for(arch, rows, dtype, op, world_size)
    tile, x = chosen.tile, torch.zeros((64, 64), dtype=dtype)
    K = 5120 if descriptors else 5001
    a = descriptor_or_self(x, tile.block_m, tile.block_k, descriptors)
    b = descriptor_or_self(x, tile.block_n, tile.block_k, descriptors)
    panels = 1 if op in ("matmul", "matmul_all_reduce") else world_size
    tiles = make_tiles(rows, N, panels=panels, block_m=tile.block_m, block_n=tile.block_n, group=tile.group, chunks=4)
    tiles = as_argument(tiles._replace(whole=tiles.count - 5))
    split, team, sizes = SplitK(torch.zeros(8), WORDS), a_view(world_size), Sizes(N, K, K, K)
    block = tile.block(descriptors, getattr(chosen, "piece", 1))
    options = tile.options(descriptors, arch)
    if op == "matmul":
        return compiled(matmul_kernel, a, b, x, split, rows, sizes, tiles, None, block, arch=arch, **options)
    buffers = Buffers(x, WORDS, WORDS, x, WORDS, 1 << 20, 1 << 12)
    return compiled(
        matmul_reduce_kernel, a, b, x, x, buffers, split, world_size * rows, sizes, tiles, block, team, arch=arch,
        LOCAL_FIRST=own_first, REPLICATE=op == "matmul_all_reduce", launch_cooperative_grid=True, **options,
    )  # fmt: skip


@pytest.mark.triton_internals
@pytest.mark.parametrize(
    ("arch", "descriptors"),
    sampled(
        ((arch, descriptors) for arch in TARGETS for descriptors in (True, False)),
        lambda arch, descriptors: descriptors or arch in ("sm_90", "gfx942"),
    ),
)
@pytest.mark.parametrize("op", KERNELS)
def test_compiles_and_fits(arch, op, descriptors):
    for rows in (16, 2048):
        assert built(op, arch, rows, descriptors).metadata.shared <= SHARED[arch], rows


@pytest.mark.parametrize("op", KERNELS)
@pytest.mark.parametrize("rows", [1, 64, 128, 2048])
def test_machine_code_on_sm_90(rows, op, tmp_path):
    kernel = built(op, "sm_90", rows)
    ptx = kernel.asm["ptx"]
    assert "cp.async.bulk.tensor.2d.shared" in ptx
    assert ("wgmma" in ptx) == (rows >= 64)
    assert "st.global.v4" in ptx and not re.search(r"st\.global(\.\w+)*\.b16", ptx)
    assert stack_bytes(kernel, tmp_path) == 0


def test_own_rows_first_on_sm_90(tmp_path):
    assert stack_bytes(built("matmul_reduce_scatter", "sm_90", 2048, own_first=True), tmp_path) == 0


@pytest.mark.parametrize("op", KERNELS)
def test_pointer_loads_on_sm_90_keep_the_accumulator_in_registers(op, tmp_path):
    for rows in (16, 128, 4096):
        assert stack_bytes(built(op, "sm_90", rows, descriptors=False), tmp_path) == 0, rows


@pytest.mark.parametrize("op", sampled(zip(KERNELS, strict=True), lambda op: op != "matmul_all_reduce"))
def test_nothing_is_spilled_where_rows_were_tuned(op, tmp_path):
    for world_size, chosen in tuned_designs(op):
        for descriptors in (True, False):
            kernel = built(op, "sm_90", 2048, descriptors, world_size=world_size, chosen=chosen)
            assert stack_bytes(kernel, tmp_path) == 0, (world_size, chosen, descriptors)


@pytest.mark.parametrize("op", sampled(zip(KERNELS, strict=True), lambda op: op != "matmul_all_reduce"))
@pytest.mark.parametrize(
    ("dtype", "world_size"),
    sampled([(torch.float32, 2), (torch.float16, 3), (torch.bfloat16, 8)], lambda dtype, world_size: world_size == 3),
)
def test_other_dtypes_and_world_sizes_compile(dtype, world_size, op, tmp_path):
    for rows in (32, 200):
        kernel = built(op, "sm_90", rows, dtype=dtype, world_size=world_size)
        assert stack_bytes(kernel, tmp_path) == 0, rows


def test_kernels_between_pieces_compile():
    signals, x = torch.zeros(8, dtype=torch.int32), torch.zeros(8, dtype=torch.bfloat16)
    for arch in TARGETS:
        summed = compiled(
            sum_kernel, x, x, x, 1 << 20, 1 << 20, BUFFERS=3, BLOCK=SUM_BLOCK, num_warps=SUM_WARPS, arch=arch
        )  # fmt: skip
        if arch == "sm_90":
            # 16 bytes a thread of each of four operands, none waiting for the other.
            assert len(re.findall(r"ld\.global\.v4\.b32", summed.asm["ptx"])) == 4 * SUM_BLOCK // (SUM_WARPS * 32 * 8)
            assert not re.search(r"ld\.global(\.\w+)*\.b16", summed.asm["ptx"])
        compiled(begin_kernel, Half(LANDED, signals, WORDS), a_view(), arch=arch, num_warps=1)
        compiled(wait_kernel, LANDED, 1, 0, a_view(), arch=arch, num_warps=1)
        shared = compiled(
            share_kernel, x, x, Shares(x, x, 1 << 20, WORDS, 1 << 9, WORDS), 4096, 5120, a_view(), BLOCK=SUM_BLOCK,
            num_warps=SUM_WARPS, arch=arch,
        )  # fmt: skip
        if arch == "sm_90":
            # To three peers and to out; what arrives; none of it element by element.
            assert len(re.findall(r"st\.global\.v4\.b32", shared.asm["ptx"])) == 5
            assert not re.search(r"(ld|st)\.global(\.\w+)*\.b16", shared.asm["ptx"])


@pytest.mark.parametrize("op", ["matmul_reduce_scatter", "matmul_all_reduce"])
def test_a_tile_is_stored_before_its_signal(op):
    """PTX of sm_90: 16-byte stores, then the CTA barrier, then the release that a peer waits for."""
    ptx = built(op, "sm_90", 2048).asm["ptx"]
    release = ptx.index("st.release.sys")
    barrier = ptx.rindex("bar.sync", 0, release)
    assert ptx.rindex("st.global.v4", 0, release) < barrier


@pytest.mark.parametrize("arch", TARGETS)
def test_tiles_cover_all_sizes(arch):
    for dtype in (torch.float16, torch.float32):
        for rows in (1, 16, 17, 64, 100, 128, 4096):
            assert design_for(arch, rows, dtype).tile.block_m < max(32, 2 * rows)
