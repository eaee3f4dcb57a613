"""Norms whose rows are divided only after the product behind them: against plain PyTorch, and no worse than the others."""

import pytest
import torch

import weft
from tests.ops.checking import assert_close, assert_identical
from tests.ops.gemm.test_small_m import alone, capabilities_of, default_of, reference, small_m_of
from tests.sampled import sampled
from weft import ops
from weft.kernels.deferred_norm import DeferredNorm
from weft.kernels.operands import RowScales, ScaledMatrix
from weft.ops.case import BF16, FP16, FP32
from weft.ops.collectives.all_reduce import ALL_REDUCE
from weft.ops.collectives.all_reduce_rms_norm import ALL_REDUCE_RMS_NORM
from weft.ops.gemm import local_gemm, small_m
from weft.ops.gemm.gemm_cases import SMALL_M
from weft.parallel.fused import matmul_split
from weft.parallel.replicated import FusedNorm
from weft.parallel.tensors import NormWeights, PartialSum, SplitK
from weft.plan.memo import forget
from weft.plan.planned import machine

EPS = 1e-6
H200 = capabilities_of("sm_90")
# (M, N, K): rows of K elements start on 16 bytes, but for the last, which no descriptor reaches.
SHAPES = ((1, 48, 96), (5, 40, 72), (33, 80, 200), (64, 16, 640), (70, 32, 64), (3, 34, 21))


def rms_factor(hidden):
    return (hidden.double().square().mean(-1, keepdim=True) + EPS).rsqrt()


def norm_of(hidden, weight):
    """In fp64."""
    return hidden.double() * rms_factor(hidden) * weight.double()


def factored(hidden, weight, parts):
    """As the kernel leaves it: ``hidden`` in so many ragged parts."""
    scaled = (hidden.float() * weight.float()).to(hidden.dtype)
    width = hidden.shape[-1]
    shares = [part.float().square().sum(-1) / width for part in hidden.tensor_split(parts, dim=-1)]
    return DeferredNorm(scaled, torch.stack(shares, dim=-1), EPS)


def rows(M, K, dtype, seed=0, device="cpu"):
    """Hidden states of which some are far from the others, and a norm's weight."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn((M, K), generator=generator) * torch.logspace(-1, 1, M)[:, None]
    hidden[:, K // 3] *= 30
    weight = 1 + torch.randn(K, generator=generator) / 8
    return hidden.to(device, dtype), weight.to(device, dtype)


def matrix(N, K, dtype, seed=0, device="cpu"):
    return (torch.randn((N, K), generator=torch.Generator().manual_seed(seed)) / K**0.5).to(device, dtype)


def multiplied(norm, hidden, op, N):
    """(what meets the weight, in fp64 but for roundings on the way; whether the library multiplies): rows that were rounded
    once and are divided behind the product, or where that is the library's and nobody reads it here divided before it and
    rounded twice."""
    M, K = hidden.shape
    design = small_m_of(M, N, K, H200, op == "matmul_silu_mul", hidden.dtype, deferred_norm=True)
    by_library = design is None or K * hidden.element_size() % 16 != 0
    twice = by_library and op == "matmul"
    return (norm.normed() if twice else norm.scaled.double() * rms_factor(hidden)), by_library


@pytest.mark.parametrize("op", [ops.matmul, ops.matmul_silu_mul])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_what_an_op_is_called_with(op, dtype):
    """Whatever the design: few rows and many, rows that no descriptor reaches, strided ones, fp32."""
    gated = op is ops.matmul_silu_mul

    def main():
        for call, (M, N, K) in enumerate(SHAPES):
            hidden, weight = rows(M, K, dtype, call)
            b = matrix((2 if gated else 1) * N, K, dtype, call)
            norm = factored(hidden, weight, 1 + call)
            wide = torch.zeros(M, K + 8, dtype=dtype)
            wide[:, :K] = norm.scaled
            x, by_library = multiplied(norm, hidden, op.__name__, N)
            for given in (norm, DeferredNorm(wide[:, :K], norm.squares, EPS)):
                out = op(given, b)
                assert out.dtype == dtype and out.is_contiguous()
                assert_close(out, reference(x, b, gated), K, partials=int(by_library and gated), what=f"{M}x{N}x{K}")

    alone(main)


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "silu"])
@pytest.mark.parametrize("design", SMALL_M, ids=range(len(SMALL_M)))
def test_every_design_divides_its_rows(design, gated):
    """Turned, split along K, and with parts of a row that are no power of two: bit for bit what an eighth would give."""

    def main():
        for M, N, K in SHAPES[:4]:
            x, b = rows(M, K, BF16)[0], matrix((2 if gated else 1) * N, K, BF16)
            eighth = torch.full((M, 5), 64 / 5)
            out = small_m.run(ScaledMatrix(x, RowScales(eighth, 0.0)), b, design, activation="silu" if gated else None)
            assert_close(out, reference(x.double() / 8, b, gated), K, what=f"{M}x{N}x{K}")
            each = torch.arange(1, M + 1)[:, None].float().square()
            out = small_m.run(ScaledMatrix(x, RowScales(each, 0.0)), b, design, activation="silu" if gated else None)
            expected = reference(x.double() / torch.arange(1, M + 1)[:, None], b, gated)
            assert_close(out, expected, K, what=f"{M}x{N}x{K}")

    alone(main)


def test_no_worse_than_the_norm_before_the_product():
    """Relative RMS errors against fp64, with outliers in the hidden states."""

    def main():
        hidden, weight = rows(48, 640, BF16)
        b = matrix(96, 640, BF16)
        exact = norm_of(hidden, weight)
        for op, gated in ((ops.matmul, False), (ops.matmul_silu_mul, True)):
            expected = reference(exact, b, gated)
            before, after = (
                ((op(x, b).double() - expected).norm() / expected.norm()).item()
                for x in (exact.to(BF16), factored(hidden, weight, 3))
            )
            assert after < 1.1 * before < 4e-3

    alone(main)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_parts_add_up_to_the_product(dtype):
    """Bit for bit, whether K is split or not, and of operands that no descriptor reaches as they lie."""

    def main():
        for call, (M, N, K) in enumerate((*SHAPES, (6, 24, 264))):
            norm, b = factored(*rows(M, K, dtype, call), 1 + call), matrix(N, K, dtype, call)
            odd = torch.zeros(N * K + 1, dtype=dtype)[1:].view(N, K).copy_(b)
            every_other = torch.zeros(N, 2 * K, dtype=dtype)[:, ::2].copy_(b)
            for weight in (b, odd, every_other, b.t().contiguous().t()):
                for x in (norm, norm.scaled):
                    design = small_m_of(M, N, K, H200, dtype=dtype, partials=True, deferred_norm=x is norm)
                    count = 1 if design is None or K % 8 else design.partials
                    parts = ops.matmul_parts(x, weight)
                    if isinstance(parts, DeferredNorm):
                        assert design is None or K % 8
                        assert_close(parts.normed(), ops.matmul(norm, b).double(), K, partials=1, what=f"{M}x{N}x{K}")
                        continue
                    split = count > 1
                    assert parts.shape == ((count, M, N) if split else (M, N))
                    assert parts.dtype == (FP32 if split else dtype) and parts.is_contiguous()
                    total = sum(parts).to(dtype) if split else parts
                    if x is norm:
                        assert_identical(total, ops.matmul(norm, b if split else weight), what=f"{M}x{N}x{K}")
                    else:
                        assert_close(total, x.double() @ b.double().T, K, what=f"{M}x{N}x{K} plain")

    alone(main)


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.sweep)])
def test_an_all_reduce_and_the_product_behind_it(world_size):
    """Ranks get the same bits, call after call, on the workspace that other norms use."""
    shapes = [("one_shot", 5), ("two_shot", 7), ("auto", 1), ("two_shot", 3), ("one_shot", 2)]
    K = 640  # three parts

    def inputs(rank, call, M):
        return rows(M, K, BF16, 10 * call + rank)[0]

    def main(team):
        _, weight = rows(1, K, BF16)
        found = []
        for call, (algorithm, M) in enumerate(shapes):
            residual = inputs(99, call, M)
            arguments = (inputs(team.rank, call, M), residual, weight, EPS, team, algorithm)
            if call % 2:
                ops.all_reduce_rms_norm(*arguments)
            normed, hidden = ops.all_reduce_rms_norm(*arguments, factored=True)
            found.append((ops.matmul(normed, matrix(48, K, BF16)), hidden))
        return found

    results = weft.simulate(main, world_size)
    for call, (_, M) in enumerate(shapes):
        total = sum(inputs(rank, call, M).double() for rank in range(world_size)) + inputs(99, call, M).double()
        for out, hidden in (result[call] for result in results):
            assert_identical(out, results[0][call][0])
            assert_close(hidden, total, world_size + 1, what=f"call {call}")
            expected = norm_of(hidden, rows(1, K, BF16)[1]) @ matrix(48, K, BF16).double().T
            assert_close(out, expected, K, partials=1, what=f"call {call}")


@pytest.mark.parametrize(
    ("world_size", "dtype"),
    sampled([(1, FP16), (2, BF16), (3, FP16), (4, BF16)], lambda world_size, dtype: world_size == 2),
    ids=str,
)
def test_an_all_reduce_adds_up_the_parts_of_a_product(world_size, dtype):
    """Bit for bit what it does with their rounded sum, of any number of parts, call after call on the same workspace."""
    shapes = [("one_shot", 5, 2), ("two_shot", 7, 3), ("auto", 1, 3), ("two_shot", 3, 1), ("one_shot", 2, 4)]
    K = 640  # of bf16 three parts of a row too

    def main(team):
        _, weight = rows(1, K, dtype)
        for call, (algorithm, M, parts) in enumerate(shapes):
            of_rank = torch.Generator().manual_seed(100 * call + team.rank)
            x, residual = torch.randn((parts, M, K), generator=of_rank), rows(M, K, dtype, call)[0]
            total = x[0]
            for part in x[1:]:
                total = total + part
            whole, wide = total.to(dtype), torch.cat((x, x), dim=-1)[..., :K]
            for given in (x, wide):
                common = (residual, weight, EPS, team, algorithm)
                for out, expected in zip(
                    ops.all_reduce_rms_norm(given, *common),
                    ops.all_reduce_rms_norm(whole, *common),
                    strict=True,
                ):
                    assert out.dtype == dtype
                    assert_identical(out, expected, what=f"call {call}")
                norms = [ops.all_reduce_rms_norm(y, *common, factored=True) for y in (given, whole)]
                (norm, hidden), (expected, expected_hidden) = norms
                assert_identical(hidden, expected_hidden, what=f"call {call}")
                assert_identical(norm.scaled, expected.scaled, what=f"call {call}")
                assert_identical(norm.squares, expected.squares, what=f"call {call}")
            if team.size > 1:
                assert_identical(
                    ALL_REDUCE.run_of_partials(x, dtype, team),
                    ops.all_reduce(whole, team, "one_shot"),
                    what=f"call {call}",
                )

    weft.simulate(main, world_size)


def test_a_row_parallel_layer_in_parts_before_its_norm():
    """A GEMM with K split, in the recipe whose norms add up over the ranks: against the same in double."""
    K, N, M = 4096, 1024, 5

    def main(team):
        residual, weight = rows(M, N, BF16, 50)
        x = rows(M, K, BF16, team.rank)[0]
        y = PartialSum(matmul_split(x, matrix(N, K, BF16, team.rank)))
        assert isinstance(y.summand, SplitK) and len(y.summand.parts) > 1
        recipe = FusedNorm(team=team, deferred_scale=False)
        return recipe.all_reduce_norm(y, residual, NormWeights(weight, EPS))

    found = weft.simulate(main, 2)
    residual, weight = rows(M, N, BF16, 50)
    total = (
        sum(rows(M, K, BF16, r)[0].double() @ matrix(N, K, BF16, r).double().T for r in range(2)) + residual.double()
    )
    for normed, hidden in found:
        assert_identical(hidden, found[0][1])
        assert_close(hidden, total, K, partials=1)
        assert_close(normed, norm_of(hidden, weight), K, partials=1)


@pytest.mark.parametrize(
    ("x", "residual", "message"),
    [
        (
            torch.ones(2, 3, 8),
            torch.ones(2, 8).half(),
            r"residual has shape \(2, 8\); with x of \(2, 3, 8\) in split-K partials .* \(3, 8\)",
        ),
        (
            torch.ones(0, 3, 8),
            torch.ones(3, 8).half(),
            r"x has shape \(0, 3, 8\), no partial; pass the result of matmul_parts",
        ),
        (
            torch.ones(2, 3, 8),
            torch.ones(3, 8),
            r"residual has shape \(3, 8\); with x of \(2, 3, 8\) it must be \(2, 3, 8\)",
        ),
        (
            torch.ones(2, 3, 8).half(),
            torch.ones(3, 8).half(),
            r"residual has shape \(3, 8\); with x of \(2, 3, 8\) it must be",
        ),
        (torch.ones(3, 8), torch.ones(3, 8).half(), r"residual.dtype=torch.float16 is not one of float32"),
    ],
)
def test_parts_that_do_not_fit_are_refused(x, residual, message):
    def main(team):
        weight = torch.ones(8, dtype=residual.dtype)
        with pytest.raises(ValueError, match=f"all_reduce_rms_norm: {message}"):
            ops.all_reduce_rms_norm(x, residual, weight, EPS, team)

    weft.simulate(main, 2)


def test_a_graph_of_a_norm_and_its_products_compiles_without_a_break():
    def layer(x, residual, weight, b, team):
        normed, hidden = ops.all_reduce_rms_norm(x, residual, weight, EPS, team, factored=True)
        return ops.matmul(normed, b), ops.matmul_silu_mul(normed, b), hidden

    def main(team):
        (x, weight), b = rows(3, 128, BF16), matrix(32, 128, BF16)
        compiled = torch.compile(lambda x: layer(x, x, weight, b, team), fullgraph=True, backend="aot_eager")
        for found, expected in zip(compiled(x), layer(x, x, weight, b, team), strict=True):
            assert_identical(found, expected)

    weft.simulate(main, 2)
    torch._dynamo.reset()


def test_the_schema_and_the_fake_tell_the_truth():
    """Of the op for few rows; all ops in their cases: tests/ops/test_op.py."""

    def main(team):
        norm = factored(*rows(5, 640, BF16), 3)
        arguments = norm.scaled, norm.squares, EPS, matrix(32, 640, BF16), "silu"
        tests = ("test_schema", "test_faketensor")
        torch.library.opcheck(torch.ops.weft.matmul_deferred_norm.default, arguments, test_utils=tests)

    weft.simulate(main, 1)


@pytest.mark.parametrize(
    ("squares", "message"),
    [
        (torch.ones(3, 2), r"squares is torch.float32 \(3, 2\) on cpu; .*float32 \[2, parts\]"),
        (torch.ones(2), r"squares is torch.float32 \(2,\)"),
        (torch.ones(2, 0), r"squares is torch.float32 \(2, 0\)"),
        (torch.ones(2, 1).double(), r"squares is torch.float64"),
        (None, "squares=None is not a tensor"),
    ],
)
def test_squares_of_other_rows_are_refused(squares, message):
    norm = DeferredNorm(torch.ones(2, 8), squares, EPS)
    for op in (ops.matmul, ops.matmul_silu_mul, ops.matmul_parts):
        with pytest.raises(ValueError, match=f"{op.__name__}: {message}"):
            op(norm, torch.ones(4, 8))


def test_the_product_has_no_backward():
    norm = factored(*rows(2, 16, BF16), 1)
    with pytest.raises(RuntimeError, match="no backward"):
        alone(lambda: ops.matmul(norm, torch.ones(4, 16, dtype=BF16, requires_grad=True)).sum().backward())


def test_which_products_take_the_factor():
    caps = capabilities_of("sm_90")
    for M, dtype, taken in ((1, BF16, True), (64, BF16, True), (65, BF16, False), (1, FP32, False)):
        assert (small_m_of(M, 64, 64, caps, dtype=dtype, deferred_norm=True) is not None) == taken
    assert small_m_of(1, 64, 64, capabilities_of("sm_80"), deferred_norm=True) is None
    for M, N, taken in (
        (128, 2560, True),
        (96, 2560, True),
        (65, 2560, False),
        (129, 2560, False),
        (128, 12800, False),
    ):
        design = small_m_of(M, N, 5120, caps, deferred_norm=True, partials=True)
        assert (design is not None) == taken
        assert design is None or design.partials_of(5120) > 1


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_a_library_product_is_divided_by_who_reads_it(dtype, monkeypatch):
    monkeypatch.setattr(local_gemm, "small_m_rule", lambda *_, **__: (False, "cuBLAS"))
    forget()

    def main():
        for call, (M, N, K) in enumerate(SHAPES[:4]):
            (hidden, weight), b = rows(M, K, dtype, call), matrix(2 * N, K, dtype, call)
            norm = factored(hidden, weight, 1 + call)
            product = ops.matmul_parts(norm, b)
            assert product.squares is norm.squares and product.eps == EPS and product.scaled.dtype == dtype
            exact = norm.scaled.double() * rms_factor(hidden)
            assert_close(product.scaled, norm.scaled.double() @ b.double().T, K, what=f"{M}x{N}x{K}")
            assert_close(product.normed(), exact @ b.double().T, K, partials=1, what=f"{M}x{N}x{K}")
            for out in (ops.silu_mul(product), ops.matmul_silu_mul(norm, b)):
                assert_close(out, reference(exact, b, True), K, partials=1, what=f"{M}x{N}x{K} gated")

    alone(main)
    forget()


@pytest.mark.gpu(1)
@pytest.mark.parametrize("op", [ops.matmul, ops.matmul_silu_mul])
def test_on_a_gpu(op):
    gated = op is ops.matmul_silu_mul
    for M in (1, 5, 16, 33, 64, 100):
        for N, K in ((2560, 5120), (1000, 5008), (48, 512), (5120, 2048), (5120, 6400)):
            hidden, weight = rows(M, K, BF16, device="cuda")
            b = matrix((2 if gated else 1) * N, K, BF16, seed=1, device="cuda")
            norm, what = factored(hidden, weight, 20), f"{M}x{N}x{K}"
            out = op(norm, b)
            x, by_library = multiplied(norm, hidden, op.__name__, N)
            assert_close(out, reference(x, b, gated), K, partials=int(by_library and gated), what=what)
            assert_identical(op(norm, b), out, what=what)
            parts = ops.matmul_parts(norm, b)
            caps = capabilities_of("sm_90")
            design = small_m_of(M, b.shape[0], K, caps, deferred_norm=True, partials=True)
            assert isinstance(parts, DeferredNorm) == (design is None)
            if isinstance(parts, DeferredNorm):
                exact = norm.scaled.double() * rms_factor(hidden)
                assert_close(parts.normed(), exact @ b.double().T, K, partials=1, what=what)
            elif not gated and M <= 64 and parts.dim() == 3:
                total = parts[0]
                for part in parts[1:]:
                    total = total + part
                assert_close(
                    total.to(BF16), reference(norm.scaled.double() * rms_factor(hidden), b, False), K, what=what
                )
                if design == default_of(M, N, K, caps, gated):
                    assert_identical(total.to(BF16), out, what=what)


def test_which_rows_go_in_one_shot():
    """By what the kernel with the norm takes, whatever rows there are of the all-reduce without one."""

    def planned(count, world_size, asked="auto"):
        here = machine(capabilities_of("sm_90"), world_size)
        return ALL_REDUCE_RMS_NORM.plan(ALL_REDUCE_RMS_NORM.call_of(((count, 5120),), BF16, here, asked), here)

    for world_size, one_shot, two_shot in ((2, 512, 1024), (4, 32, 40)):
        for count, expected in ((1, "one_shot"), (one_shot, "one_shot"), (two_shot, "two_shot"), (1 << 17, "two_shot")):
            found = planned(count, world_size)
            assert found.name == expected, (world_size, count)
            asked = planned(count, world_size, "one_shot")
            assert asked.name == "one_shot" and asked.design.push == found.design.push
    assert planned(1 << 17, 1).name == "one_shot"
