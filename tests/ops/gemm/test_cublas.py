"""cuBLAS's GEMM by a chosen algorithm: which GEMMs get one, and on a GPU that every algorithm computes the same."""

import dataclasses

import pytest
import torch

from tests.ops.checking import assert_close, assert_identical
from weft import ops
from weft.ops.gemm import cublas
from weft.ops.gemm.cublas import Cublas
from weft.ops.gemm.gemm_op import GemmCall
from weft.ops.gemm.matmul import MATMUL
from weft.plan import table
from weft.plan.planned import machine
from weft.runtime import capabilities, cublaslt
from weft.runtime.cublaslt import Algorithm

BF16, FP16 = torch.bfloat16, torch.float16
H200 = dataclasses.replace(capabilities.simulated(1), is_simulated=False)
SHIPPED = [
    row for row in table.read(table.file_for("NVIDIA H200", 1)).rows if row.design == table.EXACT and row.op == "matmul"
]  # what `python -m benchmarks.lab.cublas --tuned` found


def algorithm_of(row):
    """The algorithm that a row names, None for cuBLAS's own choice."""
    return row.as_design({"cublas": Cublas}).algorithm


def test_a_row_stands_for_its_very_shape():
    assert len(SHIPPED) > 30
    for row in SHIPPED:
        M, N, K = row.shape
        assert row.us < row.default_us
        assert cublas.tuned(M, N, K, BF16, H200) == Cublas(algorithm=algorithm_of(row)) != Cublas()
        for other in ((M - 1, N, K), (M + 1, N, K), (M, N - 8, K), (M, N, K + 64)):
            assert cublas.tuned(*other, BF16, H200) == Cublas(), other
        assert cublas.tuned(M, N, K, FP16, H200) == Cublas()
        assert cublas.tuned(M, N, K, BF16, dataclasses.replace(H200, device_name="Some GPU")) == Cublas()


def test_a_plan_takes_the_row_of_its_shape():
    here = machine(H200, 1)
    for row in SHIPPED[:8]:
        planned = MATMUL.plan(GemmCall(*row.shape, BF16), here)
        assert (planned.name, planned.row) == ("cublas", row)
        assert planned.design == Cublas(algorithm=algorithm_of(row))


def test_explain_names_the_algorithm():
    row = SHIPPED[-1]
    M, N, K = row.shape
    found, algorithm = ops.explain("gemm", M=M, N=N, K=K, world_size=4, caps=H200), algorithm_of(row)
    assert (found.algorithm, found.plan, found.row) == ("cublas", Cublas(algorithm=algorithm), row)
    told = str(found)
    assert f"gets  cublas: tile={algorithm.tile}, cluster={algorithm.cluster}" in told
    assert (
        f"nvidia-h200.w1.json: matmul bfloat16 {M}x{N}x{K}: {row.us:.4g} µs, the default {row.default_us:.4g}" in told
    )
    assert ops.explain("gemm", M=M + 1, N=N, K=K, world_size=4, caps=H200).row is None


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="for machines without a GPU")
def test_without_a_gpu_there_are_none():
    a, b = torch.ones(4, 8), torch.ones(2, 8)
    assert cublaslt.version() == ""
    assert cublaslt.algorithms(256, 256, 256, BF16) == []
    assert not cublaslt.matmul(a, b, torch.empty(4, 2), algorithm_of(SHIPPED[0]))
    assert torch.equal(cublas.matmul(a, b), torch.full((4, 2), 8.0))
    assert torch.equal(cublas.matmul(a, b, torch.ones(4, 2), add=True), torch.full((4, 2), 9.0))


# --- on a GPU --------------------------------------------------------------------------------------------------------


# Algorithms that shipped rows name, whatever the shape.
KNOWN = tuple(dict.fromkeys(map(algorithm_of, SHIPPED)))


def operands(M, N, K, dtype, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return [
        torch.empty(size, device="cuda", dtype=dtype).normal_(0, scale, generator=generator)
        for size, scale in (((M, K), 1.0), ((N, K), K**-0.5))
    ]


def candidates(M, N, K, dtype):
    found = cublaslt.algorithms(M, N, K, dtype)
    if torch.cuda.get_device_capability() == (9, 0):
        assert found
    return [*found, *KNOWN] if found else []


@pytest.mark.gpu(1)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_every_algorithm_computes_the_product(dtype):
    ran = 0
    for M, N, K in ((256, 2560, 5120), (1000, 520, 1288), (1, 8, 8), (513, 5120, 264)):
        a, b = operands(M, N, K, dtype)
        expected = a.float() @ b.float().T
        wide = torch.zeros((M, K + 8), device="cuda", dtype=dtype)
        wide[:, 8:] = a
        for algorithm in candidates(M, N, K, dtype):
            out, what = torch.full((M, N + 8), 7.0, device="cuda", dtype=dtype), f"{M}x{N}x{K} {algorithm}"
            if not cublaslt.matmul(a, b, out[:, :N], algorithm):
                continue
            ran += 1
            assert_close(out[:, :N], expected, K, what=what)
            assert (out[:, N:] == 7).all(), what  # and nothing behind a row's end
            again = torch.empty((M, N), device="cuda", dtype=dtype)
            assert cublaslt.matmul(wide[:, 8:], b, again, algorithm)
            assert_identical(again, out[:, :N].contiguous(), what=what)
            more = torch.ones((M, N), device="cuda", dtype=dtype)
            assert cublaslt.matmul(a, b, more, algorithm, add=True)
            # cuBLAS rounds the product before it adds, whatever the algorithm, and so does torch.addmm.
            assert_close(more, expected + 1, K, partials=1, what=f"{what} added")
    assert ran > 20 or torch.cuda.get_device_capability() != (9, 0)


@pytest.mark.gpu(1)
def test_what_no_algorithm_takes_is_left_alone():
    a, b = operands(256, 256, 256, BF16)
    found = candidates(256, 256, 256, BF16)
    out = torch.full((256, 256), 7.0, device="cuda", dtype=BF16)
    shifted = torch.empty(256 * 256 + 1, device="cuda", dtype=BF16)[1:].view(256, 256)
    for x, y, into, algorithm in (
        (a, b, out, Algorithm(tile=9999, cluster=3, custom=1)),
        (a, b, out, Algorithm(tile=20, cluster=3, custom=1, id=9999)),
        *((shifted, b, out, one) for one in found[:1]),
        *((a, b, out.T, one) for one in found[:1]),
        *((a.float(), b.float(), out.float(), one) for one in found[:1]),
        *((a[:, :252].clone()[:, :252], b[:, :252].clone(), out, one) for one in found[:1]),
    ):
        assert not cublaslt.matmul(x, y, into, algorithm)
    assert (out == 7).all()
    # The design falls back on cuBLAS's own choice.
    missing = Cublas(algorithm=Algorithm(tile=9999, cluster=3, custom=1))
    assert_identical(cublas.run(missing, a, b), a @ b.T)


@pytest.mark.gpu(1)
def test_calls_on_two_streams_and_in_a_graph_do_not_share_scratch_memory():
    sizes = ((1024, 5120, 2048), (2048, 2560, 5120), (512, 12800, 5120))
    products = []
    for number, (M, N, K) in enumerate(sizes):
        a, b = operands(M, N, K, BF16, seed=number)
        products += [(a, b, one) for one in candidates(M, N, K, BF16)[:4]]
    alone = [cublas.run(Cublas(algorithm=one), a, b) for a, b, one in products]
    side, outs = torch.cuda.Stream(), [torch.empty_like(out) for out in alone]

    def all_of_them():
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        for number, ((a, b, one), out) in enumerate(zip(products, outs, strict=True)):
            with torch.cuda.stream(side if number % 2 else main):
                assert cublaslt.matmul(a, b, out, one)
        main.wait_stream(side)

    all_of_them()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        all_of_them()
    for _ in range(20):
        for out in outs:
            out.zero_()
        graph.replay()
        for (_, _, one), out, expected in zip(products, outs, alone, strict=True):
            assert_identical(out, expected, what=str(one))


@pytest.mark.gpu(1)
def test_shapes_that_have_a_row_take_its_algorithm(monkeypatch):
    if not table.files_for(torch.cuda.get_device_name(), 1):
        pytest.skip(f"no rows of {torch.cuda.get_device_name()}")
    asked = []

    def matmul(*arguments, **options):
        asked.append(arguments[3])
        return plain(*arguments, **options)

    plain = cublaslt.matmul
    monkeypatch.setattr(cublaslt, "matmul", matmul)
    for row in SHIPPED[:6]:
        a, b = operands(*row.shape, BF16)
        assert_close(ops.matmul(a, b), a.float() @ b.float().T, row.shape[2], what=row.key)
        assert asked.pop() == algorithm_of(row)
        ops.matmul(a[:-1], b)
        assert not asked


def test_scales_between_16_bytes_are_copied():
    """cuBLAS refuses them: those of a rank's rows may begin at any row."""
    scales = torch.arange(8.0)
    for first in range(5):
        part = scales[first : first + 3, None]
        found = cublas._on_16_bytes(part)
        assert found.data_ptr() % 16 == 0 and torch.equal(found, part)
        assert (found.data_ptr() == part.data_ptr()) == (part.data_ptr() % 16 == 0)
