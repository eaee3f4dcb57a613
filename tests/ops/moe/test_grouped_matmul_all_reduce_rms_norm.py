"""grouped_matmul_all_reduce_rms_norm: the bits of its three parts, planted mistakes, refused arguments, machine code."""

import itertools

import pytest
import torch
import triton
import triton.language as tl

import weft
from tests.compiling import SHARED, a_view, compiled, stack_bytes, sums_of
from tests.ops.checking import assert_identical
from tests.ops.layer_cases import mutated
from tests.ops.test_compile_layer_kernels import caps_of, check_compiles
from weft import ops
from weft.kernels import pair_sums
from weft.kernels.deferred_norm import DeferredNorm
from weft.kernels.fp8 import E4M3, RowFormat, rows_argument
from weft.kernels.pair_sums import PairSum
from weft.ops.collectives import norm_kernel
from weft.ops.collectives.all_reduce_rms_norm import push_of
from weft.ops.collectives.norm_kernel import Norm, all_reduce_rms_norm_kernel
from weft.ops.moe.grouped.gemms import GroupedArguments
from weft.ops.moe.grouped_matmul_all_reduce_rms_norm import PairsArguments, SumInNorm
from weft.ops.op import find_op
from weft.plan.planned import machine
from weft.runtime.capabilities import launch_options
from weft.transport.push import registers_of

EXPERTS, K, HIDDEN, FEATURES, EPS = 6, 2, 304, 16, 1e-6
SWEEP = pytest.mark.sweep


def drawn(team, tokens, shared):
    """Arguments of the op up to eps, and shared and gate; rows of y that no kernel writes are NaN in the simulator."""
    same, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(team.rank)

    def random(*shape, generator=own, scale=1.0):
        return (torch.randn(shape, generator=generator) * scale).bfloat16()

    routing = ops.route(random(tokens, EXPERTS, generator=same), K)
    experts = ops.Experts.whole(EXPERTS, team.rank, team.size)
    schedule = ops.moe_schedule(routing.ids, experts)
    x, weight = random(tokens * K, FEATURES), random(experts.count, HIDDEN, FEATURES, scale=0.25)
    residual, norm = random(tokens, HIDDEN, generator=same), random(HIDDEN, generator=same)
    beside = {"shared": random(tokens, HIDDEN), "gate": random(tokens, 3)[:, 1]} if shared else {}
    return (x, weight, schedule, routing, experts, residual, norm, EPS), beside


def in_three(team, given, beside, factored, algorithm="auto"):
    x, weight, schedule, routing, experts, *rest = given
    summand = ops.moe_sum(ops.grouped_matmul(x, weight, schedule), routing, experts, **beside)
    return ops.all_reduce_rms_norm(summand, *rest, team, algorithm, factored=factored)


def flat(found):
    normed, hidden = found
    return (normed.scaled, normed.squares, hidden) if isinstance(normed, DeferredNorm) else (normed, hidden)


@pytest.mark.parametrize(
    ("world_size", "shared", "factored"),
    [
        (2, True, True),
        *(pytest.param(w, *kind, marks=SWEEP) for w in (2, 3) for kind in itertools.product((False, True), repeat=2)),
    ],
)
def test_the_bits_are_those_of_the_three_ops(world_size, shared, factored):
    def main(team):
        given, beside = drawn(team, 3, shared)
        for algorithm in ("in_norm", "sequential"):
            options = {**beside, "factored": factored, "algorithm": algorithm}
            found = ops.grouped_matmul_all_reduce_rms_norm(*given, team, **options)
            for one, other in zip(flat(found), flat(in_three(team, given, beside, factored)), strict=True):
                assert_identical(one, other)
        # Two hops, whose programs load a row of each rank.
        op = find_op("grouped_matmul_all_reduce_rms_norm")
        x, weight, schedule, routing, experts, residual, norm, eps = given
        shared_and_gate = beside.get("shared"), beside.get("gate")
        gemm, of_norm = GroupedArguments.of(x, weight, schedule, False), (residual, norm, eps, factored)
        arguments = PairsArguments(gemm, routing, experts.first, *shared_and_gate, *of_norm, team.name, "in_norm")
        found = op.run(SumInNorm(norm="two_shot"), team, arguments)
        wanted = flat(in_three(team, given, beside, factored, "two_shot"))
        for one, other in zip(found, wanted if not factored else (wanted[0], wanted[2], wanted[1]), strict=True):
            assert_identical(one, other)
        return flat(found if not factored else found[:2])

    first, *others = weft.simulate(main, world_size)
    for other in others:
        for one, same in zip(other, first, strict=True):
            assert_identical(one, same)


MISTAKES = {
    "the neighbour's weight": ("tl.load(x.weights + pair,", "tl.load(x.weights + token * x.count,"),
    "other ranks' rows": ("pair, (expert >= 0) & (expert < x.experts), weight", "pair, expert >= -99, weight"),
    "the neighbour's experts": ("- (x.place - 3) // 2", "- (x.place - 1) // 2"),
    "one choice": ("for j in tl.static_range(COUNT):", "for j in tl.static_range(1):"),
    "a shared result without its gate": ("row *= 1.0 / (1.0 + tl.exp(-gate))", "row *= 1.0"),
    "the neighbour's gate": ("x.gate + token * x.stride", "x.gate + token"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake, tmp_path, monkeypatch):
    mutant = mutated(pair_sums, *MISTAKES[mistake], f"pairs_mutant_{len(mistake)}", tmp_path)
    monkeypatch.setattr(norm_kernel, "sum_of_pairs", mutant.sum_of_pairs)

    def main(team):
        given, beside = drawn(team, 2, True)
        _, found = ops.grouped_matmul_all_reduce_rms_norm(*given, team, **beside, algorithm="in_norm")
        return not torch.equal(found, in_three(team, given, beside, False)[1])

    assert any(weft.simulate(main, 2))


# --- refused arguments --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "place", "change"),
    [
        ("x has 4 rows; with gather=False a schedule of 3 tokens with 2 choices each takes 6", 0, lambda x: x[:4]),
        ("weight has shape (2, 304, 16); it must be (3, N, 16)", 1, lambda x: x[:2]),
        ("routing=None is not a Routing", 3, lambda x: None),
        ("schedule has 3 tokens with 2 choices and ids shape (2, 2)", 3, lambda x: ops.Routing(x.ids[:2], x.weights[:2])),
        ("experts=6 is not an Experts of the 3 that weight has", 4, lambda x: 6),
        ("residual has shape (3, 303); it must be (3, 304)", 5, lambda x: x[:, 1:]),
        ("norm.dtype=torch.float16 is not one of bfloat16, float32", 6, lambda x: x.half()),
        ("eps='0' is not a finite number", 7, lambda x: "0"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(message, place, change):
    def main(team):
        given, _ = drawn(team, 3, False)
        given = (*given[:place], change(given[place]), *given[place + 1 :])
        with pytest.raises(ValueError) as refused:
            ops.grouped_matmul_all_reduce_rms_norm(*given, team)
        assert f"grouped_matmul_all_reduce_rms_norm: {message}" in str(refused.value)
        assert "\n" not in str(refused.value)

    weft.simulate(main, 2)


def test_wrong_options_are_refused():
    def main(team):
        given, beside = drawn(team, 3, True)
        for message, options in (
            ("algorithm='fused' is not one of", {"algorithm": "fused"}),
            ("gate is that of shared, which is None", {"gate": beside["gate"]}),
            ("factored=1 is not True or False", {"factored": 1}),
        ):
            with pytest.raises(ValueError, match=f"grouped_matmul_all_reduce_rms_norm: {message}"):
                ops.grouped_matmul_all_reduce_rms_norm(*given, team, **options)

    weft.simulate(main, 1)


# --- compiled -----------------------------------------------------------------------------------------------------------


@pytest.mark.triton_internals
@pytest.mark.parametrize(
    ("arch", "two_shot", "deferred", "world_size"),
    [
        ("sm_90", False, True, 2),
        *(
            pytest.param(arch, two_shot, deferred, world_size, marks=SWEEP)
            for arch in ("sm_80", "sm_90", "sm_100", "gfx942")
            for two_shot in (False, True)
            for deferred in (False, True)
            for world_size in (2, 4)
        ),
    ],
)
def test_the_norm_of_pairs_compiles(arch, two_shot, deferred, world_size, tmp_path):
    made = norm_of_pairs(arch, two_shot, deferred, world_size)
    check_compiles(made, arch)
    assert made.metadata.shared <= SHARED[arch]
    if arch == "sm_90":
        assert stack_bytes(made, tmp_path) <= 16
        assert "ld.global.v4.b32" in made.asm["ptx"]  # 16 bytes of a choice's row a thread


@pytest.mark.triton_internals
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=SWEEP)])
def test_the_norm_of_pairs_writes_fp8_of_the_sums_of_16_bits(deferred, world_size, tmp_path):
    rows, halves = (norm_of_pairs("sm_90", False, deferred, world_size, fp8) for fp8 in (True, False))
    assert sums_of(rows) == sums_of(halves) != []
    assert stack_bytes(rows, tmp_path) <= 16


def norm_of_pairs(arch, two_shot, deferred, world_size, fp8=False):
    """The compiled kernel that sums pairs; fp8: with normed rows in fp8."""
    op, caps, name = find_op("all_reduce_rms_norm"), caps_of(arch), "two_shot" if two_shot else "one_shot"
    here = machine(caps, world_size)
    rows, ints = torch.zeros(16, dtype=torch.bfloat16), torch.zeros(16, dtype=torch.int32)
    format = RowFormat("group") if fp8 else None
    plan = push_of(op.default(name, op.call_of(((64, 2048),), rows.dtype, here), here), 2, format)
    normed, written = rows, None
    if fp8:
        normed, written = rows.to(E4M3), rows_argument(torch.zeros(16, 64).t(), format, rows.dtype, 128)
    pairs = PairSum(rows, tl.constexpr(8), ints, rows, 64, 131, rows, rows, 129)
    return compiled(
        all_reduce_rms_norm_kernel, pairs, rows, 64, rows, ints, a_view(world_size),
        Norm(normed, rows, rows, 1e-6, torch.zeros(4), ints, written), arch=arch,
        BLOCK=triton.next_power_of_2(plan.row_bytes // 2), ROWS=triton.next_power_of_2(world_size),
        TRANSPORT="lamport", WIDTH=2048, PART=plan.row_bytes // 2, TWO_SHOT=two_shot, DEFERRED=deferred,
        num_warps=plan.num_warps, **launch_options(caps),
        **({"maxnreg": registers_of(plan, world_size)} if arch.startswith("sm_") else {}),
    )  # fmt: skip
