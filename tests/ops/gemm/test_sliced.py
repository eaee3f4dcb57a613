"""GEMMs in slices of K: an element's bits depend on its row, its row of the weight and the slices, not on the tile or M."""

import pytest
import torch

import weft
from tests.compiling import TARGETS, compiled, stack_bytes
from tests.ops.checking import assert_identical
from weft import ops
from weft.kernels.fp8 import Fp8, by_torch, quantized_weight
from weft.kernels.fp8_tile import scales_of_gemm
from weft.kernels.gemm_tile import Block, Sizes
from weft.kernels.operands import descriptor_or_self
from weft.ops.case import BF16, FP16
from weft.ops.gemm import sliced
from weft.ops.gemm.sliced import Sliced, default_sliced, step_of
from weft.runtime.capabilities import Capabilities, launch_options

DESIGNS = (
    Sliced(block_m=64, block_n=16),
    Sliced(block_m=128, block_n=32, programs=2, num_warps=8, num_stages=3),
    Sliced(block_m=64, block_n=64, programs=8),
    Sliced(block_m=128, block_n=128, programs=4, num_warps=8),
)


def caps_of(arch):
    return Capabilities(device_name=arch, arch=arch, sms=132, memory_bytes=0, peer_access=(True,))


def operands(M, N, K, dtype=BF16, device="cpu"):
    generator = torch.Generator().manual_seed(M + N + K)
    return tuple(torch.randn((rows, K), generator=generator).to(device, dtype) for rows in (M, N))


def noisy(M, N, K, slices, device="cpu"):
    """Operands whose sums over a slice are 0 but for rounding errors: every bit of a result shows the order of its sum."""
    x, w = operands(M, N, K, device=device)
    generator, length = torch.Generator().manual_seed(K), K // slices
    for first in range(0, K, length):
        left, right = (first + torch.randperm(length, generator=generator)).chunk(2)
        x[:, right], w[:, right] = x[:, left], -w[:, left]
    return x, w


def product(x, w, slices, rounded, design, step=None):
    step = step or step_of("sliced", x.shape[1], slices, slices)
    return sliced.total(sliced.run(design, x, w, slices, rounded=rounded, step=step), x.dtype, rounded=rounded)


def tree(x, w, slices):
    """Leaves in fp64, rounded to fp32 and then to the dtype; every node above rounded to it."""
    nodes = [a.double() @ b.double().T for a, b in zip(x.chunk(slices, 1), w.chunk(slices, 1), strict=True)]
    nodes = [node.float().to(x.dtype) for node in nodes]
    while len(nodes) > 1:
        nodes = [(a.float() + b.float()).to(x.dtype) for a, b in zip(nodes[::2], nodes[1::2], strict=True)]
    return nodes[0]


@pytest.mark.parametrize("dtype", (BF16, FP16))
def test_a_step_a_slice_gives_the_tree_of_torch_bit_for_bit(dtype):
    x, w = operands(5, 40, 128, dtype)

    def main(team):
        for design in DESIGNS:
            assert_identical(product(x, w, 8, True, design), tree(x, w, 8))

    weft.simulate(main, 1)


@pytest.mark.parametrize(("slices", "rounded"), ((8, True), (4, True), (1, True), (2, False)))
def test_bits_of_a_row_depend_on_no_tile_and_no_other_row(slices, rounded):
    x, w = noisy(130, 72, max(1024, 256 * slices), slices)

    def main(team):
        whole = product(x, w, slices, rounded, DESIGNS[0])
        assert (whole != 0).float().mean() > 0.5
        for number, M in enumerate((130, 1, 2, 17, 33, 64, 65)):
            design = DESIGNS[(number + 1) % len(DESIGNS)]
            assert_identical(product(x[:M], w, slices, rounded, design), whole[:M], what=f"M={M} {design}")
        # Columns of one rank of two, and another rank's.
        halves = [product(x[:9], part, slices, rounded, DESIGNS[0]) for part in w.chunk(2)]
        assert_identical(torch.cat(halves, 1), whole[:9])

    weft.simulate(main, 1)


def test_gated_tiles_give_the_bits_of_two_launches():
    x, w = noisy(70, 2 * 72, 256, 1)

    def main(team):
        expected = ops.silu_mul(ops.matmul(x, w, invariant=True))
        for M in (70, 1, 17):
            assert_identical(ops.matmul_silu_mul(x[:M], w, invariant=True), expected[:M], what=f"M={M}")

    weft.simulate(main, 1)


def test_gated_tiles_on_sm_90_do_not_spill(tmp_path):
    for M in (1, 64, 128):
        design, x = default_sliced(M, 4096, 2, caps_of("sm_90"), gated=True), torch.zeros((64, 64), dtype=BF16)
        kernel = compiled(
            sliced.sliced_kernel,
            descriptor_or_self(x, design.block_n, 64, True),
            descriptor_or_self(x, design.block_m, 64, True),
            x,
            M,
            Sizes(4096, 4096, 4096, 4096),
            1,
            32,
            Block(*map(sliced.tl.constexpr, (design.block_m, design.block_n, 64, True, 1, 1))),
            None,
            None,
            arch="sm_90",
            COUNT=2,
            ROUNDED=False,
            ACTIVATION="silu",
            num_warps=design.num_warps,
            num_stages=design.num_stages,
            enable_fp_fusion=False,
            **launch_options(caps_of("sm_90")),
        )
        assert stack_bytes(kernel, tmp_path) == 0, f"M={M}"


@pytest.mark.gpu(1)
def test_on_a_gpu_gated_tiles_give_the_bits_of_two_launches():
    x, w = noisy(600, 2 * 520, 1024, 1, device="cuda")
    expected = ops.silu_mul(ops.matmul(x, w, invariant=True))
    for M in (600, 1, 2, 17, 64, 128, 129):
        assert_identical(ops.matmul_silu_mul(x[:M], w, invariant=True), expected[:M], what=f"M={M}")


def test_another_step_slice_or_rounding_gives_other_bits():
    x, w = noisy(20, 64, 1024, 4)

    def main(team):
        right = product(x, w, 4, True, DESIGNS[0])
        assert not torch.equal(product(x, w, 4, True, DESIGNS[0], step=16), right), "K order"
        assert not torch.equal(product(x, w, 8, True, DESIGNS[0]), right), "slices by W"
        plain = operands(20, 64, 256)
        assert not torch.equal(*(product(*plain, 4, rounded, DESIGNS[0]) for rounded in (True, False))), (
            "leaves in fp32"
        )

    weft.simulate(main, 1)


def test_sizes_that_slices_do_not_divide_are_refused():
    with pytest.raises(ValueError, match=r"o: K=192 is not divisible by 128.*pad K to 256"):
        step_of("o", 96, 4, 8)
    assert [step_of("o", K, 8, 8) for K in (128, 256, 512, 25600, 18944)] == [16, 32, 64, 64, 64]
    assert step_of("o", 3072, 8, 8, fp8=True) == 128


@pytest.mark.parametrize("arch", TARGETS)
def test_every_default_compiles_and_on_sm_90_multiplies_by_one_family_of_instructions(arch):
    for M, slices in ((1, 8), (64, 4), (4096, 2)):
        design = default_sliced(M, 4096, slices, caps_of(arch))
        x, rounded = torch.zeros((64, 64), dtype=BF16), slices > 2
        block = Block(*map(sliced.tl.constexpr, (design.block_m, design.block_n, 64, True, 1, 1)))
        kernel = compiled(
            sliced.sliced_kernel,
            descriptor_or_self(x, design.block_n, 64, True),
            descriptor_or_self(x, design.block_m, 64, True),
            x if rounded or design.programs == 1 else torch.zeros(8),
            M,
            Sizes(4096, 4096, 4096, 4096),
            design.programs,
            8,
            block,
            None,
            None,
            arch=arch,
            COUNT=slices // min(slices, design.programs),
            ROUNDED=rounded,
            num_warps=design.num_warps,
            num_stages=design.num_stages,
            **launch_options(caps_of(arch)),
        )
        if arch == "sm_90":
            assert f"wgmma.mma_async.sync.aligned.m64n{design.block_n}k16" in kernel.asm["ptx"]
            assert "mma.sync" not in kernel.asm["ptx"]


@pytest.mark.parametrize("arch", ("sm_90", "gfx942"))
def test_fp8_blocks_compile_and_on_sm_90_multiply_by_one_family_of_instructions(arch):
    design = default_sliced(1, 4096, 4, caps_of(arch))
    x = torch.zeros((128, 128), dtype=torch.float8_e4m3fn)
    scales = scales_of_gemm(torch.zeros((64, 32)), Fp8(torch.zeros((256, 4096)), torch.zeros((2, 32))), 64, False)
    kernel = compiled(
        sliced.sliced_kernel,
        descriptor_or_self(x, design.block_n, 128, True),
        descriptor_or_self(x, design.block_m, 128, True),
        torch.zeros((64, 64), dtype=BF16),
        1,
        Sizes(4096, 4096, 4096, 4096),
        design.programs,
        4,
        Block(*map(sliced.tl.constexpr, (design.block_m, design.block_n, 128, True, 1, 1))),
        scales,
        None,
        arch=arch,
        COUNT=4 // design.programs,
        ROUNDED=True,
        num_warps=design.num_warps,
        num_stages=design.num_stages,
        enable_fp_fusion=False,
        **launch_options(caps_of(arch)),
    )
    if arch == "sm_90":
        assert f"wgmma.mma_async.sync.aligned.m64n{design.block_n}k32" in kernel.asm["ptx"]
        assert "mma.sync" not in kernel.asm["ptx"] and "fma.rn.f32" not in kernel.asm["ptx"]


def test_scales_that_depend_on_the_ranks_shares_are_refused():
    x, w = operands(4, 64, 256)
    for scheme in ("channel", "tensor"):
        weight = Fp8(*quantized_weight(w, scheme)[:2])
        with pytest.raises(ValueError, match="invariant=True with weight.scales of.*blocks of 128 columns alone"):
            ops.matmul(x, weight, invariant=True)
    with pytest.raises(ValueError, match="invariant=True with a weight of torch.float32; pass bfloat16"):
        ops.matmul(x.float(), w.float(), invariant=True)


@pytest.mark.gpu(1)
def test_on_a_gpu_fp8_blocks_give_the_same_bits_in_all_tiles():
    rows, w = operands(130, 256, 3072, device="cuda")
    x, weight, whole = Fp8(*by_torch(rows, 128)), Fp8(*quantized_weight(w, "block")[:2]), None
    for design in DESIGNS:
        for M in (130, 1, 17, 64, 65):
            rows = x._replace(data=x.data[:M], scales=x.scales[:M])
            nodes = sliced.run(design, rows, weight, 8, rounded=True, step=128, dtype=BF16)
            out = sliced.total(nodes, BF16, rounded=True)
            whole = out if whole is None else whole
            assert_identical(out, whole[:M], what=f"M={M} {design}")


@pytest.mark.gpu(1)
def test_on_a_gpu_all_tiles_and_numbers_of_rows_give_the_same_bits():
    wide = [Sliced(block_m=64, block_n=128, num_warps=4), Sliced(block_m=128, block_n=256, num_warps=8, num_stages=3)]
    for K, slices, rounded in ((2048, 8, True), (3072, 4, True), (1024, 1, True), (4096, 2, False)):
        x, w = operands(130, 200, K, device="cuda")
        whole = product(x, w, slices, rounded, DESIGNS[0])
        torch.testing.assert_close(whole.float(), x.float() @ w.float().T, atol=2, rtol=0.05)
        x, w = noisy(130, 200, K, slices, device="cuda")
        whole = product(x, w, slices, rounded, DESIGNS[0])
        for design in (*DESIGNS, *wide):
            for M in (1, 2, 16, 17, 33, 64, 65, 130):
                assert_identical(product(x[:M], w, slices, rounded, design), whole[:M], what=f"K={K} M={M} {design}")
