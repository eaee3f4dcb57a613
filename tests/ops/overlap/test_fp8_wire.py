"""Sums of GEMMs that travel in fp8: against plain torch with the same roundings, planted bugs, what is refused."""

import pytest
import torch

import weft
from tests.compiling import compiled
from tests.ops.checking import assert_identical, check_replicated, run_cases
from tests.ops.layer_cases import mutated
from weft import ops
from weft.errors import WeftError
from weft.ops.case import BF16
from weft.ops.collectives.fp8_wire import rounded, sum_by_torch
from weft.ops.op import find_op
from weft.ops.overlap import fp8_rows, matmul_reduce_scatter, pipelined
from weft.ops.overlap.cases import fp8_wire_cases
from weft.ops.overlap.matmul_reduce_scatter import MATMUL_REDUCE_SCATTER, Pipelined
from weft.plan.planned import machine
from weft.runtime import capabilities

OPS = [find_op("matmul_reduce_scatter"), find_op("matmul_all_reduce")]


@pytest.mark.parametrize("W", [2, 3])
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_cases_on_slow_ranks(op, W):
    cases = [case for case in fp8_wire_cases(op) if case.world_size == W]
    check_replicated(weft.simulate(run_cases, W, seed=W, slow={W - 1: 20.0}, args=(cases, 2)))


def whole_numbers(rank, M, N, K, call=0):
    """(a, b) whose product is exact in bf16, and in each group of columns of another size."""
    generator = torch.Generator().manual_seed(100 * call + rank)
    a = torch.randint(-3, 4, (M, K), generator=generator).bfloat16()
    b = torch.randint(-3, 4, (N, K), generator=generator) * 2.0 ** (torch.arange(N) // 128 * 3 % 10)[:, None]
    return a, b.bfloat16()


def scattered(products, rank):
    """Rows of this rank: its own as they are, the other ranks' put in fp8 and read back, in the order of the buffers."""
    W, rows = len(products), len(products[0]) // len(products)
    parts = [product[rank * rows : (rank + 1) * rows] for product in products]
    total = parts[rank].float()
    for step in range(1, W):
        total = total + rounded(parts[(rank + step) % W].bfloat16())
    return total


def run_scattered(team, design, calls=2, M=6, N=400, K=8):
    """(result, wanted) of calls in a row."""
    results = []
    for call in range(calls):
        pairs = [whole_numbers(rank, team.size * M, N, K, call) for rank in range(team.size)]
        out = MATMUL_REDUCE_SCATTER.run(design, team, *pairs[team.rank])
        results.append((out, scattered([a.double() @ b.double().T for a, b in pairs], team.rank)))
    return results


@pytest.mark.parametrize("W", [1, 2, 3, 4])
def test_scattered_sums_have_the_same_roundings_as_torch(W):
    for design in (Pipelined(fp8_wire=True), Pipelined(chunks=3, streams=2, fp8_wire=True)):
        for results in weft.simulate(run_scattered, W, args=(design,)):
            for out, wanted in results:
                # The sums in fp32 may be added in another order.
                assert (out.float() - wanted).abs().max() <= 2**-8 * wanted.abs().max()
                assert ((out.float() - wanted).abs() <= 2**-7 * wanted.abs() + 2**-20).all()


@pytest.mark.parametrize("W", [1, 2, 3])
def test_all_reduced_sums_are_those_of_all_reduce(W):
    def main(team):
        pairs = [whole_numbers(rank, 9, 400, 8) for rank in range(W)]
        out = ops.matmul_all_reduce(*pairs[team.rank], team, wire="fp8")
        parts = [(a.double() @ b.double().T).bfloat16() for a, b in pairs]
        return out, ops.all_reduce(parts[team.rank], team, wire="fp8"), sum_by_torch(parts, False)

    for out, reduced, wanted in weft.simulate(main, W):
        assert_identical(out, reduced)
        assert W == 1 or ((out.float() - wanted).abs() <= 2**-8 * wanted.abs()).all()


# Of the kernels that put rows in words and add them up.
MISTAKES = {
    "wrong group": ("row + of_row * WORDS + within", "row + of_row * WORDS + (within + 1) % of_row"),
    "scales beside each group": ("row + of_row * WORDS + within", "row + within * (WORDS + 1) + WORDS"),
    "another row's scales": (
        "row + of_row * WORDS + within",
        "(row + of_row * (2 * WORDS + 1)) % (of_row * 198) + within",
    ),
    "the first buffer's scales": ("tl.load(first + of_scales", "tl.load(received + of_scales"),
    "rows without their scales": ("scales_of(width) * (WORDS.value + 1)", "scales_of(width) * WORDS.value"),
}


@pytest.mark.parametrize("mistake", ["", *MISTAKES])
def test_planted_bugs_are_caught(mistake, monkeypatch, tmp_path):
    old, new = MISTAKES.get(mistake, ("GROUPS, WARPS = 16, 4", "GROUPS, WARPS = 16, 4"))
    # In what the sums read alone, so that writer and reader differ.
    mutant = mutated(fp8_rows, old, new, f"fp8_rows_{len(mistake)}", tmp_path)
    for name in ("add_words_up", "words_of_row"):
        monkeypatch.setattr(matmul_reduce_scatter, name, getattr(mutant, name))
    if mistake == "":
        monkeypatch.setattr(pipelined, "put_in_words", mutant.put_in_words)
    try:
        right = all(
            ((out.float() - wanted).abs() <= 2**-7 * wanted.abs() + 2**-20).all()
            for results in weft.simulate(run_scattered, 3, args=(Pipelined(fp8_wire=True),))
            for out, wanted in results
        )
    except (WeftError, ValueError, RuntimeError):
        right = False
    assert right == (not mistake)


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_kernels_of_rows_in_words_compile_and_spill_nothing(arch):
    x, words = torch.zeros(16, dtype=torch.bfloat16), torch.zeros(16, dtype=torch.int32)
    how = {"arch": arch, "GROUPS": fp8_rows.GROUPS, "num_warps": fp8_rows.WARPS}
    sizes = 1 << 15, 1 << 22, 5120
    for made in (
        compiled(fp8_rows.to_words_kernel, words, x, *sizes, **how),
        compiled(fp8_rows.words_sum_kernel, x, x, words, 1 << 20, *sizes, BUFFERS=1, **how),
        compiled(fp8_rows.words_sum_kernel, x, x, words, 1 << 20, *sizes, BUFFERS=7, **how),
    ):
        assert "ld.global.v4.b32" in made.asm["ptx"] and ".local" not in made.asm["ptx"]


def test_plans_and_what_is_refused():
    here = machine(capabilities.simulated(2), 2)
    for op, name in zip(OPS, ("pipelined", "sequential"), strict=True):
        for M in (8, 512, 4096):
            planned = op.plan(op.call_of((M, 5120, 2560), BF16, here, fp8_wire=True), here)
            assert planned.name == name and planned.reason.startswith("predicted µs in a row: ")
        designs = list(op.space(op.call_of((4096, 5120, 2560), BF16, here, fp8_wire=True), here))
        assert designs and {op.name_of(design) for design in designs} == {name}
        told = ops.explain(f"{op.alias}+fp8_wire", M=4096, N=5120, K=2560, world_size=2)
        assert told.algorithm == name and "fp8" in str(told)
        with pytest.raises(ValueError, match=r"design='fused' sends sums of 16 bits; with wire='fp8' pass "):
            ops.explain(f"{op.alias}+fp8_wire", M=4096, N=5120, K=2560, world_size=2, algorithm="fused")
        with pytest.raises(ValueError, match="wire='fp8' rounds rows of 16 bits, not of float32"):
            ops.explain(f"{op.alias}+fp8_wire", M=4096, N=5120, K=2560, world_size=2, dtype=torch.float32)
        with pytest.raises(ValueError, match="wire='fp8' is for one node, and the team has 2"):
            ops.explain(f"{op.alias}+fp8_wire", M=4096, N=5120, K=2560, world_size=4, node_size=2)
    with pytest.raises(ValueError, match="wire='fp8' with invariant=True"):
        ops.explain("gemm-ar+fp8_wire+invariant", M=4096, N=5120, K=2560, world_size=2)
    with pytest.raises(ValueError, match="fp8_wire=True: a GEMM adds to rows of 16 bits alone; leave accumulate out"):
        Pipelined(accumulate=True, fp8_wire=True)


def test_a_wire_that_is_none_is_refused():
    def main(team):
        for op in (ops.matmul_reduce_scatter, ops.matmul_all_reduce):
            with pytest.raises(ValueError, match="wire='half' is not one of 'same', 'fp8'"):
                op(torch.ones(2, 16).bfloat16(), torch.ones(8, 16).bfloat16(), team, wire="half")

    weft.simulate(main, 2)
