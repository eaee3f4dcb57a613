"""Small-M GEMMs: the kernel against plain PyTorch in the simulator, its code for each target, and on a GPU the same bits with
and without programmatic dependent launch."""

import pytest
import torch

import weft
from tests.compiling import SHARED, TARGETS, compiled, stack_bytes
from tests.ops.checking import assert_close, assert_identical
from tests.sampled import sampled
from weft import ops
from weft.kernels.deferred_norm import DeferredNorm
from weft.kernels.gemm_tile import Sizes
from weft.kernels.operands import RowScales, ScaledMatrix, descriptor_or_self
from weft.ops import local
from weft.ops.case import BF16, FP16, FP32
from weft.ops.gemm import small_m
from weft.ops.gemm.gemm_cases import SMALL_M
from weft.ops.gemm.gemm_op import GemmCall
from weft.ops.gemm.matmul import MATMUL
from weft.ops.gemm.matmul_silu_mul import MATMUL_SILU_MUL
from weft.ops.gemm.small_m_rule import SmallM, default_small_m
from weft.plan.planned import machine
from weft.runtime.capabilities import Capabilities, launch_options

# What an op is called with: (M, N, K), ragged in every dimension. Rows of K elements start on 16 bytes.
SHAPES = ((1, 48, 96), (5, 40, 72), (33, 80, 200), (16, 16, 16), (20, 136, 64))


def operands(M, N, K, dtype, seed=0, gated=False):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((M, K), generator=generator).to(dtype)
    return x, torch.randn(((2 if gated else 1) * N, K), generator=generator).to(dtype)


def reference(x, weight, gated):
    product = x.double() @ weight.double().T
    if not gated:
        return product
    gate, up = product.chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up


def alone(main):
    """``main`` on one virtual rank."""
    return weft.simulate(lambda team: main(), 1)[0]


def capabilities_of(arch, sms=132):
    # The GPU whose rows the table has.
    name = {"sm_90": "NVIDIA H200"}.get(arch, arch)
    return Capabilities(device_name=name, arch=arch, sms=sms, memory_bytes=0, peer_access=(True,))


def small_m_of(M, N, K, caps, gated=False, dtype=BF16, **fields):
    """The small-M design that the plan of a call has; None for another design."""
    op = MATMUL_SILU_MUL if gated else MATMUL
    design = op.plan(GemmCall(M, N, K, dtype, **fields), machine(caps, 1)).design
    return design if isinstance(design, SmallM) else None


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "silu"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("design", SMALL_M, ids=range(len(SMALL_M)))
def test_ragged_shapes(design, dtype, gated):
    def main():
        for call, (M, N, K) in enumerate(SHAPES):
            x, weight = operands(M, N, K, dtype, call, gated)
            given, activation = (ScaledMatrix(x), weight, design), "silu" if gated else None
            out = small_m.run(*given, activation=activation)
            assert_close(out, reference(x, weight, gated), K, what=f"{M}x{N}x{K}")
            assert_identical(
                small_m.run(ScaledMatrix(x), weight, design, activation="silu" if gated else None),
                out,
                what=f"{M}x{N}x{K} again",
            )

    alone(main)


@pytest.mark.parametrize("op", [ops.matmul, ops.matmul_silu_mul])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_what_an_op_is_called_with(op, dtype):
    """Whatever the design that a shape and dtype get: many rows, odd rows, strided rows, columns that are no rows."""
    gated = op is ops.matmul_silu_mul

    def main():
        for M, N, K in (*SHAPES, (150, 40, 24), (3, 34, 21)):
            x, weight = operands(M, N, K, dtype, gated=gated)
            wide = torch.randn(M, K + 8).to(dtype)
            wide[:, :K] = x
            for a, b in ((x, weight), (wide[:, :K], weight), (x.t().contiguous().t(), weight.t().contiguous().t())):
                out = op(a, b)
                assert out.dtype == dtype and out.is_contiguous()
                assert_close(out, reference(a, b, gated), K, partials=int(gated), what=f"{M}x{N}x{K}")

    alone(main)


def test_a_row_is_the_same_alone_and_among_others():
    """The partials of K and the order within them depend on the design alone: same design, same bits for the same row."""

    def main():
        x, weight = operands(40, 48, 136, BF16)
        for design in SMALL_M:
            out = small_m.run(ScaledMatrix(x), weight, design)
            for rows in (slice(0, 1), slice(7, 19), slice(39, 40)):
                assert_identical(small_m.run(ScaledMatrix(x[rows]), weight, design), out[rows], what=f"{design} {rows}")

    alone(main)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_without_a_graph_break(backend):
    def main():
        compiled_mlp = torch.compile(
            lambda x, up, down: ops.matmul(ops.matmul_silu_mul(x, up), down), fullgraph=True, backend=backend
        )
        x, up = operands(6, 24, 40, BF16, gated=True)
        down = torch.randn(16, 24).bfloat16()
        assert_identical(compiled_mlp(x, up, down), ops.matmul(ops.matmul_silu_mul(x, up), down))

    alone(main)
    torch._dynamo.reset()


def test_sizes_may_be_left_open_while_compiling():
    """A size that is a symbol is no key of what was decided before."""

    def main():
        left = torch.compile(
            lambda x, weight: ops.matmul_parts(x, weight), fullgraph=True, backend="aot_eager", dynamic=True
        )
        for M in (5, 6, 7):
            x, weight = operands(M, 24, 200, BF16, gated=False)
            assert_identical(left(x, weight), ops.matmul_parts(x, weight), what=f"M={M}")

    alone(main)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.matmul_silu_mul(torch.ones(2, 4), torch.ones(6, 3)), r"x has K=4 columns and weight has 3"),
        (lambda: ops.matmul_silu_mul(torch.ones(2, 4), torch.ones(7, 4)), r"weight has 7 rows.*gate.*up"),
        (lambda: ops.matmul_silu_mul(torch.ones(4), torch.ones(6, 4)), r"x has shape \(4,\)"),
        (
            lambda: ops.matmul_silu_mul(torch.ones(2, 4).half(), torch.ones(6, 4)),
            r"weight.dtype=torch.float32 is not one of float16",
        ),
        (lambda: SmallM(block_m=24, block_n=16, block_k=16), r"block_m=24 is not a power of two"),
        (lambda: SmallM(block_m=16, block_n=16, block_k=16, partials=0), r"partials=0 is not in 1"),
        (lambda: SmallM(block_m=16, block_n=16, block_k=16, ahead=100), r"ahead=100 is not a multiple of 64"),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


PROJECTIONS = ((2560, 5120), (5120, 2048), (5120, 6400), (12800, 5120), (640, 512))


def default_of(M, N, K, caps, gated=False, dtype=BF16, **fields):
    return default_small_m(GemmCall(M, N, K, dtype, **fields), caps, gated=gated)


def built(arch, M, N, K, gated, dtype=BF16, squares=0, partials=False):
    """The kernel that a GEMM of these sizes gets on ``arch``, and its design. squares: of a deferred RMS scale, per row."""
    caps = capabilities_of(arch)
    call = GemmCall(M, N, K, dtype, partials=partials, deferred_norm=partials and squares > 0, design="small_m")
    design = (MATMUL_SILU_MUL if gated else MATMUL).plan(call, machine(caps, 1)).design
    x = torch.zeros((64, 64), dtype=dtype)
    rows, weight = (descriptor_or_self(x, block, design.block_k, True) for block in (design.block_m, design.block_n))
    out = torch.zeros(8) if design.partials > 1 else x
    kernel = compiled(
        small_m.small_m_kernel, rows, weight, x, out, M, Sizes(N, K, K, K), design.partials, design.ahead,
        RowScales(torch.zeros(8), 1e-6), small_m.block_of(design), None, None, None, None, arch=arch, SQUARES=squares,
        **small_m.constants(design, gated), **launch_options(caps),
    )  # fmt: skip
    return kernel, design


@pytest.mark.triton_internals
@pytest.mark.parametrize(
    ("arch", "gated", "M"),
    sampled(
        ((arch, gated, M) for arch in TARGETS for gated in (False, True) for M in (1, 32, 64, 128)),
        lambda arch, gated, M: M == 64 and gated == (arch in ("sm_90", "gfx942")),
    ),
)
def test_compiles_and_fits(arch, gated, M, tmp_path):
    for N, K in PROJECTIONS:
        # With the rows' squares too, of a norm of the largest products.
        for squares in (0, 20) if K == 5120 else (0,):
            kernel, design = built(arch, M, N, K, gated, squares=squares)
            assert kernel.metadata.shared <= SHARED[arch], design
            if arch.startswith("sm_"):
                assert stack_bytes(kernel, tmp_path) == 0, design


@pytest.mark.triton_internals
@pytest.mark.parametrize("M", [pytest.param(16, marks=pytest.mark.sweep), 32])
def test_on_sm_90_two_programs_fit_an_sm_where_there_are_more_than_sms(M):
    for N, K, programs in ((12800, 5120, 2), (25600, 5120, 2), (5120, 6400, 1), (5120, 2048, 1)):
        kernel, design = built("sm_90", M, N, K, False)
        # 228 KiB an SM, of which the system keeps 1 a program.
        assert (228 << 10) // (kernel.metadata.shared + 1024) == programs, (M, N, design)
        assert design.partials == 1 and design.transposed
    # Partials that the kernel behind adds up: where a program a tile would leave SMs idle, and K is long enough.
    for N, K, programs, partials in (
        (5120, 6400, 2, 3),
        (5120, 12800, 2, 3),
        (5120, 4096, 2, 2),
        (5120, 2048, 1, 1),
    ):
        kernel, design = built("sm_90", M, N, K, False, partials=True)
        assert design.partials == partials and design.transposed
        assert (228 << 10) // (kernel.metadata.shared + 1024) == programs, (M, N, K, design)


@pytest.mark.triton_internals
def test_on_sm_90_as_many_programs_of_other_kernels_fit(tmp_path):
    for N, K, squares, programs, block_n in (
        (5120, 12800, 0, 1, 128),
        (5120, 5120, 20, 2, 64),
        (2560, 5120, 20, 1, 64),
    ):
        kernel, design = built("sm_90", 128, N, K, False, squares=squares, partials=True)
        assert (design.partials, design.block_n) == (3, block_n) and design.transposed
        assert (228 << 10) // (kernel.metadata.shared + 1024) == programs, (N, K, design)
        assert stack_bytes(kernel, tmp_path) == 0, design
    for M, N, programs in (
        *((16, 12800, 2), (32, 12800, 2), (64, 12800, 2)), *((16, 17408, 4), (32, 17408, 3), (64, 17408, 3)),
        *((16, 8704, 2), (64, 8704, 2), (16, 6400, 1), (64, 6400, 1)),
    ):  # fmt: skip
        kernel, design = built("sm_90", M, N, 5120, True)
        assert (228 << 10) // (kernel.metadata.shared + 1024) == programs, (M, N, design)


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "silu"])
def test_on_sm_90_the_weight_is_fetched_before_the_kernel_before_has_ended_and_x_after(gated):
    kernel, design = built("sm_90", 16, 2560, 5120, gated)
    ptx = kernel.asm["ptx"]
    wait = ptx.index("griddepcontrol.wait")
    assert (design.ahead == 0) == gated  # an argument: the kernel is the same
    assert ptx.index("cp.async.bulk.prefetch.L2") < wait
    assert ptx.index("cp.async.bulk.tensor") > wait
    # Only then may the next kernel's programs come up, which would prefetch too.
    assert wait < ptx.rindex("wgmma.mma_async") < ptx.index("griddepcontrol.launch_dependents")


def test_on_sm_90_the_rows_squares_are_under_way_while_the_product_is_computed():
    for M, gated in ((1, False), (32, True)):
        ptx = built("sm_90", M, 12800, 5120, gated, squares=20)[0].asm["ptx"]
        loads = [at for at in range(len(ptx)) if ptx.startswith("ld.global", at)]
        assert loads and ptx.index("griddepcontrol.wait") < loads[0]
        assert loads[-1] < ptx.index("wgmma.mma_async") < ptx.rindex("wgmma.mma_async") < ptx.index("rsqrt")


def test_sums_of_partials_compile():
    for arch in TARGETS:
        for gated in (False, True):
            partials = torch.zeros(8)
            compiled(
                small_m.sum_partials_kernel, partials, partials.bfloat16(), 1 << 20, 1 << 20, 3, None, GATED=gated,
                BLOCK=small_m.SUM_BLOCK, arch=arch, **launch_options(capabilities_of(arch)),
            )  # fmt: skip


@pytest.mark.parametrize("arch", TARGETS)
def test_every_size_has_a_design(arch):
    caps = capabilities_of(arch)
    for M in (1, 7, 16, 17, 64, 100, 128):
        for N, K in (*PROJECTIONS, (8, 16), (151936, 5120), (64, 100000)):
            for gated in (False, True):
                for partials in (False, True):
                    design = default_of(M, N, K, caps, gated, partials=partials)
                    assert design.block_m < max(32, 2 * M)
                    assert design.partials <= max(1, K // design.block_k)


def test_explain_says_which_design_and_why():
    caps = capabilities_of("sm_90")
    for op, M, N, K, design, said in (
        ("matmul", 16, 5120, 6400, "small_m", "matmul bfloat16 16x5120x6400: chosen in whole steps"),
        ("matmul", 16, 5120, 6464, "small_m", "M=16 <= 64"),
        ("matmul", 65, 5120, 6400, "cublas", "cuBLAS"),
        ("matmul_silu_mul", 64, 5120, 6400, "small_m", "M=64 <= 64"),
        ("matmul_silu_mul", 65, 6400, 5120, "cublas", "M=65 > 64"),
        ("matmul_silu_mul", 127, 6400, 5120, "cublas", "M=127 > 64"),
        ("matmul_silu_mul", 128, 6400, 5120, "small_m", "128x6400x5120"),
    ):
        found = ops.explain(op, M=M, N=N, K=K, world_size=1, caps=caps)
        assert found.algorithm == design
        assert said in found.reason and said in str(found)


@pytest.mark.parametrize("M", [1, 32, 64])
def test_what_is_behind_a_kernel_that_reads_memory_prefetches_nothing(M):
    """The GEMMs of a decode step of Qwen3-32B, as recipes ask for them, at W=4 and W=2."""
    caps = capabilities_of("sm_90")

    def ahead(N, K, gated=False, **fields):
        return small_m_of(M, N, K, caps, gated, **fields).ahead

    for W in (4, 2):
        assert ahead(10240 // W, 5120, partials=True, deferred_norm=True) > 0  # qkv, behind an all-reduce
        assert ahead(5120, 8192 // W, partials=True) == 0  # o, behind attention
        assert ahead(5120, 25600 // W, partials=True) == 0  # down, behind gate-up
        gate_up = ahead(25600 // W, 5120, True, deferred_norm=True)
        assert (gate_up > 0) == (W == 2 and M == 1)


def test_which_gemms_of_up_to_128_rows_leave_partials():
    """Where whole decode steps took less time so: elsewhere cuBLAS multiplies."""
    caps = capabilities_of("sm_90")
    qkv, down = {"partials": True, "deferred_norm": True}, {"partials": True}
    for N, K, fields, rows, others in (
        (5120, 12800, down, (96, 100, 128), (65, 95, 129)),  # W=2
        (5120, 6400, down, (), (65, 96, 128, 129)),  # W=4: short partials
        (8192, 14336, down, (), (96, 128)),  # of Llama-3-70B: two partials
        (5120, 12800, {}, (), (65, 96, 128)),  # no kernel behind adds partials up
        (5120, 5120, qkv, (128,), (65, 96, 127, 129)),  # W=2
        (2560, 5120, qkv, (96, 127, 128), (65, 72, 95, 129)),  # W=4
    ):
        for M in (*rows, *others):
            design = small_m_of(M, N, K, caps, **fields)
            assert (design is not None) == (M in rows), (M, N, K)
            assert design is None or design.partials == 3


def test_other_targets_and_dtypes_get_another_design():
    for arch, dtype, N in (("sm_80", BF16, 5120), ("gfx942", BF16, 5120), ("sm_90", FP32, 5120), ("sm_90", BF16, 64)):
        for op in (MATMUL, MATMUL_SILU_MUL):
            planned = op.plan(GemmCall(16, N, 5120, dtype), machine(capabilities_of(arch), 1))
            assert planned.name == "cublas" and planned.reason


@pytest.mark.gpu(1)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "silu"])
def test_the_same_bits_with_and_without_programmatic_dependent_launch(gated, monkeypatch):
    """A chain in which each product reads what the one before wrote, in a graph: a load of x that came too early shows."""
    caps = local.capabilities_of(torch.device("cuda", torch.cuda.current_device()))
    generator = torch.Generator("cuda").manual_seed(0)
    H, steps = 5120, 6

    def chain(x, weights, design):
        for weight in weights:
            x = torch.ops.weft.add_rms_norm(x, x, torch.ones_like(x[0]), 1e-6)[0]
            x = small_m.run(ScaledMatrix(x), weight, design, activation="silu" if gated else None)
        return x

    for M in (1, 16, 33, 64):
        weights = [
            torch.randn((H * (2 if gated else 1), H), generator=generator, device="cuda").bfloat16() * 0.02
            for _ in range(steps)
        ]
        x = torch.randn((M, H), generator=generator, device="cuda").bfloat16()
        split = SmallM(block_m=16, block_n=64, block_k=128, partials=3, ahead=512)
        for design in (default_of(M, H, H, caps, gated), split):
            results = []
            for options in ({}, launch_options(caps)):
                monkeypatch.setattr(small_m, "launch_options", lambda caps, options=options: options)
                results.append(chain(x, weights, design))
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    captured = chain(x, weights, design)
                for _ in range(20):
                    graph.replay()
                results.append(captured.clone())
            for result in results[1:]:
                assert_identical(result, results[0], what=f"M={M} {design}")


@pytest.mark.gpu(1)
@pytest.mark.parametrize("op", [ops.matmul, ops.matmul_silu_mul])
def test_on_a_gpu(op):
    gated = op is ops.matmul_silu_mul
    caps = local.capabilities_of(torch.device("cuda", torch.cuda.current_device()))
    for M in (1, 5, 16, 40, 64, 128, 200):
        for N, K in ((2560, 5120), (5120, 2048), (1000, 5008), (33, 512)):
            x, weight = (t.cuda() for t in operands(M, N, K, BF16, gated=gated))
            out, what = op(x, weight), f"{M}x{N}x{K}"
            if small_m_of(M, N, K, caps, gated) is None:
                product = x @ weight.T
                assert_identical(out, ops.silu_mul(product) if gated else product, what=what)
            else:
                assert_close(out, reference(x, weight, gated), K, what=what)
            assert_identical(op(x, weight), out, what=what)


@pytest.mark.gpu(1)
@pytest.mark.parametrize(("M", "N", "K", "behind_a_norm"), [(96, 5120, 12800, False), (100, 5120, 12800, False),
    (128, 5120, 12800, False), (128, 5120, 5120, True), (100, 2560, 5120, True), (16, 5120, 6400, False)])  # fmt: skip
def test_partials_on_a_gpu(M, N, K, behind_a_norm):
    x, weight = (t.cuda() for t in operands(M, N, K, BF16))
    expected, of = reference(x, weight, False), x
    if behind_a_norm:
        squares = torch.rand((M, 20), device="cuda")
        expected, of = expected * (squares.double().sum(1, keepdim=True) + 1e-6).rsqrt(), DeferredNorm(x, squares, 1e-6)
    parts = ops.matmul_parts(of, weight)
    assert parts.shape == (3, M, N) and parts.dtype == FP32
    assert_close(parts.sum(0).to(BF16), expected, K, what="their sum")
    for part in parts:
        assert part.abs().max() > 0
    assert_identical(ops.matmul_parts(of, weight), parts, what="again")
